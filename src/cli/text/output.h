// What ranks print: whole lines, optionally marked with their rank, or written to files.
#pragma once

#include <cstdio>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"

namespace paceline::cli {

/// Where the lines of all ranks leave: standard output or standard error of the launcher. Text waits here until its reader
/// takes it, for who starts a job must be able to end it while a pager holds its output up.
class Outlet {
 public:
  explicit Outlet(int descriptor);
  Outlet(const Outlet&) = delete;
  Outlet& operator=(const Outlet&) = delete;

  /// `writer` tells whose text it is: an unfinished line of another one is ended before it.
  void put(std::string_view text, const void* writer = nullptr);
  /// Whether the last text was this writer's, so that its unfinished line can go on.
  [[nodiscard]] bool was_last(const void* writer) const { return writer_ == writer; }
  /// Ends a line that nobody will go on with.
  void end_line();
  /// Writes what leaves without waiting.
  void write_some();
  [[nodiscard]] int descriptor() const { return descriptor_; }
  [[nodiscard]] bool is_empty() const { return begin_ == waiting_.size(); }
  /// So much waits that no more should be read from the ranks, whose own writes then wait.
  [[nodiscard]] bool is_full() const;
  /// The first failure to write (disk full, closed pipe); later text is dropped.
  [[nodiscard]] const Status& status() const { return status_; }
  /// The pipe that we write to has no reader any more.
  [[nodiscard]] bool reader_gone() const { return status_.code() == Code::kPeerLost; }

 private:
  int descriptor_;
  std::size_t at_once_;
  std::string waiting_;
  std::size_t begin_ = 0;  ///< of what has not left yet
  const void* writer_ = nullptr;
  bool at_line_start_ = true;
  Status status_;
};

/// One stream of one rank. Text comes in as it is read and goes out line by line, so that lines of
/// different ranks never mix. A carriage return ends a line too (progress bars). Where part of a line
/// has gone out (flush(), or it is longer than 64 KiB) and another stream speaks, the line ends there
/// and what follows of it is a line of its own.
class OutputStream {
 public:
  /// `outlet` must outlive the stream; `prefix` goes in front of every line ("" for none).
  OutputStream(Outlet& outlet, std::string prefix) : outlet_(outlet), prefix_(std::move(prefix)) {}
  /// Also writes everything, without prefix, to this file (below --output-filename's folder).
  Status tee(const std::string& path);
  void write(std::string_view text);
  /// Passes on an unfinished line as it stands: at the end, or after silence (a prompt).
  void flush();
  /// The first failure to write the file (disk full); later text is missing there.
  [[nodiscard]] const Status& status() const { return status_; }
  [[nodiscard]] Outlet& outlet() { return outlet_; }

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  void emit(std::string_view text);
  Outlet& outlet_;
  std::string prefix_;
  std::string pending_;
  bool at_line_start_ = true, after_return_ = false;
  std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
  Status status_;
};

}  // namespace paceline::cli
