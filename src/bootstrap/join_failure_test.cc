// What a rank hears of a failed join, and what it tells its neighbours of where it heard it; their part is played here.
#include <gtest/gtest.h>

#include "bootstrap/join_machine.h"
#include "bootstrap/kv_store.h"
#include "wire/fake/fake_network.h"

namespace paceline::bootstrap {
namespace {

/// Two ranks, of which one is a JoinMachine and the other says what the test wants.
class Pair {
 public:
  explicit Pair(Rank rank)
      : other_(1 - rank),
        own_channel_(network_.join(rank, 2, "here")),
        channel_(network_.join(other_, 2, "there")) {
    JoinSpec spec;
    spec.rank = rank;
    spec.size = 2;
    spec.self.host = "here";
    spec.self.address = "fake=" + std::to_string(rank);
    spec.prefix = "job/";
    spec.build = "test";
    spec.timeout = spec.deadline = 60 * kSecond;
    const Record record{.build = "test",
                        .wire = wire::kWireVersion,
                        .size = 2,
                        .host = "there",
                        .address = "fake=" + std::to_string(other_)};
    EXPECT_TRUE(space_.put("job/r" + std::to_string(other_), encode_record(record)).is_ok());
    machine_ = std::make_unique<JoinMachine>(
        std::move(spec), space_, *own_channel_,
        [](Rank, const std::string&, const std::string&) { return Status(); });
  }

  void say(const JoinNote& note) { channel_->post_note(1 - other_, encode_note(note)); }
  void put_into_space(const JoinNote& note) {
    const auto bytes = encode_note(note);
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    EXPECT_TRUE(space_.put("job/failed", std::string(text)).is_ok());
  }

  /// Until the machine has ended, or for so long.
  void run(Time longest = 10 * kSecond) {
    const Time end = network_.now() + longest;
    while (network_.now() < end && !ended_) {
      ended_ = machine_->progress(network_.now());
      wire::Events events;
      channel_->progress(network_.now(), events);
      for (const auto& note : events.notes) {
        auto decoded = decode_note(note.bytes);
        ASSERT_TRUE(decoded) << decoded.status().message();
        heard_.push_back(*decoded);
      }
      const Time next = std::min(
          {network_.next_event_time(), machine_->next_timer(), channel_->next_timer(), end});
      network_.advance(std::max(next, network_.now()));
    }
  }

  const JoinMachine& machine() { return *machine_; }
  /// The failures among what the other rank was told.
  std::vector<JoinNote> failures() {
    std::vector<JoinNote> found;
    for (const auto& note : heard_) {
      if (note.kind == NoteKind::kFailed) found.push_back(note);
    }
    return found;
  }

 private:
  wire::FakeNetwork network_{wire::FakeOptions()};
  Rank other_;
  std::unique_ptr<wire::FakeChannel> own_channel_, channel_;
  MemoryKeyValue space_{std::make_shared<MemoryKeyValue::Space>()};
  std::unique_ptr<JoinMachine> machine_;
  std::vector<JoinNote> heard_;
  bool ended_ = false;
};

JoinNote failure(const std::string& address = "", bool is_hearsay = false) {
  return {.kind = NoteKind::kFailed,
          .address = address,
          .code = Code::kMismatch,
          .text = "the ranks differ",
          .is_hearsay = is_hearsay};
}

TEST(JoinFailure, WhatStandsInTheSpaceIsHeardAtOnceAndToldAsReadThere) {
  Pair pair(0);
  pair.say({.kind = NoteKind::kHello, .host = "there", .address = "fake=1", .build = "test"});
  pair.run(5 * kMillisecond);
  EXPECT_TRUE(pair.machine().status().is_ok());
  pair.put_into_space(failure());
  pair.run();
  EXPECT_EQ(pair.machine().status().code(), Code::kMismatch);
  EXPECT_TRUE(pair.machine().is_hearsay());
  ASSERT_EQ(pair.failures().size(), 1U);
  EXPECT_TRUE(pair.failures()[0].is_hearsay);

  Pair late(1);
  late.put_into_space(failure());
  late.run(kMillisecond);
  EXPECT_EQ(late.machine().status().code(), Code::kMismatch)
      << "whoever put it there is about to leave, and its space with it";
  EXPECT_TRUE(late.machine().is_hearsay());
}

TEST(JoinFailure, WhatANeighbourTellsIsAsGoodAsWhereItHeardIt) {
  for (const bool is_hearsay : {false, true}) {
    for (const std::string address : {"", "fake=9"}) {
      Pair pair(1);
      pair.say(failure(address, is_hearsay));
      pair.run();
      EXPECT_EQ(pair.machine().status().message(), "the ranks differ");
      EXPECT_EQ(pair.machine().is_hearsay(), is_hearsay);
      EXPECT_EQ(pair.machine().contradicted_by(), address);
      ASSERT_EQ(pair.failures().size(), 1U);
      EXPECT_EQ(pair.failures()[0].is_hearsay, is_hearsay);
      EXPECT_EQ(pair.failures()[0].address, address);
    }
  }
}

}  // namespace
}  // namespace paceline::bootstrap
