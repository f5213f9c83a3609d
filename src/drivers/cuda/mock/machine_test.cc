#include "drivers/cuda/mock/machine.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "drivers/cuda/loader.h"

namespace paceline::drivers::cuda::mock {
namespace {

struct OnDevice : testing::Test {
  void begin(const Options& options) {
    machine = std::make_unique<Machine>(options);
    api = &machine->api();
    Context context = nullptr;
    ASSERT_EQ(api->device_primary_ctx_retain(&context, 0), 0);
    ASSERT_EQ(api->ctx_set_current(context), 0);
    for (auto* s : {&a, &b}) ASSERT_EQ(api->stream_create_with_priority(s, 1, 0), 0);
    void* memory = nullptr;
    ASSERT_EQ(api->mem_host_alloc(&memory, 64, 0), 0);
    std::memset(memory, 0, 64);
    flag = static_cast<uint32_t*>(memory);
  }
  DevicePtr address() const { return reinterpret_cast<DevicePtr>(flag); }
  void set(uint32_t value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }
  std::unique_ptr<Machine> machine;
  const Api* api = nullptr;
  Stream a = nullptr, b = nullptr;
  uint32_t* flag = nullptr;
};

TEST_F(OnDevice, AStreamWaitsForAValueThatTheHostWrites) {
  begin({});
  ASSERT_EQ(api->stream_wait_value32(a, address(), 3, kWaitValueGeq), 0);
  EXPECT_EQ(machine->counts(0).pending_waits, 1U);
  set(2);
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  EXPECT_EQ(api->stream_query(a), kNotReady);
  EXPECT_EQ(api->stream_query(b), 0);
  EXPECT_EQ(machine->counts(0).most_streams_in_wait, 1U);
  ASSERT_EQ(api->stream_wait_value32(b, address(), 3, kWaitValueGeq), 0);
  EXPECT_EQ(machine->counts(0).streams_in_wait, 2U);
  set(4);
  EXPECT_EQ(api->stream_synchronize(a), 0);
  EXPECT_EQ(api->stream_synchronize(b), 0);
  EXPECT_EQ(machine->counts(0).pending_waits, 0U);
  EXPECT_EQ(machine->counts(0).streams_in_wait, 0U);
  EXPECT_EQ(machine->counts(0).most_streams_in_wait, 2U);
}

TEST_F(OnDevice, ValuesCompareAcrossTheirWrap) {
  begin({});
  set(0xfffffff0U);
  ASSERT_EQ(api->stream_wait_value32(a, address(), 5, kWaitValueGeq), 0);
  EXPECT_EQ(api->stream_query(a), kNotReady);
  set(5);
  EXPECT_EQ(api->stream_synchronize(a), 0);
}

// What a wrong order does under CUDA_DEVICE_MAX_CONNECTIONS=1: a wait whose value another stream writes later.
TEST_F(OnDevice, OneQueueHangsWhereAWaitStandsBeforeItsWrite) {
  for (const int queues : {0, 1}) {
    begin({.hardware_queues = queues, .patience_s = 1});
    ASSERT_EQ(api->stream_wait_value32(a, address(), 1, kWaitValueGeq), 0);
    ASSERT_EQ(api->stream_write_value32(b, address(), 1, 0), 0);
    EXPECT_EQ(api->stream_synchronize(a) == 0, queues == 0);
    set(1);
    EXPECT_TRUE(machine->wait_idle(0));
    machine.reset();
  }
}

// What a kernel's first use may do: nothing that comes later runs before everything earlier has, on any stream.
TEST_F(OnDevice, ABarrierHoldsUpAllThatComesLater) {
  begin({});
  ASSERT_EQ(api->stream_wait_value32(a, address(), 1, kWaitValueGeq), 0);
  uint32_t before = 0, after = 0;
  const auto place = [](uint32_t* word) { return reinterpret_cast<DevicePtr>(word); };
  ASSERT_EQ(api->stream_write_value32(b, place(&before), 1, 0), 0);
  EXPECT_EQ(api->stream_synchronize(b), 0);
  EXPECT_EQ(before, 1U);
  machine->add_barrier(nullptr, 0);
  ASSERT_EQ(api->stream_write_value32(b, place(&after), 1, 0), 0);
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(api->stream_query(b), kNotReady);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  set(1);
  EXPECT_EQ(api->stream_synchronize(b), 0);
  EXPECT_EQ(after, 1U);
}

TEST_F(OnDevice, EventsOrderStreams) {
  begin({.delays_us = 300});
  auto* data = new float[2]{1, 0};
  for (int i = 0; i < 50; ++i) {
    Event e = nullptr;
    ASSERT_EQ(api->event_create(&e, 0), 0);
    data[0] = static_cast<float>(i);
    ASSERT_EQ(api->memcpy_dtod_async(reinterpret_cast<DevicePtr>(data + 1),
                                     reinterpret_cast<DevicePtr>(data), 4, a),
              0);
    ASSERT_EQ(api->event_record(e, a), 0);
    ASSERT_EQ(api->stream_wait_event(b, e, 0), 0);
    float seen = -1;
    ASSERT_EQ(api->memcpy_dtoh_async(&seen, reinterpret_cast<DevicePtr>(data + 1), 4, b), 0);
    ASSERT_EQ(api->stream_synchronize(b), 0);
    EXPECT_EQ(seen, static_cast<float>(i));
    EXPECT_EQ(api->event_query(e), 0);
  }
  delete[] data;
}

void add(const Grid& grid, float* to, float value, int n) {
  for (int i = 0; i < n; ++i) to[i] += value * static_cast<float>(grid.grid_x);
}

TEST_F(OnDevice, KernelsGetTheirArgumentsAsTheyWereAtTheLaunch) {
  begin({});
  machine->add_kernel("add", &add);
  Module module = nullptr;
  Function function = nullptr;
  ASSERT_EQ(api->module_load_data(&module, "anything"), 0);
  ASSERT_EQ(api->module_get_function(&function, module, "add"), 0);
  EXPECT_NE(api->module_get_function(&function, module, "subtract"), 0);
  ASSERT_EQ(api->module_get_function(&function, module, "add"), 0);
  float data[2] = {0, 0};
  float* to = data;
  float value = 2;
  int n = 2;
  void* arguments[] = {&to, &value, &n};
  ASSERT_EQ(api->stream_wait_value32(a, address(), 1, kWaitValueGeq), 0);
  ASSERT_EQ(api->launch_kernel(function, 3, 1, 1, 32, 1, 1, 0, a, arguments, nullptr), 0);
  value = 100;
  set(1);
  ASSERT_EQ(api->stream_synchronize(a), 0);
  EXPECT_EQ(data[1], 6);
}

TEST_F(OnDevice, AllocationsUnderAWaitAreCounted) {
  begin({.memory = 4096});
  DevicePtr p = 0;
  ASSERT_EQ(api->mem_alloc(&p, 1024), 0);
  EXPECT_EQ(machine->counts(0).allocations_in_wait, 0U);
  ASSERT_EQ(api->stream_wait_value32(a, address(), 1, kWaitValueGeq), 0);
  DevicePtr q = 0;
  ASSERT_EQ(api->mem_alloc(&q, 1024), 0);
  EXPECT_EQ(machine->counts(0).allocations_in_wait, 1U);
  EXPECT_EQ(api->mem_alloc(&q, 4096), 2);
  set(1);
  EXPECT_EQ(api->mem_free(p), 0);
  EXPECT_EQ(machine->counts(0).memory, 1024U);
}

TEST_F(OnDevice, FaultsComeWhereTheyWereAskedFor) {
  begin({});
  machine->fail("event_create", 2, 700);
  Event e = nullptr;
  EXPECT_EQ(api->event_create(&e, 0), 0);
  EXPECT_EQ(api->event_create(&e, 0), 700);
  EXPECT_EQ(api->event_create(&e, 0), 0);
  EXPECT_EQ(machine->calls("event_create"), 3U);
  machine->lose(0, 719);
  EXPECT_EQ(api->stream_synchronize(a), 719);
  auto status = explain(*api, 719, "the path");
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_NE(status.message().find("CUDA_ERROR_LAUNCH_FAILED"), std::string::npos);
  EXPECT_NE(status.message().find("Xid"), std::string::npos);
}

TEST_F(OnDevice, EveryErrorHasASentence) {
  begin({});
  const auto expect = [&](CudaResult error, Code code, const char* fix) {
    const Status status = explain(*api, error, "x");
    EXPECT_EQ(status.code(), code) << status.message();
    EXPECT_NE(status.message().find(fix), std::string::npos) << status.message();
  };
  expect(2, Code::kResourceExhausted, "take a smaller batch");
  expect(2, Code::kResourceExhausted, "PACELINE_CUDA_PATH=torch");
  expect(214, Code::kUnavailable, "that ECC could not correct (Xid 48, 63, 64 or 94 in dmesg)");
  expect(214, Code::kUnavailable, "restart the job without this GPU");
  expect(220, Code::kUnavailable, "Xid 74");
  expect(226, Code::kUnavailable, "Xid 94");
  expect(700, Code::kUnavailable, "compute-sanitizer");
  for (const CudaResult broken : {714, 715, 716, 717, 718})
    expect(broken, Code::kUnavailable, "The process must be started again");
  expect(719, Code::kUnavailable, "79 means fallen off the bus");
  EXPECT_NE(explain(*api, 12345, "x").message().find("12345"), std::string::npos);
  EXPECT_NE(explain(Api(), 3, "x").message().find("after fork()"), std::string::npos);
}

TEST_F(OnDevice, DevicesThatAreNotThereAreNamed) {
  begin({.devices = 2});
  EXPECT_TRUE(check_device(*api, 1).is_ok());
  auto status = check_device(*api, 2);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("no CUDA device 2: this process sees 2"), std::string::npos);
}

}  // namespace
}  // namespace paceline::drivers::cuda::mock
