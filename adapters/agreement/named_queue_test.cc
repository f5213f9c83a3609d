// The queue between real processes: what not every rank reaches ends by name and leaves the others' operations right.
#include "named_queue.h"

#include <gtest/gtest.h>

#include <future>

#include "capi/processes.h"

namespace paceline::agreement {
namespace {

using capi::FileStore;
using capi::Processes;

constexpr double kNever = 1e6;

/// Waits until some rank has said that it is there.
bool await(FileStore& store, const std::string& name) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!std::filesystem::exists(store.directory() + "/" + name)) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

void say(FileStore& store, const std::string& name) {
  std::ofstream(store.directory() + "/" + name);
}

/// One rank's end of the conversation, with an all-reduce that waits.
struct Rank {
  Rank(int rank, int size, FileStore& store, double timeout_s)
      : comm(capi::create(rank, size, store, 60)) {
    if (comm != nullptr) queue = NamedQueue::create(comm, timeout_s, error);
  }
  ~Rank() {
    queue.reset();
    if (comm != nullptr) paceline_comm_destroy(comm);
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  std::future<Outcome> enqueue(const std::string& name, double& value) const {
    auto promise = std::make_shared<std::promise<Outcome>>();
    Request request;
    request.name = name;
    request.signature = "sum of float64 [1]";
    request.dtype = 1;
    request.input = request.output = &value;
    request.count = 1;
    request.done = [promise](const Outcome& outcome) { promise->set_value(outcome); };
    queue->enqueue(std::move(request));
    return promise->get_future();
  }
  Outcome reduce(const std::string& name, double& value) const {
    auto ended = enqueue(name, value);
    if (ended.wait_for(std::chrono::seconds(60)) != std::future_status::ready)
      return {PACELINE_INTERNAL, "the test waited for a minute"};
    return ended.get();
  }

  paceline_comm* comm;
  Outcome error;
  std::unique_ptr<NamedQueue> queue;
};

bool holds(const Outcome& outcome, const std::string& text) {
  if (outcome.text.find(text) != std::string::npos) return true;
  std::fprintf(stderr, "'%s' is not in: %d %s\n", text.c_str(), outcome.code, outcome.text.c_str());
  return false;
}

class LonelyRank : public testing::TestWithParam<int> {};

TEST_P(LonelyRank, GivesUpAndTheNextRoundIsRight) {
  const int lonely = GetParam();
  Processes ranks(2, [lonely](int rank, FileStore& store) {
    Rank self(rank, 2, store, 3);
    MUST(self.queue != nullptr);
    const std::string missing = "rank " + std::to_string(1 - lonely);
    double value = rank + 1;
    if (rank == lonely) {
      const auto outcome = self.reduce("lonely", value);
      MUST(outcome.code == PACELINE_TIMEOUT);
      MUST(holds(outcome, "'lonely'") && holds(outcome, missing) &&
           holds(outcome, "PACELINE_TIMEOUT"));
      say(store, "gave up");
      // The others' first one belongs to the one that was given up; this one to their second.
      MUST(await(store, "was late"));
    } else {
      MUST(await(store, "gave up"));
      const auto outcome = self.reduce("lonely", value);
      MUST(outcome.code == PACELINE_TIMEOUT);
      MUST(holds(outcome, "too late on " + missing));
      say(store, "was late");
    }
    const auto outcome = self.reduce("lonely", value);
    MUST(holds(outcome, "") && outcome.code == PACELINE_OK);
    MUST(value == 3);
    return 0;
  });
  for (int r = 0; r < 2; ++r) EXPECT_EQ(ranks.wait(r), 0) << "rank " << r;
}

INSTANTIATE_TEST_SUITE_P(NamedQueue, LonelyRank, testing::Values(0, 1));

class LeavingRank : public testing::TestWithParam<int> {};

TEST_P(LeavingRank, IsNotWaitedFor) {
  const int leaver = GetParam();
  Processes ranks(3, [leaver](int rank, FileStore& store) {
    Rank self(rank, 3, store, kNever);
    MUST(self.queue != nullptr);
    double value = 1;
    MUST(self.reduce("all", value).code == PACELINE_OK);
    MUST(value == 3);
    if (rank == leaver) {
      for (int r = 0; r < 3; ++r) MUST(r == leaver || await(store, "waits " + std::to_string(r)));
      return 0;  // says goodbye while the others wait for it
    }
    auto pending = self.enqueue("pending", value);
    say(store, "waits " + std::to_string(rank));
    MUST(pending.wait_for(std::chrono::seconds(60)) == std::future_status::ready);
    const std::string name = "rank " + std::to_string(leaver);
    for (const auto& outcome : {pending.get(), self.reduce("later", value)}) {
      MUST(outcome.code == PACELINE_UNAVAILABLE);
      MUST(holds(outcome, name + " has shut down"));
    }
    // The one that is through first must not be missing from the other's messages.
    say(store, "through " + std::to_string(rank));
    for (int r = 0; r < 3; ++r) MUST(r == leaver || await(store, "through " + std::to_string(r)));
    return 0;
  });
  for (int r = 0; r < 3; ++r) EXPECT_EQ(ranks.wait(r), 0) << "rank " << r;
}

INSTANTIATE_TEST_SUITE_P(NamedQueue, LeavingRank, testing::Values(0, 2));

class ImpatientRank : public testing::TestWithParam<int> {};

/// Who does not wait for the others' goodbye leaves no receive behind in memory that it frees.
TEST_P(ImpatientRank, TakesItsBuffersBack) {
  const int impatient = GetParam();
  Processes ranks(2, [impatient](int rank, FileStore& store) {
    Rank self(rank, 2, store, kNever);
    MUST(self.queue != nullptr);
    double value = 1;
    MUST(self.reduce("all", value).code == PACELINE_OK);
    if (rank == impatient) {
      self.queue->close_timeout_s = 0.01;
      self.queue->close();
      const bool is_over = paceline_comm_health(self.comm) != PACELINE_OK;
      double other = 1;
      const auto outcome = self.reduce("afterwards", other);
      self.queue.reset();
      say(store, "gone");
      MUST(is_over);  // nothing is under way any more
      MUST(holds(outcome, "shut down"));
    }
    MUST(await(store, "gone"));
    return 0;
  });
  for (int r = 0; r < 2; ++r) EXPECT_EQ(ranks.wait(r), 0) << "rank " << r;
}

INSTANTIATE_TEST_SUITE_P(NamedQueue, ImpatientRank, testing::Values(0, 1));

}  // namespace
}  // namespace paceline::agreement
