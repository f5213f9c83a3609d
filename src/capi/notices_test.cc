// Operations that say themselves when they have ended: each once, whatever ends it.
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "capi/processes.h"

namespace paceline::capi {
namespace {

struct Told {
  paceline_op op = 0;
  paceline_code code = 0;
  std::string sentence;
};

/// What has been told so far. From within a call it can submit one more operation.
class Listener {
 public:
  explicit Listener(paceline_comm* comm) : comm_(comm) {}

  static void hear(void* context, paceline_op op, paceline_code code) {
    auto* self = static_cast<Listener*>(context);
    Told told{op, code, {}};
    if (code != PACELINE_OK) {
      char text[1024] = {};
      paceline_op_error(self->comm_, op, text, sizeof text);
      told.sentence = text;
    }
    if (self->next_ != nullptr) {
      auto a = *std::exchange(self->next_, nullptr);
      paceline_op more = 0;
      self->submitted_ = paceline_submit(self->comm_, &a, &more) == PACELINE_OK;
    }
    const std::lock_guard lock(self->mutex_);
    self->told_.push_back(std::move(told));
    self->changed_.notify_all();
  }
  /// The next call submits this too.
  void submit_from_within(paceline_op_args* args) { next_ = args; }
  [[nodiscard]] bool submitted() const { return submitted_; }

  bool wait_for(size_t count, int seconds = 60) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(seconds),
                             [&] { return told_.size() >= count; });
  }
  std::vector<Told> told() {
    const std::lock_guard lock(mutex_);
    return told_;
  }

 private:
  paceline_comm* comm_;
  paceline_op_args* next_ = nullptr;
  std::atomic<bool> submitted_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Told> told_;
};

paceline_transfer_args transfer(int peer, uint32_t tag, std::vector<char>& data, Listener& who) {
  paceline_transfer_args t{};
  t.struct_size = sizeof t;
  t.peer = peer;
  t.tag = tag;
  t.data = data.data();
  t.bytes = data.size();
  t.notify = Listener::hear;
  t.context = &who;
  return t;
}

int all_are_told_once(int rank, int size, FileStore& store) {
  auto* comm = create(rank, size, store);
  MUST(comm != nullptr);
  Listener listener(comm);
  constexpr size_t kElements = 5000;
  constexpr size_t kOperations = 40;
  std::vector<std::vector<int32_t>> data(kOperations, std::vector<int32_t>(kElements, rank));
  std::vector<paceline_op> ops;
  for (auto& d : data) {
    auto a = op_args(0, 6, d.data(), d.data(), kElements);
    a.notify = Listener::hear;
    a.context = &listener;
    MUST(paceline_submit(comm, &a, &ops.emplace_back()) == PACELINE_OK);
  }
  // Short and long messages round the ring; with those that come earlier than their receive.
  std::vector<std::vector<char>> out, in;
  uint32_t tag = 0;
  for (const size_t bytes : {size_t{1}, size_t{60000}, size_t{3000000}}) {
    out.emplace_back(bytes, static_cast<char>(rank));
    in.emplace_back(bytes, '-');
    auto t = transfer((rank + 1) % size, ++tag, out.back(), listener);
    MUST(paceline_send(comm, &t, &ops.emplace_back()) == PACELINE_OK);
    t = transfer((rank + size - 1) % size, tag, in.back(), listener);
    MUST(paceline_receive(comm, &t, &ops.emplace_back()) == PACELINE_OK);
  }
  MUST(listener.wait_for(ops.size()));
  for (const auto& d : data) MUST(d == std::vector<int32_t>(kElements, size * (size - 1) / 2));
  for (const auto& i : in)
    MUST(i == std::vector<char>(i.size(), static_cast<char>((rank + size - 1) % size)));
  // Told is released.
  MUST(paceline_wait(comm, ops[0], -1, nullptr) == PACELINE_INVALID_ARGUMENT);
  // The thread that tells may submit.
  int32_t one = 1;
  int32_t two = 2;
  auto later = op_args(0, 6, &two, &two, 1);
  later.notify = Listener::hear;
  later.context = &listener;
  listener.submit_from_within(&later);
  auto a = op_args(0, 6, &one, &one, 1);
  a.notify = Listener::hear;
  a.context = &listener;
  MUST(paceline_submit(comm, &a, &ops.emplace_back()) == PACELINE_OK);
  MUST(listener.wait_for(ops.size() + 1));
  MUST(listener.submitted() && one == size && two == 2 * size);
  MUST(paceline_comm_destroy(comm) == PACELINE_OK);
  auto told = listener.told();
  MUST(told.size() == ops.size() + 1);
  for (const auto& t : told) MUST(t.code == PACELINE_OK);
  for (const auto op : ops)
    MUST(std::count_if(told.begin(), told.end(), [&](const Told& t) { return t.op == op; }) == 1);
  return 0;
}

