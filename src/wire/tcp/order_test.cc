// In which order a channel's bytes go into its sockets.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "wire/tcp/testing.h"

// TSan's own send() and sendmsg() tell it which threads have met through a socket: there they stay as they are.
#ifndef __SANITIZE_THREAD__

namespace {

enum class Write { kControl, kData };
std::vector<Write>* written = nullptr;  // of the only thread, while a test looks

}  // namespace

// Before the C library's: control leaves by send(), pieces by sendmsg().
extern "C" ssize_t send(int fd, const void* data, size_t bytes, int flags) {
  static const auto next = reinterpret_cast<decltype(&::send)>(::dlsym(RTLD_NEXT, "send"));
  if (written != nullptr) written->push_back(Write::kControl);
  return next(fd, data, bytes, flags);
}
extern "C" ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  static const auto next = reinterpret_cast<decltype(&::sendmsg)>(::dlsym(RTLD_NEXT, "sendmsg"));
  if (written != nullptr) written->push_back(Write::kData);
  return next(fd, message, flags);
}

namespace paceline::wire {
namespace {

using testing::Job;
using testing::random_data;

// A link's queue holds milliseconds of data, and the sender of what is announced behind it waits for as long.
TEST(TcpOrder, ReceivesAreAnnouncedBeforeAnyPeerGetsData) {
  std::mt19937_64 random(std::random_device{}());
  const auto data = random_data(random, 1 << 20);
  std::vector<std::byte> at_one(data.size());
  std::vector<std::byte> at_zero(data.size());
  const auto inbox = [](std::vector<std::byte>& into) {
    return Inbox{into.data(), nullptr, into.size()};
  };
  Job job(3);
  // A ring's neighbours, with all their connections.
  job.at(1)->receive(0, 1, 0, inbox(at_one), 1);
  job.at(0)->receive(2, 1, 0, inbox(at_zero), 2);
  job.at(0)->send(1, 1, 0, data, 3);
  job.at(2)->send(0, 1, 0, data, 4);
  ASSERT_TRUE(job.complete(1, 1) && job.complete(0, 2) && job.complete(0, 3) && job.complete(2, 4));
  while (job.step()) {
  }
  const auto heard = job.at(0)->counters().wire_received;
  job.at(1)->receive(0, 2, 0, inbox(at_one), 5);
  ASSERT_TRUE(job.run_until([&] { return job.at(0)->counters().wire_received > heard; }));

  job.at(0)->send(1, 2, 0, data, 6);  // may go at once
  job.at(0)->receive(2, 2, 0, inbox(at_zero), 7);
  std::vector<Write> order;
  written = &order;
  job.at(0)->progress(job.clock_.now(), job.events(0));
  written = nullptr;
  const auto first_data = std::find(order.begin(), order.end(), Write::kData);
  ASSERT_NE(first_data, order.end());
  ASSERT_NE(first_data, order.begin()) << "data before the announcement";
  EXPECT_EQ(std::find(first_data, order.end(), Write::kControl), order.end());

  job.at(2)->send(0, 2, 0, data, 8);
  ASSERT_TRUE(job.complete(1, 5) && job.complete(0, 7));
  EXPECT_EQ(at_one, data);
  EXPECT_EQ(at_zero, data);
}

}  // namespace
}  // namespace paceline::wire

#endif
