#include "drivers/nccl/loader.h"

#include <gtest/gtest.h>

namespace paceline::drivers::nccl {
namespace {

// First of all: what is found once stays.
TEST(Loader, AnOldNcclIsRefusedByItsVersionOrByWhatItLacks) {
  auto old = load(PACELINE_NCCL_OLD);
  ASSERT_FALSE(old.is_ok());
  EXPECT_EQ(old.status().code(), Code::kUnavailable);
  for (const char* part : {"NCCL 2.13.4", PACELINE_NCCL_OLD, "too old: 2.14 or later is needed"})
    EXPECT_NE(old.status().message().find(part), std::string::npos) << old.status().message();
  EXPECT_EQ(old.status().message().find("lacks"), std::string::npos) << old.status().message();
  auto lacking = load(PACELINE_NCCL_LACKING);
  ASSERT_FALSE(lacking.is_ok());
  EXPECT_EQ(lacking.status().code(), Code::kUnavailable);
  for (const char* part : {"NCCL 2.28.9", PACELINE_NCCL_LACKING, "it lacks ncclBroadcast"})
    EXPECT_NE(lacking.status().message().find(part), std::string::npos)
        << lacking.status().message();
}

TEST(Loader, FindsNcclOrSaysWhatToInstall) {
  auto library = load("/nowhere/libnccl.so.2");
  if (library) {
    EXPECT_GE((*library)->version, kOldest);
  } else {
    EXPECT_EQ(library.status().code(), Code::kUnavailable);
    EXPECT_NE(library.status().message().find("nvidia-nccl"), std::string::npos)
        << library.status().message();
  }
}

// The layout that NCCL 2.18's header gives: later versions read as many bytes as `size` says.
TEST(Loader, TheConfigurationIsLaidOutAsNcclReadsIt) {
  EXPECT_EQ(offsetof(Config, magic), 8U);
  EXPECT_EQ(offsetof(Config, blocking), 16U);
  EXPECT_EQ(offsetof(Config, max_ctas), 28U);
  EXPECT_EQ(offsetof(Config, net_name), 32U);
  EXPECT_EQ(offsetof(Config, split_share), 40U);
  EXPECT_EQ(sizeof(Config), 48U);
}

TEST(Loader, MemoryThatNcclDidNotGetIsNamed) {
  Api api;
  api.get_error_string = [](NcclResult) { return "unhandled cuda error"; };
  api.get_last_error = [](Comm) { return "Failed to CUDA calloc async 8 bytes"; };
  const Status memory = explain(api, 1, nullptr, "reduce-scatter");
  EXPECT_EQ(memory.code(), Code::kResourceExhausted);
  for (const char* part : {"reduce-scatter", "8 bytes", "no memory left", "smaller batch"})
    EXPECT_NE(memory.message().find(part), std::string::npos) << memory.message();
  api.get_last_error = [](Comm) { return "Cuda failure 'an illegal memory access'"; };
  const Status other = explain(api, 1, nullptr, "reduce-scatter");
  EXPECT_EQ(other.code(), Code::kUnavailable);
  EXPECT_EQ(other.message().find("no memory left"), std::string::npos) << other.message();
}

TEST(Loader, ANeighbourThatNcclMissesIsALostOne) {
  Api api;
  api.get_error_string = [](NcclResult) { return "remote process exited"; };
  const Status lost = explain(api, kRemoteError, nullptr, "reduce-scatter");
  EXPECT_EQ(lost.code(), Code::kPeerLost);
  EXPECT_NE(lost.message().find("reduce-scatter: remote process exited"), std::string::npos);
}

}  // namespace
}  // namespace paceline::drivers::nccl
