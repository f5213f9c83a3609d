#include "gpu/device.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "drivers/cuda/mock/machine.h"

namespace paceline::gpu {
namespace {

class Device : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(api_.device_primary_ctx_retain(&context_, 0), 0);
    ASSERT_EQ(api_.ctx_set_current(context_), 0);
  }
  void TearDown() override {
    EXPECT_EQ(machine_.counts(0).pinned, 0U);
    api_.ctx_set_current(nullptr);
  }
  cu::mock::Machine machine_{cu::mock::Options{}};
  const cu::Api& api_ = machine_.api();
  cu::Context context_ = nullptr;
};

TEST_F(Device, PagesAreTheProcesssOwnWholeAndPinned) {
  DeviceObjects objects(api_);
  auto made = objects.pinned_pages(10000, "a test");
  ASSERT_TRUE(made) << made.status().message();
  std::memset(*made, 1, 10000);
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(*made) % page, 0U);
  EXPECT_EQ(objects.pinned_bytes(), (10000 + page - 1) / page * page);
  EXPECT_EQ(machine_.counts(0).pinned, objects.pinned_bytes());
  EXPECT_EQ(machine_.calls("mem_host_alloc", 0), 0U);
}

TEST_F(Device, WhereTheDriverTakesNoPagesItsOwnMemoryDoes) {
  for (const char* refused : {"mem_host_register", "mem_host_get_device_pointer"}) {
    DeviceObjects objects(api_);
    machine_.fail(refused, 1, 801, 0);
    auto made = objects.pinned_pages(4096, "a test");
    ASSERT_TRUE(made) << made.status().message();
    std::memset(*made, 1, 4096);
    EXPECT_EQ(machine_.counts(0).pinned, 4096U) << refused;
  }
  EXPECT_EQ(machine_.calls("mem_host_alloc", 0), 2U);
}

TEST_F(Device, AForkedProcessDoesNotHaveThePages) {
  DeviceObjects objects(api_);
  auto made = objects.pinned_pages(4096, "a test");
  ASSERT_TRUE(made) << made.status().message();
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) _exit(write(ends[1], *made, 1) == -1 ? 0 : 1);  // EFAULT: not there
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  close(ends[0]);
  close(ends[1]);
}

}  // namespace
}  // namespace paceline::gpu
