#include "bootstrap/starts.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ctime>
#include <memory>

#include "bootstrap/kv_store.h"

namespace paceline::bootstrap {
namespace {

int64_t now_us() { return static_cast<int64_t>(std::time(nullptr)) * 1'000'000; }

class StartsTest : public testing::Test {
 protected:
  std::shared_ptr<MemoryKeyValue::Space> entries = std::make_shared<MemoryKeyValue::Space>();
  std::shared_ptr<KeyValue> space = std::make_shared<MemoryKeyValue>(entries);
};

TEST_F(StartsTest, RankZeroTakesTheNextNumberAndTheOthersTheNewest) {
  for (int number = 0; number < 3; ++number) {
    Starts root(space, "job/");
    Starts late(space, "job/");
    auto newer = late.find_newest();
    ASSERT_TRUE(newer);
    EXPECT_EQ(late.prefix(), number == 0 ? "job/0/" : "job/" + std::to_string(number - 1) + "/");
    ASSERT_TRUE(root.begin());
    EXPECT_EQ(root.prefix(), "job/" + std::to_string(number) + "/");
    newer = late.find_newest();
    ASSERT_TRUE(newer);
    EXPECT_EQ(*newer, number > 0);  // the first one is what it took for it before
    EXPECT_EQ(late.prefix(), root.prefix());
    newer = late.find_newest();
    ASSERT_TRUE(newer);
    EXPECT_FALSE(*newer);
  }
}

TEST_F(StartsTest, WhoWaitsForARankOfAnOldStartHearsOfTheNewOne) {
  Starts root(space, "job/");
  ASSERT_TRUE(root.begin());
  Starts waiting(space, "job/");
  ASSERT_TRUE(waiting.find_newest());
  auto watched = waiting.watched();
  EXPECT_TRUE(watched->poll(kSecond));
  ASSERT_TRUE(watched->put("job/0/r1", "here"));
  EXPECT_EQ(entries->entries.at("job/0/r1"), "here");
  ASSERT_TRUE(Starts(space, "job/").begin());
  const auto asked = entries->gets;
  EXPECT_TRUE(
      watched->poll(kSecond + kMillisecond));  // a space of a thousand ranks is asked rarely
  EXPECT_EQ(entries->gets, asked);
  EXPECT_EQ(watched->poll(2 * kSecond).code(), Code::kAborted);
  ASSERT_TRUE(waiting.find_newest());
  EXPECT_TRUE(watched->poll(3 * kSecond));
}

TEST_F(StartsTest, AStartIsOldWhereItWasMadeBeforeThisProcess) {
  ASSERT_TRUE(Starts(space, "job/").begin());
  const auto is_old = [&](int64_t began_us) {
    Starts starts(space, "job/", began_us);
    EXPECT_TRUE(starts.find_newest());
    return starts.is_older_than_this_process();
  };
  EXPECT_FALSE(is_old(process_began_us()));
  EXPECT_FALSE(is_old(now_us() - 1'000'000));
  EXPECT_TRUE(is_old(now_us() + 60'000'000));
  EXPECT_FALSE(is_old(0));
  EXPECT_FALSE(Starts(space, "another/", now_us() + 60'000'000).is_older_than_this_process());
}

TEST(ProcessBegan, IsTheForksTimeInAChild) {
  const int64_t mine = process_began_us();
  EXPECT_GT(mine, now_us() - 86'400'000'000);
  EXPECT_LE(mine, now_us() + 1'000'000);
  const pid_t child = ::fork();
  // In hundredths of a second, each rounded on its own.
  if (child == 0) ::_exit(process_began_us() >= mine - 20'000 ? 0 : 1);
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace paceline::bootstrap
