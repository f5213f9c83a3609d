// The channel's contract, between real processes and by every way through.
#include <sys/mman.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "wire/shm/testing.h"

namespace paceline::wire::shm::testing {
namespace {

std::vector<std::byte> random_message(uint64_t seed, std::size_t bytes) {
  std::vector<std::byte> data(bytes);
  std::mt19937_64 random(seed);
  std::size_t at = 0;
  for (; at + 8 <= bytes; at += 8) {
    const uint64_t word = random();
    std::memcpy(data.data() + at, &word, 8);
  }
  for (; at < bytes; ++at) data[at] = static_cast<std::byte>(random());
  return data;
}

/// Checks the rules of Sink and keeps what came.
class Collector final : public Sink {
 public:
  explicit Collector(std::size_t total) : data(total), seen(total) {}
  void consume(uint64_t offset, std::span<const std::byte> piece) override {
    ASSERT_EQ(offset % kPieceAlign, 0U);
    ASSERT_LE(offset + piece.size(), data.size());
    ASSERT_TRUE(offset + piece.size() == data.size() || piece.size() % kPieceAlign == 0);
    for (std::size_t i = 0; i < piece.size(); ++i) {
      ASSERT_EQ(seen[offset + i], 0) << "byte " << offset + i << " came twice";
      seen[offset + i] = 1;
      data[offset + i] = piece[i];
    }
  }
  std::vector<std::byte> data;
  std::vector<char> seen;
};

/// The ways bytes can take; every one is forced by options.
struct Way {
  const char* name;
  void (*tweak)(ShmOptions&);
  bool arena;  ///< buffers come from the allocator
};
const Way kWays[] = {
    {"private_vm_read", [](ShmOptions&) {}, false},
    {"arena", [](ShmOptions&) {}, true},
    {"copies_through_slots", [](ShmOptions& o) { o.use_vm_read = false; }, false},
    {"copies_through_ring",
     [](ShmOptions& o) { o.use_vm_read = false, o.use_arena = false, o.ring_bytes = 64 * 1024; },
     false},
    {"one_side_only",
     [](ShmOptions& o) { o.use_vm_read = o.rank % 2 == 0, o.use_arena = o.rank % 2 == 1; }, true},
    {"files_in_dev_shm", [](ShmOptions& o) { o.sources.memfd = false; }, true},
    {"socket_file", [](ShmOptions& o) { o.socket_directory = "/tmp"; }, false},
    {"no_eager_credit", [](ShmOptions& o) { o.eager_budget = 0; }, false},
};

class Ways : public ::testing::TestWithParam<Way> {};
INSTANTIATE_TEST_SUITE_P(Each, Ways, ::testing::ValuesIn(kWays),
                         [](const auto& info) { return std::string(info.param.name); });

/// Every rank sends every other one messages of random sizes; posts are shuffled on each side on
/// its own, so that tags overtake and both orders of send and receive occur.
void exchange_at_random(Node& node, bool from_arena, int messages, uint64_t seed) {
  struct Item {
    Rank peer;
    uint64_t tag;
    std::size_t bytes;
    bool outgoing;
    std::vector<std::byte> expected;
    std::byte* buffer;
    std::unique_ptr<Collector> sink;
  };
  auto size_of = [&](Rank from, Rank to, uint64_t tag) -> std::size_t {
    std::mt19937_64 random(seed ^ (static_cast<uint64_t>(from) << 40) ^
                           (static_cast<uint64_t>(to) << 32) ^ tag);
    switch (random() % 4) {
      case 0:
        return random() % 3;
      case 1:
        return random() % 8300;
      case 2:
        return random() % 300'000;
      default:
        return random() % 1'500'000;
    }
  };
  auto content = [&](Rank from, Rank to, uint64_t tag) {
    return random_message(seed * 31 + static_cast<uint64_t>(from * 1000 + to) * 7919 + tag,
                          size_of(from, to, tag));
  };
  std::mt19937_64 mine(seed + static_cast<uint64_t>(node.rank) * 77);
  std::vector<Item> items;
  for (Rank peer = 0; peer < node.size; ++peer) {
    if (peer == node.rank) continue;
    for (int m = 0; m < messages; ++m) {
      const auto tag = static_cast<uint64_t>(m) * 0x1000000000001ULL;
      items.push_back({peer,
                       tag,
                       size_of(node.rank, peer, tag),
                       true,
                       content(node.rank, peer, tag),
                       nullptr,
                       {}});
      items.push_back({peer,
                       tag,
                       size_of(peer, node.rank, tag),
                       false,
                       content(peer, node.rank, tag),
                       nullptr,
                       {}});
    }
  }
  std::shuffle(items.begin(), items.end(), mine);
  auto& allocator = *node.channel->allocator();
  for (std::size_t i = 0; i < items.size(); ++i) {
    auto& item = items[i];
    if (item.outgoing || mine() % 2 == 0) {
      item.buffer = static_cast<std::byte*>(from_arena ? allocator.allocate(item.bytes + 1)
                                                       : std::malloc(item.bytes + 1));
    } else {
      item.sink = std::make_unique<Collector>(item.bytes);
    }
    if (item.outgoing) {
      std::copy(item.expected.begin(), item.expected.end(), item.buffer);
      node.channel->send(item.peer, item.tag, 7, {item.buffer, item.bytes}, i + 1);
    } else {
      node.channel->receive(item.peer, item.tag, mine() % 2 == 0 ? 7 : 0,
                            {item.buffer, item.sink.get(), item.bytes + mine() % 2}, i + 1);
    }
    if (mine() % 3 == 0) node.step();
  }
  for (std::size_t i = 0; i < items.size(); ++i) {
    auto& item = items[i];
    Completion c = node.wait(i + 1);
    EXPECT_TRUE(c.status.is_ok()) << c.status.to_string();
    EXPECT_EQ(c.bytes, item.bytes);
    if (!item.outgoing) {
      const std::byte* got = item.sink ? item.sink->data.data() : item.buffer;
      EXPECT_TRUE(std::equal(item.expected.begin(), item.expected.end(), got))
          << "rank " << node.rank << " from " << item.peer << " tag " << item.tag << " bytes "
          << item.bytes;
    }
    if (item.buffer != nullptr) {
      from_arena ? (void)allocator.free(item.buffer) : std::free(item.buffer);
    }
  }
  EXPECT_TRUE(node.done.empty());
  EXPECT_TRUE(node.losses.empty());
  node.meet();
}

TEST_P(Ways, RandomSizesAndOrders) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  run_ranks(
      2, [&](Node& node) { exchange_at_random(node, GetParam().arena, 40, seed); },
      GetParam().tweak);
}

TEST_P(Ways, ThreeRanksSpinningAndSleeping) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  run_ranks(
      3,
      [&](Node& node) {
        node.sleepy = node.rank != 1;
        exchange_at_random(node, GetParam().arena, 10, seed);
      },
      GetParam().tweak);
}

}  // namespace
}  // namespace paceline::wire::shm::testing
