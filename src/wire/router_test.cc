#include "wire/router.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <cstring>

#include "wire/fake/fake_network.h"

namespace paceline::wire {
namespace {

/// Ranks 0 and 1 on one node, 2 on another; two networks stand for the two ways.
struct Cluster {
  FakeNetwork near{FakeOptions{}};
  FakeNetwork far{FakeOptions{}};
  std::vector<std::unique_ptr<Router>> routers;
  std::vector<Events> events{3};

  Cluster() {
    for (Rank r = 0; r < 3; ++r) {
      RouterOptions o;
      o.rank = r;
      o.size = 3;
      if (r < 2) o.near = near.join(r, 3, "a");
      if (r < 2) o.near_ranks = {0, 1};
      o.far = far.join(r, 3, "b");
      routers.push_back(std::make_unique<Router>(std::move(o)));
    }
  }
  bool run_until(const std::function<bool()>& done) {
    for (int i = 0; i < 100000 && !done(); ++i) {
      Time next = std::min(near.next_event_time(), far.next_event_time());
      for (std::size_t r = 0; r < 3; ++r) {
        routers[r]->progress(far.now(), events[r]);
        next = std::min(next, routers[r]->next_timer());
      }
      next = std::max(std::min(next, far.now() + kMillisecond), far.now());
      near.advance(next);
      far.advance(next);
    }
    return done();
  }
};

TEST(Router, PicksTheWayByPeer) {
  Cluster c;
  std::vector<std::byte> data(20000, std::byte{7});
  std::vector<std::vector<std::byte>> into(3, std::vector<std::byte>(20000));
  for (Rank to = 1; to < 3; ++to) {
    c.routers[0]->send(to, 5, 0, data, 1);
    auto& buffer = into[static_cast<std::size_t>(to)];
    c.routers[static_cast<std::size_t>(to)]->receive(0, 5, 0,
                                                     {buffer.data(), nullptr, buffer.size()}, 2);
  }
  ASSERT_TRUE(c.run_until(
      [&] { return c.events[1].completions.size() + c.events[2].completions.size() == 2; }));
  EXPECT_EQ(into[1], data);
  EXPECT_EQ(into[2], data);
  EXPECT_GT(c.near.counts().delivered, 0U);
  EXPECT_GT(c.far.counts().delivered, 0U);
  EXPECT_EQ(c.routers[2]->counters().payload_received, 20000U);
}

TEST(Router, MessagesToOneself) {
  RouterOptions o;
  Router router(std::move(o));
  Events events;
  std::vector<std::byte> data(1000, std::byte{3});
  std::vector<std::byte> into(1000);
  router.send(0, 1, 4, data, 1);
  EXPECT_FALSE(router.progress(0, events));
  router.receive(0, 1, 4, {into.data(), nullptr, into.size()}, 2);
  EXPECT_FALSE(router.prepare_wait());
  EXPECT_TRUE(router.progress(0, events));
  ASSERT_EQ(events.completions.size(), 2U);
  EXPECT_EQ(into, data);
  events.clear();
  router.receive(0, 2, 4, {into.data(), nullptr, into.size()}, 3);
  router.send(0, 2, 5, data, 4);
  router.post_note(0, data);
  router.progress(0, events);
  ASSERT_EQ(events.completions.size(), 2U);
  EXPECT_EQ(events.completions[0].status.code(), Code::kMismatch);
  EXPECT_EQ(events.completions[1].status.code(), Code::kMismatch);
  ASSERT_EQ(events.notes.size(), 1U);
  EXPECT_EQ(events.notes[0].peer, 0);
  router.wake();
  pollfd p{router.poll_fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&p, 1, 10000), 1);
  router.send(3, 1, 0, data, 9);
  router.send(0, 8, 0, data, 10);
  router.abort({Code::kAborted, "over"});
  router.send(0, 9, 0, data, 11);
  events.clear();
  router.progress(0, events);
  ASSERT_EQ(events.completions.size(), 3U);
  EXPECT_EQ(events.completions[0].status.code(), Code::kInvalidArgument);
  EXPECT_EQ(events.completions[1].status.code(), Code::kAborted);
  EXPECT_EQ(events.completions[2].status.code(), Code::kAborted);
}

}  // namespace
}  // namespace paceline::wire
