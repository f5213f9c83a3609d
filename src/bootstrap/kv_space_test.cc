// What the key-value space owes each client whatever others do.
#include "bootstrap/kv_space.h"

#include <gtest/gtest.h>

namespace paceline::bootstrap {
namespace {

class Space : public ::testing::Test {
 protected:
  /// A client that has proven itself and has read all so far.
  void enter(int id) {
    Nonce challenge{}, nonce{};
    challenge[0] = static_cast<std::byte>(id);
    space.enter(id, challenge);
    EXPECT_TRUE(says(id, {.kind = FrameKind::kProof,
                          .nonce = nonce,
                          .mac = client_proof(kSecret, challenge, nonce)}));
    EXPECT_TRUE(space.is_proven(id));
    space.output(id).clear();
  }
  Status says(int id, const KvFrame& frame) {
    std::vector<std::byte> bytes;
    append_frame(frame, bytes);
    return space.take(id, bytes);
  }
  Status put(int id, const std::string& key, const std::string& value) {
    return says(id, {.kind = FrameKind::kPut, .key = key, .value = value});
  }
  Status get(int id, const std::string& key) {
    return says(id, {.kind = FrameKind::kGet, .key = key});
  }
  /// The values that a client reads, of the keys that it asked for.
  std::vector<std::string> reads(int id) {
    std::vector<std::string> values;
    while (true) {
      const auto frame = take_frame(space.output(id));
      EXPECT_TRUE(frame.is_ok());
      if (!frame || !*frame) return values;
      EXPECT_EQ((*frame)->kind, FrameKind::kValue);
      values.push_back((*frame)->value);
    }
  }

  const std::vector<std::byte> kSecret = std::vector<std::byte>(16, std::byte{7});
  KvSpace space{kSecret, {.memory = 2000, .unread = 500, .awaited = 4}};
};

TEST_F(Space, WhatIsTooLargeForItTakesNoRoomOfOthers) {
  enter(1);
  enter(2);
  EXPECT_EQ(put(1, "large", std::string(1950, 'x')).code(), Code::kResourceExhausted);
  space.leave(1);
  EXPECT_TRUE(put(2, "small", "value"));
  EXPECT_TRUE(get(2, "small"));
  EXPECT_EQ(reads(2), std::vector<std::string>{"value"});
  // And its bound holds.
  EXPECT_TRUE(put(2, "more", std::string(1800, 'x')));
  EXPECT_EQ(put(2, "last", std::string(100, 'x')).code(), Code::kResourceExhausted);
}

TEST_F(Space, AskedTwiceIsAnsweredOnceAndCountsOnce) {
  enter(1);
  enter(2);
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(get(1, "key"));
  ASSERT_TRUE(put(2, "key", "value"));
  EXPECT_EQ(space.told(), std::vector<int>{1});
  EXPECT_EQ(reads(1), std::vector<std::string>{"value"});
}

TEST_F(Space, KeysThatAreAwaitedAreCounted) {
  enter(1);
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(get(1, std::to_string(i)));
  EXPECT_EQ(get(1, "one more").code(), Code::kResourceExhausted);
  space.leave(1);
  enter(2);
  EXPECT_TRUE(put(2, "one more", "value"));
  EXPECT_TRUE(put(2, "0", "value"));
  EXPECT_TRUE(space.told().empty()) << "of one that has left";
}

TEST_F(Space, WhoReadsNothingOfWhatItWaitedForIsFoundAndOthersGoOn) {
  enter(1);
  enter(2);
  enter(3);
  const std::string value(300, 'x');
  for (const char* key : {"a", "b", "c"}) {
    ASSERT_TRUE(get(1, key));
    ASSERT_TRUE(get(2, key));
    EXPECT_FALSE(space.is_deaf(1));
    ASSERT_TRUE(put(3, key, value));
    EXPECT_EQ(reads(2).size(), 1U);
  }
  EXPECT_TRUE(space.is_deaf(1));
  EXPECT_FALSE(space.is_deaf(2));
  EXPECT_EQ(reads(1).size(), 2U) << "nothing more waits for it than its bound and one frame";
}

TEST_F(Space, WhoAsksAndReadsNothingIsRefused) {
  enter(1);
  ASSERT_TRUE(put(1, "key", std::string(300, 'x')));
  EXPECT_TRUE(get(1, "key"));
  EXPECT_TRUE(get(1, "key"));
  EXPECT_EQ(get(1, "key").code(), Code::kResourceExhausted);
  EXPECT_EQ(reads(1).size(), 2U) << "its bound and one frame";
}

TEST_F(Space, AnotherWithTheSameNumberBeginsAnew) {
  enter(1);
  ASSERT_TRUE(get(1, "key"));
  const std::vector<std::byte> half(3, std::byte{1});
  ASSERT_TRUE(space.take(1, half));
  space.leave(1);
  space.enter(1, Nonce{});
  EXPECT_FALSE(space.is_proven(1));
  EXPECT_FALSE(space.is_within_a_frame(1));
  EXPECT_EQ(get(1, "key").code(), Code::kUnauthenticated);
  enter(2);
  ASSERT_TRUE(put(2, "key", "value"));
  EXPECT_TRUE(space.told().empty());
}

}  // namespace
}  // namespace paceline::bootstrap
