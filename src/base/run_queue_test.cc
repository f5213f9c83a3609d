// What the kernel says of the threads that compute.
#include "base/run_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "base/cores.h"

namespace paceline {
namespace {

TEST(RunQueue, CountsTheThreadsThatCompute) {
  const int busy = machine_cores() + 2;
  std::atomic<bool> stop{false};
  std::atomic<int> begun{0};
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(busy));
  for (int i = 0; i < busy; ++i) {
    threads.emplace_back([&] {
      begun.fetch_add(1);
      while (!stop.load(std::memory_order_relaxed)) {
      }
    });
  }
  while (begun.load() < busy) std::this_thread::yield();
  const int others = others_running();
  const bool taken = cores_are_taken();
  stop = true;
  for (auto& t : threads) t.join();
  EXPECT_GE(others, busy);
  EXPECT_TRUE(taken);
}

}  // namespace
}  // namespace paceline
