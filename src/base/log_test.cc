// What standard error holds of it: the process's own, on a file while a test writes.
#include "base/log.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace paceline::log {
namespace {

/// What `body` writes to descriptor 2.
std::string written(const std::function<void()>& body) {
  std::fflush(stderr);
  const int file = memfd_create("log_test", MFD_CLOEXEC);
  const int before = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0);
  EXPECT_GE(dup2(file, STDERR_FILENO), 0);
  body();
  std::fflush(stderr);
  dup2(before, STDERR_FILENO);
  std::string text(static_cast<std::size_t>(lseek(file, 0, SEEK_END)), '\0');
  EXPECT_EQ(pread(file, text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
  close(file);
  close(before);
  return text;
}

class Log : public testing::Test {
 protected:
  // As a process begins.
  void TearDown() override {
    set_level(Level::kWarning);
    set_rank(-1);
  }

  static void one_of_each() {
    debug("d{}", 1);
    info("i{}", 2);
    warning("w{}", 3);
    error("e{}", 4);
  }
};

TEST_F(Log, LinesFromTheLevelOn) {
  const std::string d = "[paceline] d1\n";
  const std::string i = "[paceline] i2\n";
  const std::string w = "[paceline] warning: w3\n";
  const std::string e = "[paceline] error: e4\n";
  EXPECT_EQ(written(one_of_each), w + e) << "unless a level is set";
  const std::pair<Level, std::string> expected[] = {{Level::kTrace, d + i + w + e},
                                                    {Level::kDebug, d + i + w + e},
                                                    {Level::kInfo, i + w + e},
                                                    {Level::kWarning, w + e},
                                                    {Level::kError, e},
                                                    {Level::kOff, ""}};
  for (const auto& [level, lines] : expected) {
    set_level(level);
    EXPECT_EQ(written(one_of_each), lines) << static_cast<int>(level);
  }
}

TEST_F(Log, ALevelIsEnabledFromTheOneThatIsSetOn) {
  set_level(Level::kOff);
  EXPECT_FALSE(enabled(Level::kError));
  set_level(Level::kError);
  EXPECT_TRUE(enabled(Level::kError));
  EXPECT_FALSE(enabled(Level::kWarning));
}

TEST_F(Log, LevelsHaveTheSettingsNames) {
  EXPECT_EQ(level_named("trace"), Level::kTrace);
  EXPECT_EQ(level_named("error"), Level::kError);
  EXPECT_EQ(level_named("off"), Level::kOff);
  EXPECT_EQ(level_named("loud"), Level::kWarning);
}

TEST_F(Log, TheRankStandsInFront) {
  set_level(Level::kInfo);
  set_rank(0);
  EXPECT_EQ(written([] { info("text"); }), "[paceline 0] text\n");
  set_rank(1234);
  EXPECT_EQ(written([] { error("{} text", "a"); }), "[paceline 1234] error: a text\n");
  EXPECT_EQ(written([] { info("{}", "{braces} stay"); }), "[paceline 1234] {braces} stay\n");
}

TEST_F(Log, AKeyIsFirstOnce) {
  EXPECT_TRUE(first("log_test one"));
  EXPECT_FALSE(first("log_test one"));
  EXPECT_TRUE(first("log_test another"));
  EXPECT_FALSE(first("log_test one"));
  EXPECT_FALSE(first(std::string("log_test ") + "another")) << "by its text, not its address";
}

TEST_F(Log, AKeyIsFirstForOneOfManyThreads) {
  constexpr int kThreads = 8;
  for (int round = 0; round < 50; ++round) {
    std::atomic<int> waiting = kThreads;
    std::atomic<int> firsts = 0;
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&] {
        --waiting;
        while (waiting > 0) std::this_thread::yield();
        if (first("log_test round " + std::to_string(round))) ++firsts;
      });
    }
    for (auto& thread : threads) thread.join();
    ASSERT_EQ(firsts, 1);
  }
}

TEST_F(Log, ThreadsLinesStayWhole) {
  set_level(Level::kInfo);
  const std::string body(300, 'x');
  const auto text = written([&] {
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t)
      threads.emplace_back([&] {
        for (int i = 0; i < 200; ++i) info("{}", body);
      });
    for (auto& thread : threads) thread.join();
  });
  const std::string line = "[paceline] " + body + "\n";
  std::string expected;
  for (int i = 0; i < 800; ++i) expected += line;
  EXPECT_TRUE(text == expected);
}

}  // namespace
}  // namespace paceline::log