// What is refused at once is nobody's news; what a lost rank ends is told with the sentence that names it.
int a_lost_rank_is_told(int rank, int size, FileStore& store) {
  auto* comm = create(rank, size, store);
  MUST(comm != nullptr);
  Listener listener(comm);
  std::vector<char> in(1000000);
  auto t = transfer(size, 1, in, listener);
  paceline_op op = 0;
  MUST(paceline_receive(comm, &t, &op) == PACELINE_INVALID_ARGUMENT);
  int32_t word = 1;
  auto a = op_args(0, 6, &word, &word, 1);
  MUST(paceline_run(comm, &a, nullptr) == PACELINE_OK);
  if (rank == size - 1) raise(SIGKILL);
  t = transfer(size - 1, 1, in, listener);
  MUST(paceline_receive(comm, &t, &op) == PACELINE_OK);
  MUST(listener.wait_for(1));
  const auto told = listener.told();
  MUST(told.size() == 1 && told[0].op == op && told[0].code == PACELINE_PEER_LOST);
  MUST(told[0].sentence.find("rank " + std::to_string(size - 1)) != std::string::npos);
  paceline_comm_destroy(comm);
  MUST(listener.told().size() == 1);
  return 0;
}

// Thousands that one lost rank ends at once, as the pieces of a large model's gradients.
int a_lost_rank_is_told_to_many(int rank, int size, FileStore& store) {
  auto* comm = create(rank, size, store);
  MUST(comm != nullptr);
  const auto posted = store.directory() + "/posted";
  if (rank == 1) {
    while (!std::filesystem::exists(posted))
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    raise(SIGKILL);
  }
  Listener listener(comm);
  constexpr size_t kMessages = 3000;
  std::vector<std::vector<char>> in(kMessages, std::vector<char>(16));
  for (size_t i = 0; i < kMessages; ++i) {
    auto t = transfer(1, static_cast<uint32_t>(i + 1), in[i], listener);
    paceline_op op = 0;
    MUST(paceline_receive(comm, &t, &op) == PACELINE_OK);
  }
  std::ofstream(posted).put('.');
  MUST(listener.wait_for(kMessages));
  const auto told = listener.told();
  for (const auto& t : told)
    MUST(t.code == PACELINE_PEER_LOST && t.sentence.find("rank 1") != std::string::npos);
  paceline_comm_destroy(comm);
  return 0;
}

// An operation that nothing ends, neither its own deadline nor a fault, is told of while the communicator is destroyed.
/// `at_once`: the other ranks end, too, and wait for nothing. They are named then.
int the_end_is_told(int rank, int size, FileStore& store, bool at_once) {
  auto* comm = create(rank, size, store, at_once ? 30 : 3);
  MUST(comm != nullptr);
  const auto told_of = store.directory() + "/told";
  if (rank > 0) {  // is there, and says nothing
    while (!at_once && !std::filesystem::exists(told_of))
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    paceline_comm_destroy(comm);
    return 0;
  }
  Listener listener(comm);
  std::vector<char> in(100);
  auto t = transfer(1, 9, in, listener);
  t.timeout_s = 1000;
  paceline_op op = 0;
  MUST(paceline_receive(comm, &t, &op) == PACELINE_OK);
  paceline_comm_destroy(comm);
  std::ofstream(told_of).put('.');
  const auto told = listener.told();
  MUST(told.size() == 1 && told[0].op == op);
  MUST(told[0].code == (at_once ? PACELINE_PEER_LOST : PACELINE_ABORTED));
  MUST(!at_once || told[0].sentence.find("rank 1 (host ") != std::string::npos);
  return 0;
}

TEST(Notices, EachOperationIsToldOfOnce) {
  Processes ranks(3, [](int rank, FileStore& store) { return all_are_told_once(rank, 3, store); });
  for (int r = 0; r < 3; ++r) EXPECT_EQ(ranks.wait(r), 0) << "rank " << r;
}

TEST(Notices, ALostRankIsToldByItsName) {
  Processes ranks(3,
                  [](int rank, FileStore& store) { return a_lost_rank_is_told(rank, 3, store); });
  EXPECT_EQ(ranks.wait(0), 0);
  EXPECT_EQ(ranks.wait(1), 0);
}

TEST(Notices, ALostRankIsToldByItsNameToAllThatItEnds) {
  Processes ranks(
      2, [](int rank, FileStore& store) { return a_lost_rank_is_told_to_many(rank, 2, store); });
  EXPECT_EQ(ranks.wait(0), 0);
}

TEST(Notices, TheEndOfTheCommunicatorIsTold) {
  for (const bool at_once : {false, true}) {
    Processes ranks(
        2, [=](int rank, FileStore& store) { return the_end_is_told(rank, 2, store, at_once); });
    EXPECT_EQ(ranks.wait(0), 0) << at_once;
    EXPECT_EQ(ranks.wait(1), 0) << at_once;
  }
}

