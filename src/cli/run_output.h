// What ranks print: whole lines, optionally marked with their rank, or written to files.
#pragma once

#include <cstdio>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"

namespace paceline::cli {

/// One stream of one rank. Text comes in as it is read and goes out line by line, so that lines of
/// different ranks never mix. A carriage return ends a line too (progress bars).
class OutputStream {
 public:
  /// `prefix` goes in front of every line ("" for none).
  OutputStream(int descriptor, std::string prefix)
      : descriptor_(descriptor), prefix_(std::move(prefix)) {}
  /// Also writes everything, without prefix, to this file.
  Status tee(const std::string& path);
  void write(std::string_view text);
  /// Writes an unfinished line as it stands: at the end, or after silence (a prompt).
  void flush();
  /// The first failure to write (disk full, closed pipe); later text is dropped.
  [[nodiscard]] const Status& status() const { return status_; }
  /// The pipe that we write to has no reader any more.
  [[nodiscard]] bool reader_gone() const { return reader_gone_; }

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  void emit(std::string_view text);
  int descriptor_;
  std::string prefix_;
  std::string pending_;
  bool at_line_start_ = true, after_return_ = false;
  bool reader_gone_ = false;
  std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
  Status status_;
};

}  // namespace paceline::cli
