#include "cli/run_output.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace paceline::cli {
namespace {

constexpr std::size_t kLongestLine = 64 * 1024;  // longer ones are written in parts

Status write_all(int descriptor, std::string_view text) {
  while (!text.empty()) {
    auto n = ::write(descriptor, text.data(), text.size());
    if (n >= 0) {
      text.remove_prefix(static_cast<std::size_t>(n));
    } else if (errno == EAGAIN) {
      pollfd waiting{descriptor, POLLOUT, 0};  // a caller's non-blocking pipe: its reader is slow
      ::poll(&waiting, 1, 1000);
    } else if (errno != EINTR) {
      return {errno == EPIPE ? Code::kPeerLost : Code::kUnavailable,
              fmt::format("output can't be written: {}", std::strerror(errno))};
    }
  }
  return {};
}

}  // namespace

Status OutputStream::tee(const std::string& path) {
  path_ = path;
  file_.reset(std::fopen(path.c_str(), "we"));
  if (!file_) {
    return {Code::kInvalidArgument,
            fmt::format("output file '{}' can't be written: {}", path, std::strerror(errno))};
  }
  return {};
}

void OutputStream::write(std::string_view text) {
  if (file_ && (std::fwrite(text.data(), 1, text.size(), file_.get()) != text.size() ||
                std::fflush(file_.get()) != 0)) {
    status_ = Status(Code::kResourceExhausted,
                     fmt::format("output file '{}': {}", path_, std::strerror(errno)));
    file_.reset();
  }
  pending_.append(text);
  auto end = pending_.find_last_of("\r\n");
  if (end == std::string::npos && pending_.size() > kLongestLine) end = pending_.size() - 1;
  if (end == std::string::npos) return;
  emit(std::string_view(pending_).substr(0, end + 1));
  pending_.erase(0, end + 1);
}

void OutputStream::flush() {
  if (pending_.empty()) return;
  emit(pending_);
  pending_.clear();
}

void OutputStream::emit(std::string_view text) {
  std::string marked;
  if (!prefix_.empty()) {
    for (char c : text) {
      if (at_line_start_ && !(after_return_ && c == '\n')) marked += prefix_;
      marked += c;
      after_return_ = c == '\r';
      at_line_start_ = c == '\n' || c == '\r';
    }
    text = marked;
  }
  if (descriptor_ < 0) return;
  auto written = write_all(descriptor_, text);
  if (!written.is_ok()) {
    reader_gone_ = written.code() == Code::kPeerLost;
    status_ = written;
    descriptor_ = -1;
  }
}

}  // namespace paceline::cli
