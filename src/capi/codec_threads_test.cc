// Threads that code top-k and add up what lies in memory: how many, and that they are put to work.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "base/cores.h"
#include "bootstrap/identity.h"
#include "capi/options.h"
#include "capi/processes.h"

namespace paceline::capi {
namespace {

/// A variable for as long as it lives.
class Given {
 public:
  Given(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Given() { unsetenv(name_); }
  Given(const Given&) = delete;
  Given& operator=(const Given&) = delete;

 private:
  const char* name_;
};

/// Rank 0 of as many ranks as there are node ids.
bootstrap::Topology topology(const std::vector<std::string>& node_ids) {
  bootstrap::Topology t;
  for (const auto& id : node_ids) {
    bootstrap::Member m;
    m.rank = static_cast<Rank>(t.members.size());
    m.node_id = id;
    t.members.push_back(m);
  }
  bootstrap::number_nodes(t);
  return t;
}

int threads_of(const bootstrap::Topology& t, int job_local_size = 1) {
  auto settings = Settings::load(Face::kPaceline);
  EXPECT_TRUE(settings) << settings.status().to_string();
  return settings ? codec_threads(*settings, t, job_local_size) : -1;
}

TEST(CodecThreads, AreThoseThatAreAskedFor) {
  const Given three("PACELINE_CODEC_THREADS", "3");
  EXPECT_EQ(threads_of(topology({"a", "b"})), 3);
  const Given odd("PACELINE_CODEC_THREADS", "17");
  EXPECT_NE(Settings::load(Face::kPaceline).status().message().find("PACELINE_CODEC_THREADS"),
            std::string::npos);
}

TEST(CodecThreads, AutoCountsTheJobsRanksOnTheMachine) {
  const int usable = usable_cores(), machine = machine_cores();
  const auto fitting = [&](int ranks) { return fitting_codec_threads(ranks, usable, machine); };
  const std::string here = bootstrap::machine_identity();
  EXPECT_EQ(threads_of(topology({here + "/1", "elsewhere/1"})), fitting(1));
  // Containers, or the lab's nodes: they share the cores.
  EXPECT_EQ(threads_of(topology({here + "/1", here + "/2", here + "/3", here + "/4"})), fitting(4));
  // A group of the job: its other ranks need cores too.
  EXPECT_EQ(threads_of(topology({here + "/1", "elsewhere/1"}), 64), fitting(64));
  // Names that the user gave.
  EXPECT_EQ(threads_of(topology({"rack/a", "rack/b"})), fitting(1));
}

int threads_named(const char* name) {
  int found = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string text;
    std::getline(std::ifstream(task.path() / "comm") >> std::ws, text);
    found += text == name ? 1 : 0;
  }
  return found;
}

// A thread takes its name when it first runs, which may be after the work is done; a joined one leaves /proc a moment later.
bool come_to(const char* name, int count) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (threads_named(name) != count) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

TEST(CodecThreads, ShareABucket) {
  const Given codec("PACELINE_CODEC", "topk"), threads("PACELINE_CODEC_THREADS", "3");
  Processes ranks(2, [](int rank, FileStore& store) {
    setenv("PACELINE_NODE_ID", rank == 0 ? "a" : "b", 1);
    auto* comm = create(rank, 2, store);
    MUST(comm != nullptr);
    std::vector<float> data(1U << 20);
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(i % 1000);
    MUST(threads_named("paceline-codec") == 0);
    auto a = op_args(0, 0, data.data(), data.data(), data.size());
    paceline_result result{};
    result.struct_size = sizeof result;
    MUST(paceline_run(comm, &a, &result) == PACELINE_OK);
    MUST(come_to("paceline-codec", 2));
    MUST(paceline_comm_destroy(comm) == PACELINE_OK);
    MUST(come_to("paceline-codec", 0));
    return 0;
  });
  for (int r = 0; r < 2; ++r) EXPECT_EQ(ranks.wait(r), 0);
}

TEST(CodecThreads, ShareWhatLiesInAnotherRanksMemory) {
  const Given threads("PACELINE_CODEC_THREADS", "3");
  Processes ranks(2, [](int rank, FileStore& store) {
    auto* comm = create(rank, 2, store);
    MUST(comm != nullptr);
    constexpr size_t kCount = (4U << 20) + 3;
    auto* data = static_cast<float*>(paceline_alloc(comm, kCount * sizeof(float)));
    MUST(data != nullptr);
    const auto value = [](int of, size_t i) { return static_cast<float>((i * 7 + of) % 1009); };
    for (size_t i = 0; i < kCount; ++i) data[i] = value(rank, i);
    MUST(threads_named("paceline-codec") == 0);
    auto a = op_args(0, 0, data, data, kCount);
    paceline_result result{};
    result.struct_size = sizeof result;
    MUST(paceline_run(comm, &a, &result) == PACELINE_OK);
    MUST(come_to("paceline-codec", 2));
    for (size_t i = 0; i < kCount; ++i) MUST(data[i] == value(0, i) + value(1, i));
    paceline_free(comm, data);
    MUST(paceline_comm_destroy(comm) == PACELINE_OK);
    MUST(come_to("paceline-codec", 0));
    return 0;
  });
  for (int r = 0; r < 2; ++r) EXPECT_EQ(ranks.wait(r), 0);
}

}  // namespace
}  // namespace paceline::capi
