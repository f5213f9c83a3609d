// What connections keep between two messages: there are many of them, and few at work at a time.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <random>
#include <span>
#include <vector>

#include "base/testing/allocated.h"
#include "wire/tcp/testing.h"

namespace paceline::wire {
namespace {

using paceline::testing::allocated;
using testing::Job;
using testing::random_data;

class Copy : public Sink {
 public:
  explicit Copy(std::size_t bytes) : data(bytes) {}
  void consume(uint64_t offset, std::span<const std::byte> piece) override {
    std::copy(piece.begin(), piece.end(), data.begin() + static_cast<std::ptrdiff_t>(offset));
  }
  std::vector<std::byte> data;
};

TEST(TcpMemory, ConnectionsHoldNoneBetweenMessages) {
  constexpr int kFlows = 8;
  std::mt19937_64 random(std::random_device{}());
  const auto data = random_data(random, 16 << 20);
  Copy sink(data.size());
  Job job(2, [](TcpOptions& o) { o.flows = kFlows; });
  std::byte word[8]{};
  job.at(1)->receive(0, 1, 0, {word, nullptr, sizeof(word)}, 2);
  job.at(0)->send(1, 1, 0, word, 1);  // over the control connection
  ASSERT_TRUE(job.complete(1, 2) && job.complete(0, 1));
  const std::size_t before = allocated();
  for (uint64_t i = 0; i < 3; ++i) {
    job.at(1)->receive(0, 2 + i, 0, {nullptr, &sink, data.size()}, 12 + i);
    job.at(0)->send(1, 2 + i, 0, data, 22 + i);
    ASSERT_TRUE(job.complete(1, 12 + i) && job.complete(0, 22 + i));
    EXPECT_EQ(sink.data, data);
    std::fill(sink.data.begin(), sink.data.end(), std::byte{});
  }
  // A piece's memory for whoever reads next, and what is known of messages and flows.
  const std::size_t piece = ProtocolOptions{}.piece_bytes;
  EXPECT_LT(allocated(), before + 2 * piece) << kFlows << " flows each way";
}

}  // namespace
}  // namespace paceline::wire
