#include "base/run_queue.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <string_view>

#include "base/cores.h"

namespace paceline {
namespace {

/// The count of "0.25 1.02 1.58 3/80 18994" before the slash (proc_loadavg(5)); 0: there is none.
int running_in(std::string_view line) {
  const auto slash = line.find('/');
  if (slash == std::string_view::npos) return 0;
  const auto blank = line.rfind(' ', slash);
  if (blank == std::string_view::npos) return 0;
  int running = 0;
  const char* end = line.data() + slash;
  const auto [stopped, error] = std::from_chars(line.data() + blank + 1, end, running);
  return error == std::errc() && stopped == end ? running : 0;
}

}  // namespace

int others_running() {
  const int fd = open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return -1;
  std::array<char, 128> text{};
  const ssize_t n = read(fd, text.data(), text.size());
  close(fd);
  // Whoever reads it runs, and is in it.
  return n <= 0 ? -1 : running_in({text.data(), static_cast<size_t>(n)}) - 1;
}

bool cores_are_taken() { return others_running() >= machine_cores(); }

}  // namespace paceline