// An empty operation has ended when it is submitted, and its place is taken by the next one before anybody hears of it.
TEST(Notices, AfterOperationsThatEndAtOnce) {
  for (const char* wire : {"tcp", "auto"}) {
    setenv("PACELINE_WIRE", wire, 1);
    Processes ranks(2, [](int rank, FileStore& store) {
      auto* comm = create(rank, 2, store);
      MUST(comm != nullptr);
      Listener listener(comm);
      std::vector<float> data(200'000, 1.0F);
      constexpr size_t kRounds = 100;
      for (size_t round = 0; round < kRounds; ++round) {
        auto empty = op_args(0, 0, data.data(), data.data(), 0);
        paceline_result result{};
        result.struct_size = sizeof result;
        MUST(paceline_run(comm, &empty, &result) == PACELINE_OK);
        auto large = op_args(0, 0, data.data(), data.data(), data.size());
        large.notify = Listener::hear;
        large.context = &listener;
        paceline_op op = 0;
        MUST(paceline_submit(comm, &large, &op) == PACELINE_OK);
        MUST(listener.wait_for(round + 1));
        MUST(listener.told().back().op == op && listener.told().back().code == PACELINE_OK);
      }
      MUST(paceline_comm_destroy(comm) == PACELINE_OK);
      return 0;
    });
    for (int r = 0; r < 2; ++r) EXPECT_EQ(ranks.wait(r), 0) << wire;
  }
  unsetenv("PACELINE_WIRE");
}

TEST(Notices, AnOperationTellsInOneWay) {
  Processes ranks(2, [](int rank, FileStore& store) {
    auto* comm = create(rank, 2, store);
    MUST(comm != nullptr);
    Listener listener(comm);
    std::vector<float> data(10, 1.0F);
    // The other rank comes when this one has asked.
    auto a = op_args(0, 0, data.data(), data.data(), data.size());
    paceline_op watched = 0, told = 0;
    MUST(paceline_submit(comm, &a, &watched) == PACELINE_OK);
    MUST(paceline_watch(comm, watched) == PACELINE_OK);
    MUST(paceline_watch(comm, watched) == PACELINE_INVALID_ARGUMENT);
    paceline_result result{};
    result.struct_size = sizeof result;
    MUST(paceline_wait(comm, watched, 0, &result) == PACELINE_INVALID_ARGUMENT);
    MUST(paceline_wait_any(comm, 30, &result, 1) == 1 && result.op == watched);
    a.notify = Listener::hear;
    a.context = &listener;
    if (rank == 1) MUST(listener.told().empty());
    MUST(paceline_submit(comm, &a, &told) == PACELINE_OK);
    if (rank == 0) MUST(paceline_watch(comm, told) == PACELINE_INVALID_ARGUMENT);
    MUST(listener.wait_for(1));
    MUST(listener.told()[0].code == PACELINE_OK);
    MUST(paceline_comm_destroy(comm) == PACELINE_OK);
    return 0;
  });
  for (int r = 0; r < 2; ++r) EXPECT_EQ(ranks.wait(r), 0);
}

/// Whether this thread of the process sleeps in the kernel, as one does that waits.
bool sleeps(pid_t thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const auto name_ends = text.rfind(')');
  return name_ends != std::string::npos && text.substr(name_ends, 3) == ") S";
}

// Threads in wait_any() are told of the end and have left before the communicator is freed.
TEST(Notices, WhoWaitsForAnyLeavesBeforeTheEnd) {
  Processes ranks(2, [](int rank, FileStore& store) {
    for (int round = 0; round < 5; ++round) {
      auto* comm = create(rank, 2, store);
      MUST(comm != nullptr);
      std::atomic<int> left = 0;
      std::array<std::atomic<pid_t>, 6> inside{};
      std::vector<std::thread> threads;
      for (int i = 0; i < 6; ++i)
        threads.emplace_back([&, i] {
          inside.at(static_cast<size_t>(i)) = gettid();
          paceline_result result{};
          result.struct_size = sizeof result;
          if (paceline_wait_any(comm, 60, &result, 1) == -1) ++left;
        });
      for (const auto& thread : inside)
        while (thread == 0 || !sleeps(thread)) std::this_thread::yield();
      std::vector<float> data(10, 1.0F);
      auto a = op_args(0, 0, data.data(), data.data(), data.size());
      paceline_result result{};
      result.struct_size = sizeof result;
      MUST(paceline_run(comm, &a, &result) == PACELINE_OK);
      MUST(paceline_comm_destroy(comm) == PACELINE_OK);
      for (auto& t : threads) t.join();
      MUST(left == 6);
    }
    return 0;
  });
  for (int r = 0; r < 2; ++r) EXPECT_EQ(ranks.wait(r), 0);
}

}  // namespace
}  // namespace paceline::capi
