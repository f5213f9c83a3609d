// For this folder's tests: real processes, one a rank, that find each other through a page of
// shared memory.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "wire/shm/shm_channel.h"

namespace paceline::wire::shm::testing {

inline constexpr int kMostRanks = 8;
inline constexpr Time kPatience = 20 * kSecond;
inline constexpr int kNothingCame = 4;  ///< what a rank's process ends with

/// Ends after kPatience in which this process ran: that the machine stood still is no fault of the channel's.
class Patience {
 public:
  explicit Patience(Time now) : last_(now) {}
  bool is_over(Time now) {
    spent_ += std::min(now - last_, kSecond);
    last_ = now;
    return spent_ > kPatience;
  }

 private:
  Time last_;
  Time spent_ = 0;
};

/// Shared by the processes of one test.
struct Board {
  std::atomic<uint32_t> announced[kMostRanks];
  char address[kMostRanks][128];
  std::atomic<uint64_t> flags[16];  ///< free for the test
  std::atomic<uint32_t> barrier;
};

/// One rank: its channel, and simple blocking calls over it.
class Node {
 public:
  Node(Board& board, ShmOptions options) : board(board), rank(options.rank), size(options.size) {
    auto made = ShmChannel::create(std::move(options));
    if (!made.is_ok()) {
      std::fprintf(stderr, "%s\n", made.status().to_string().c_str());
      std::_Exit(3);
    }
    channel = std::move(made).value();
    auto r = static_cast<std::size_t>(rank);
    std::strncpy(board.address[r], channel->address().c_str(), sizeof(board.address[r]) - 1);
    board.announced[r].store(1);
    for (int i = 0; i < size; ++i) {
      while (board.announced[i].load() == 0) std::this_thread::yield();
      if (i != rank) channel->set_peer(i, board.address[i], "host-" + std::to_string(i));
    }
  }

  void step(bool block = false) {
    channel->progress(clock.now(), events);
    for (auto& c : events.completions) {
      EXPECT_FALSE(done.contains(c.cookie)) << "cookie " << c.cookie << " completed twice";
      done[c.cookie] = c;
    }
    for (auto& n : events.notes) notes.push_back(n);
    for (auto& l : events.losses) losses.push_back(l);
    const bool quiet = events.empty();
    events.clear();
    if (!block || !quiet || !channel->prepare_wait()) return;
    const Time until = channel->next_timer();
    const Time now = clock.now();
    const int ms = until == kNever ? 1000
                   : until <= now  ? 0
                                   : static_cast<int>((until - now) / kMillisecond) + 1;
    pollfd watched{channel->poll_fd(), POLLIN, 0};
    if (::poll(&watched, 1, ms) == 0 && ms == 1000) ++idle_waits;
  }
  /// Drives the channel until `condition` holds; false when it takes too long.
  template <class Condition>
  bool until(Condition condition) {
    Patience patience(clock.now());
    while (!condition()) {
      if (patience.is_over(clock.now())) return false;
      step(sleepy);
    }
    return true;
  }
  Completion wait(uint64_t cookie) {
    if (!until([&] { return done.contains(cookie); })) {
      // The test would go on with buffers that are still lent.
      std::fprintf(stderr, "rank %d: no completion of %llu; %zu losses, %zu other completions\n",
                   rank, static_cast<unsigned long long>(cookie), losses.size(), done.size());
      std::fflush(nullptr);
      std::_Exit(kNothingCame);
    }
    Completion c = done[cookie];
    done.erase(cookie);
    return c;
  }
  /// All ranks have come here; the channel moves meanwhile.
  void meet() {
    const uint32_t target = ++met * static_cast<uint32_t>(size);
    board.barrier.fetch_add(1);
    Patience patience(clock.now());
    while (board.barrier.load() < target) {
      if (patience.is_over(clock.now())) {
        ADD_FAILURE() << "rank " << rank << ": the others don't come";
        return;
      }
      step(false);
      std::this_thread::yield();
    }
  }

  Board& board;
  Rank rank;
  int size;
  std::unique_ptr<ShmChannel> channel;
  SteadyClock clock;
  Events events;
  std::map<uint64_t, Completion> done;
  std::vector<Note> notes;
  std::vector<Loss> losses;
  bool sleepy = true;
  int idle_waits = 0;
  uint32_t met = 0;
};

using Body = std::function<void(Node&)>;
using Tweak = std::function<void(ShmOptions&)>;

inline Board* new_board() {
  void* memory =
      ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return new (memory) Board();
}

/// Runs `body` in `ranks` processes; each must end well, but for those in `killed`.
inline void run_ranks(int ranks, const Body& body, const Tweak& tweak = {},
                      std::vector<Rank> killed = {}) {
  Board* board = new_board();
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    pid_t pid = ::fork();
    if (pid == 0) {
      ::alarm(60);
      ShmOptions options;
      options.rank = rank;
      options.size = ranks;
      options.secret = "a secret of this test";
      options.version = "test 1";
      if (tweak) tweak(options);
      {
        Node node(*board, options);
        body(node);
      }
      std::fflush(nullptr);
      std::_Exit(::testing::Test::HasFailure() ? 1 : 0);
    }
    children.push_back(pid);
  }
  for (int rank = 0; rank < ranks; ++rank) {
    int status = 0;
    ::waitpid(children[static_cast<std::size_t>(rank)], &status, 0);
    const bool expected_kill = std::find(killed.begin(), killed.end(), rank) != killed.end();
    if (expected_kill) {
      EXPECT_TRUE(WIFSIGNALED(status)) << "rank " << rank;
    } else {
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0)
          << "rank " << rank << " ended with status " << status;
    }
  }
  ::munmap(board, sizeof(Board));
}

inline std::vector<std::byte> pattern(std::size_t bytes, unsigned seed) {
  std::vector<std::byte> data(bytes);
  std::minstd_rand random(seed + 1);
  for (auto& b : data) b = static_cast<std::byte>(random() >> 8);
  return data;
}

inline bool is_stopped(pid_t process) {
  std::string text(400, '\0');
  FILE* file = std::fopen(("/proc/" + std::to_string(process) + "/stat").c_str(), "r");
  if (file == nullptr) return false;
  text.resize(std::fread(text.data(), 1, text.size(), file));
  std::fclose(file);
  return text.find(") T ") != std::string::npos;
}

/// Both directions of a short and a long message with `peer`.
inline void talk(Node& node, Rank peer, uint64_t tag) {
  const std::size_t sizes[] = {100, 300'000};
  for (std::size_t bytes : sizes) {
    auto out = pattern(bytes, static_cast<unsigned>(node.rank));
    std::vector<std::byte> in(bytes);
    node.channel->send(peer, tag + bytes, 1, out, 1);
    node.channel->receive(peer, tag + bytes, 1, {in.data(), nullptr, in.size()}, 2);
    EXPECT_TRUE(node.wait(1).status.is_ok());
    EXPECT_TRUE(node.wait(2).status.is_ok());
    EXPECT_EQ(in, pattern(bytes, static_cast<unsigned>(peer)));
  }
}

}  // namespace paceline::wire::shm::testing
