#include "gpu/launcher.h"

#include <gtest/gtest.h>

#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "gpu/flags.h"

namespace paceline::gpu {
namespace {

/// A launcher whose steps write down what they do.
class Log {
 public:
  Log() : launcher({[] {}, [this](const Status& s) { note(s.message()); }}) {}

  void note(const std::string& what) {
    const std::lock_guard lock(mutex_);
    lines_.push_back(what);
  }
  std::vector<std::string> lines() {
    const std::lock_guard lock(mutex_);
    return lines_;
  }
  /// A step that waits for `word` to be `value`, as those of the path do.
  std::function<Status()> waits(const std::string& name, const uint32_t* word, uint32_t value) {
    return [this, name, word, value]() -> Status {
      PACELINE_ASSIGN(const bool there, launcher.wait_for(word, value));
      note(name + (there ? "" : " on its stream"));
      return Status::ok();
    };
  }
  Launcher::Early early(uint64_t sequence, uint64_t after, const std::string& name,
                        const uint32_t* word, uint32_t value) {
    return {sequence, [word, value] { return reached(Flags::load(word), value); },
            waits(name, word, value), after};
  }
  bool sees(size_t count) {
    for (int look = 0; look < 20000 && lines().size() < count; ++look)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return lines().size() >= count;
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> lines_;

 public:
  Launcher launcher;
};

using Lines = std::vector<std::string>;

TEST(Launcher, WhatIsReadyEarlyDoesNotWaitForItsTurn) {
  uint32_t first = 0, later = 0;
  Log log;
  log.launcher.push(1, log.waits("1", &first, 1));
  log.launcher.push(
      2,
      [&]() -> Status {
        PACELINE_RETURN_IF_ERROR(log.launcher.run_early(2));
        return log.waits("2", &first, 1)();
      },
      {log.early(2, 0, "part 1 of 2", &later, 1), log.early(2, 0, "part 2 of 2", &later, 2)});
  Flags::store(&later, 1);
  ASSERT_TRUE(log.sees(1));
  EXPECT_EQ(log.lines(), (Lines{"part 1 of 2"}));
  EXPECT_EQ(log.launcher.launched(), 0U);
  Flags::store(&first, 1);
  ASSERT_TRUE(log.sees(2));
  // The second part has its operation wait.
  EXPECT_EQ(log.lines().back(), "1");
  Flags::store(&later, 2);
  log.launcher.wait_launched(2);
  EXPECT_EQ(log.lines(), (Lines{"part 1 of 2", "1", "part 2 of 2", "2"}));
}

TEST(Launcher, WhatIsEarlyWaitsOnItsStreamAheadOfWhatCameBefore) {
  uint32_t never = 0;
  Log log;
  log.launcher.push(1, log.waits("1", &never, 1));
  const auto steps = [&](uint64_t sequence) {
    return [&, sequence]() -> Status {
      PACELINE_RETURN_IF_ERROR(log.launcher.run_early(sequence));
      return log.waits(std::to_string(sequence), &never, 1)();
    };
  };
  log.launcher.push(2, steps(2), {log.early(2, 0, "part of 2", &never, 1)});
  // The first has pieces on the same stream, which must not stand behind.
  log.launcher.push(3, steps(3), {log.early(3, 1, "part of 3", &never, 1)});
  log.launcher.push(4, steps(4), {log.early(4, 0, "part of 4", &never, 1)});
  log.launcher.catch_up(3);
  EXPECT_EQ(log.lines(), (Lines{"part of 2 on its stream", "1 on its stream",
                                "part of 3 on its stream", "2 on its stream", "3 on its stream"}));
  log.launcher.halt(1);
  EXPECT_EQ(log.launcher.launched(), 3U);
}

TEST(Launcher, WhatMayNotWaitOnItsStreamIsNotAhead) {
  uint32_t never = 0;
  Log log;
  log.launcher.push(1, log.waits("1", &never, 1));
  auto part = log.early(2, 0, "part of 2", &never, 1);
  part.may_wait = [] { return false; };
  log.launcher.push(2,
                    [&]() -> Status {
                      PACELINE_RETURN_IF_ERROR(log.launcher.run_early(2));
                      return log.waits("2", &never, 1)();
                    },
                    {part});
  log.launcher.catch_up(2);
  EXPECT_EQ(log.lines(), (Lines{"1 on its stream", "part of 2 on its stream", "2 on its stream"}));
  log.launcher.halt(1);
}

TEST(Launcher, AnEarlyStepThatFailsEndsAll) {
  uint32_t never = 0;
  Log log;
  log.launcher.push(1, log.waits("1", &never, 1));
  log.launcher.push(
      2, [] { return Status::ok(); },
      {{2, [] { return true; }, [] { return Status(Code::kInternal, "the GPU is gone"); }}});
  ASSERT_TRUE(log.sees(1));
  EXPECT_EQ(log.lines(), (Lines{"the GPU is gone"}));
  log.launcher.halt(1);
  log.launcher.wait_launched(2);
  EXPECT_EQ(log.launcher.launched(), 0U);
}

}  // namespace
}  // namespace paceline::gpu
