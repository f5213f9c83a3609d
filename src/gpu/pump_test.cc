// The pump by itself: its end, while its failure is still being told.
#include "gpu/pump.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

namespace paceline::gpu {
namespace {

// Who found the failure is not through with the pump yet when the script, which has heard of it, gives everything back.
TEST(Pump, ItsEndWaitsForWhoeverHasFoundItsFailure) {
  alignas(Flags::kLine) std::array<std::byte, Flags::kLine * 32> memory{};
  ASSERT_LE(Flags::bytes(1), memory.size());
  std::atomic<bool> is_through{false};
  Pump::Options options;
  options.flags = Flags(memory.data(), false);
  options.tell = [](const Status&) {};
  options.failed = [&](const Status&) {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    is_through = true;
  };
  auto pump = std::make_unique<Pump>(std::vector<Wire>{}, std::move(options));
  std::thread guard([p = pump.get()] { p->fail({Code::kAborted, "rank 3 is lost"}); });
  while (!pump->has_failed()) std::this_thread::yield();
  EXPECT_EQ(pump->failure().message(), "rank 3 is lost");
  pump.reset();
  EXPECT_TRUE(is_through);
  guard.join();
}

}  // namespace
}  // namespace paceline::gpu
