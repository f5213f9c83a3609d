#include "cli/text/output.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

#include "cli/file_errors.h"
#include "cli/standard_output.h"

namespace paceline::cli {
namespace {

constexpr std::size_t kLongestLine = 64 * 1024;  // longer ones are written in parts
constexpr std::size_t kFull = 1 << 20;
// A pipe that has room takes so much without waiting. A terminal promises less.
constexpr std::size_t kPipeAtOnce = PIPE_BUF;
constexpr std::size_t kTerminalAtOnce = 512;

std::string file_error(const std::string& path) {
  return unwritable(fmt::format("output file {} (--output-filename)", path), errno, "folder");
}

}  // namespace

Outlet::Outlet(int descriptor)
    : descriptor_(descriptor),
      at_once_(::isatty(descriptor) != 0 ? kTerminalAtOnce : kPipeAtOnce) {}

void Outlet::put(std::string_view text, const void* writer) {
  if (text.empty() || !status_.is_ok()) return;
  if (!was_last(writer)) end_line();
  writer_ = writer;
  waiting_.append(text);
  at_line_start_ = text.back() == '\n' || text.back() == '\r';
}

void Outlet::end_line() {
  if (!at_line_start_ && status_.is_ok()) waiting_ += '\n';
  at_line_start_ = true;
}

bool Outlet::is_full() const { return waiting_.size() - begin_ >= kFull; }

// The descriptor is the caller's: whether it waits is not ours to change, so it is asked before each write.
void Outlet::write_some() {
  while (!is_empty()) {
    pollfd ready{descriptor_, POLLOUT, 0};
    if (::poll(&ready, 1, 0) <= 0 || ready.revents == 0) break;
    auto n = ::write(descriptor_, waiting_.data() + begin_,
                     std::min(waiting_.size() - begin_, at_once_));
    if (n >= 0) {
      begin_ += static_cast<std::size_t>(n);
    } else if (errno == EAGAIN) {
      break;
    } else if (errno != EINTR) {
      const int error = errno;
      status_ = Status(error == EPIPE ? Code::kPeerLost : Code::kUnavailable,
                       unwritable_stream(descriptor_, error));
      begin_ = waiting_.size();
    }
  }
  if (!is_empty() && begin_ < kFull) return;
  waiting_.erase(0, begin_);
  begin_ = 0;
}

Status OutputStream::tee(const std::string& path) {
  path_ = path;
  file_.reset(std::fopen(path.c_str(), "we"));
  if (!file_) {
    return {Code::kInvalidArgument, file_error(path)};
  }
  return {};
}

void OutputStream::write(std::string_view text) {
  if (file_ && (std::fwrite(text.data(), 1, text.size(), file_.get()) != text.size() ||
                std::fflush(file_.get()) != 0)) {
    status_ = Status(Code::kResourceExhausted, file_error(path_));
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
  if (!at_line_start_ && !outlet_.was_last(this)) {
    at_line_start_ = true;  // another stream's text has ended the line
    after_return_ = false;
    if (text.starts_with('\n')) text.remove_prefix(1);
    if (text.empty()) return;
  }
  if (prefix_.empty()) {
    outlet_.put(text, this);
    at_line_start_ = text.back() == '\n' || text.back() == '\r';
    return;
  }
  std::string marked;
  for (char c : text) {
    if (at_line_start_ && !(after_return_ && c == '\n')) marked += prefix_;
    marked += c;
    after_return_ = c == '\r';
    at_line_start_ = c == '\n' || c == '\r';
  }
  outlet_.put(marked, this);
}

}  // namespace paceline::cli
