// For tests: what is logged, and how often.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdio>
#include <string>
#include <string_view>

#include "base/fd.h"
#include "base/log.h"

namespace paceline::testing {

/// While it lives, standard error goes to a file; what comes once a process may come once more.
class Said {
 public:
  Said() : before_(::dup(STDERR_FILENO)), file_(std::tmpfile()) {
    EXPECT_NE(file_, nullptr);
    ::dup2(::fileno(file_), STDERR_FILENO);
    log::forget_keys();
  }
  ~Said() {
    ::dup2(before_.get(), STDERR_FILENO);
    std::fclose(file_);
  }
  Said(const Said&) = delete;
  Said& operator=(const Said&) = delete;
  [[nodiscard]] std::string text() const {
    std::string all;
    std::array<char, 4096> some{};
    std::rewind(file_);
    while (const auto n = std::fread(some.data(), 1, some.size(), file_))
      all.append(some.data(), n);
    return all;
  }

 private:
  Fd before_;
  std::FILE* file_;
};

/// How often `sentence` stands in `text`.
inline std::size_t times(std::string_view sentence, std::string_view text) {
  std::size_t count = 0;
  for (auto at = text.find(sentence); at != std::string_view::npos;
       at = text.find(sentence, at + 1))
    ++count;
  return count;
}

}  // namespace paceline::testing
