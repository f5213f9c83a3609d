// The kernels' own source, run on the host by emulation.h, against the reference: bit by bit, in random orders.
#include "device/cuda/emulation.h"

#include <gtest/gtest.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "device/cuda/codec_test_util.h"
#include "device/cuda/enqueue.h"
#include "device/cuda/reference.h"

namespace paceline::device::cuda {

#define PACELINE_DECLARE(name, argument) extern "C" void paceline_##name(const argument);
PACELINE_KERNELS(PACELINE_DECLARE)
#undef PACELINE_DECLARE

namespace emulation {
namespace {

enum class State { kReady, kAtWarp, kAtBlock, kDone };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<std::byte[]> stack;
  State state = State::kReady;
};

/// A block that runs. One at a time: kernels do not start kernels.
struct Block {
  std::vector<Fiber> fibers;
  ucontext_t scheduler;
  uint32_t current = 0;
  const std::function<void()>* kernel = nullptr;
  std::vector<std::array<uint32_t, 32>> lanes;  ///< what the warps exchange
};
Block block;

void enter() {
  (*block.kernel)();
  block.fibers[block.current].state = State::kDone;
  swapcontext(&block.fibers[block.current].context, &block.scheduler);
}

void wait_as(State state) {
  Fiber& fiber = block.fibers[block.current];
  fiber.state = state;
  swapcontext(&fiber.context, &block.scheduler);
}

/// Lets those go on that all their fellows have joined; false when nobody can.
bool release(State at, uint32_t begin, uint32_t end) {
  bool any = false;
  for (uint32_t i = begin; i < end; ++i) {
    if (block.fibers[i].state == State::kDone) continue;
    if (block.fibers[i].state != at) return false;
    any = true;
  }
  for (uint32_t i = begin; i < end && any; ++i)
    if (block.fibers[i].state == at) block.fibers[i].state = State::kReady;
  return any;
}

void run_block(uint32_t threads, std::mt19937& random) {
  constexpr size_t kStack = 64 << 10;
  block.fibers.resize(threads);
  block.lanes.resize(threads / 32);
  std::vector<uint32_t> order(threads);
  for (uint32_t i = 0; i < threads; ++i) {
    Fiber& fiber = block.fibers[i];
    if (fiber.stack == nullptr) fiber.stack = std::make_unique<std::byte[]>(kStack);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
    fiber.state = State::kReady;
    order[i] = i;
  }
  while (true) {
    std::shuffle(order.begin(), order.end(), random);
    bool ran = false;
    for (const uint32_t i : order) {
      if (block.fibers[i].state != State::kReady) continue;
      block.current = i;
      threadIdx.x = i;
      swapcontext(&block.scheduler, &block.fibers[i].context);
      ran = true;
    }
    for (uint32_t warp = 0; warp < threads; warp += 32)
      ran |= release(State::kAtWarp, warp, warp + 32);
    ran |= release(State::kAtBlock, 0, threads);
    if (ran) continue;
    for (const Fiber& fiber : block.fibers)
      if (fiber.state != State::kDone) {
        std::fprintf(stderr, "emulation: a barrier that not all threads reach (block %u)\n",
                     blockIdx.x);
        std::abort();
      }
    return;
  }
}

}  // namespace

void block_barrier() { wait_as(State::kAtBlock); }
void warp_barrier() { wait_as(State::kAtWarp); }

const uint32_t* exchange(uint32_t value) {
  thread_local std::array<uint32_t, 32> all;
  auto& lanes = block.lanes[block.current / 32];
  lanes[block.current % 32] = value;
  warp_barrier();
  const std::array<uint32_t, 32> seen = lanes;
  warp_barrier();  // none overwrites what another has not read yet
  all = seen;
  return all.data();
}

void run(uint32_t blocks, uint32_t threads, uint32_t seed, const std::function<void()>& kernel) {
  std::mt19937 random(seed);
  std::vector<uint32_t> order(blocks);
  for (uint32_t i = 0; i < blocks; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random);
  block.kernel = &kernel;
  gridDim.x = blocks;
  for (const uint32_t i : order) {
    blockIdx.x = i;
    run_block(threads, random);
  }
}

}  // namespace emulation

namespace {

using drivers::cuda::DevicePtr;
using test::Buffer;

class EmulatedDevice : public Launcher {
 public:
  explicit EmulatedDevice(uint32_t seed) : seed_(seed) {}
  Status clear(DevicePtr memory, uint64_t bytes) override {
    std::memset(reinterpret_cast<void*>(memory), 0, bytes);
    return Status::ok();
  }
  Status launch(KernelId kernel, uint32_t blocks, uint32_t threads, void* argument) override {
    emulation::run(blocks, threads, ++seed_, [&] { call(kernel, argument); });
    return Status::ok();
  }
  [[nodiscard]] uint32_t multiprocessors() const override { return 1; }

 private:
  static void call(KernelId kernel, const void* argument) {
    switch (kernel) {
#define PACELINE_CALL(name, type) \
  case KernelId::name:            \
    return paceline_##name(*static_cast<const type*>(argument));
      PACELINE_KERNELS(PACELINE_CALL)
#undef PACELINE_CALL
    }
  }
  uint32_t seed_;
};

void expect_same(const Buffer& want, const Buffer& got, const char* what) {
  for (uint64_t i = 0; i < want.bytes() / 4; ++i) {
    const uint32_t a = want.as<uint32_t>()[i], b = got.as<uint32_t>()[i];
    const bool both_nan = (a & 0x7FFFFFFFU) > 0x7F800000U && (b & 0x7FFFFFFFU) > 0x7F800000U;
    ASSERT_TRUE(a == b || both_nan) << what << ", word " << i << ": " << a << ", " << b;
  }
}

enum class Kind { kNormal, kTies, kClustered, kNonFinite };

Buffer input(DType dtype, uint64_t elements, Kind kind, uint32_t seed) {
  Buffer values = test::normal(dtype, elements, 1, seed);
  std::mt19937 random(seed);
  for (uint64_t i = 0; i < elements; ++i) {
    float value = test::widen(dtype, values.as<void>(), i);
    if (kind == Kind::kTies) value = random() % 100 < 3 ? std::copysign(1.0F, value) : 0;
    if (kind == Kind::kClustered) value *= i * 10 > elements * 9 ? 1 : 1e-3F;
    if (kind == Kind::kNonFinite && (i == elements / 2 || random() % 3000 == 0))
      value = random() % 2 == 0 ? INFINITY : NAN;
    test::narrow(dtype, value, values.as<void>(), i);
  }
  return values;
}

/// One encode and one combine of three encodings, on the emulated device and by the reference.
void check(const WireFormat& format, uint64_t elements, Kind kind, bool feedback, bool momentum,
           bool in_place, uint32_t seed, uint32_t addends = 0) {
  SCOPED_TRACE(testing::Message() << "codec " << static_cast<int>(format.codec) << ' '
                                  << dtype_name(format.dtype) << " × " << elements << ", kind "
                                  << static_cast<int>(kind) << ", seed " << seed << ", " << addends
                                  << " addends");
  EmulatedDevice device(seed);
  std::vector<Buffer> kept;
  std::vector<DevicePtr> sources[2];
  for (uint32_t node = 0; node < 3; ++node) {
    const Buffer gradient = input(format.dtype, elements, kind, seed + node);
    std::vector<Buffer> added;
    std::vector<DevicePtr> addend_addresses;
    for (uint32_t i = 0; i < addends; ++i) {
      added.push_back(input(format.dtype, elements, kind, seed + 100 * (i + 1) + node));
      addend_addresses.push_back(added.back().address());
    }
    std::vector<Buffer> encodings, residuals, velocities;
    uint32_t reports[2] = {0, 0};
    for (int side = 0; side < 2; ++side) {
      Buffer residual = test::normal(DType::kFloat32, elements, 0.1F, seed + 7);
      Buffer velocity = test::normal(DType::kFloat32, elements, 0.1F, seed + 8);
      if (kind == Kind::kTies) {  // equal values stay equal: more than k of them
        std::memset(residual.as<void>(), 0, residual.bytes());
        std::memset(velocity.as<void>(), 0, velocity.bytes());
      }
      Buffer next_residual(elements * 4), next_velocity(elements * 4);
      Buffer encoded(encoded_bytes(format, elements)), state(state_bytes(format, elements));
      EncodeArguments a;
      a.gradient = gradient.address();
      a.addends = addend_addresses;
      a.elements = elements;
      a.scale = 0.3F;
      if (feedback) {
        a.residual = residual.address();
        a.next_residual = in_place ? a.residual : next_residual.address();
      }
      if (momentum) {
        a.momentum = 0.9F;
        a.velocity = velocity.address();
        a.next_velocity = in_place ? a.velocity : next_velocity.address();
      }
      a.encoded = encoded.address();
      a.state = state.bytes() == 0 ? 0 : state.address();
      a.state_capacity = state.bytes();
      a.report = reinterpret_cast<DevicePtr>(&reports[side]);
      ASSERT_TRUE(
          (side == 0 ? reference::encode(format, a) : enqueue_encode(device, format, a)).is_ok());
      sources[side].push_back(encoded.address());
      encodings.push_back(std::move(encoded));
      residuals.push_back(std::move(in_place ? residual : next_residual));
      velocities.push_back(std::move(in_place ? velocity : next_velocity));
    }
    expect_same(encodings[0], encodings[1], "encoding");
    if (feedback) expect_same(residuals[0], residuals[1], "residual");
    if (momentum) expect_same(velocities[0], velocities[1], "velocity");
    EXPECT_EQ(reports[0], reports[1]);
    for (Buffer& encoding : encodings) kept.push_back(std::move(encoding));
  }
  const Buffer want(elements * 4), got(elements * 4);
  uint32_t report = 0;
  const auto address = reinterpret_cast<DevicePtr>(&report);
  ASSERT_TRUE(
      reference::combine(format, {sources[0], elements, 0.7F, want.address(), address}).is_ok());
  ASSERT_TRUE(enqueue_combine(device, format, {sources[1], elements, 0.7F, got.address(), address})
                  .is_ok());
  expect_same(want, got, "sum");
  EXPECT_EQ(report, 0U);
}

/// Sanitizers lose sight of a thread's stack when it changes from fiber to fiber.
class Emulated : public testing::Test {
 protected:
  void SetUp() override {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "fibers don't run under this sanitizer";
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
    GTEST_SKIP() << "fibers don't run under this sanitizer";
#endif
#endif
  }
};

const std::vector<uint64_t> kSizes = {1, 3, 4095, 4097, 20001};

TEST_F(Emulated, DenseCodecs) {
  uint32_t seed = 100;
  for (const WireCodec codec : {WireCodec::kExact, WireCodec::kFp16, WireCodec::kBf16})
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16})
      for (const uint64_t elements : kSizes)
        check({codec, dtype}, elements, elements % 2 == 0 ? Kind::kNormal : Kind::kNonFinite, false,
              false, false, ++seed);
}

TEST_F(Emulated, Int8) {
  uint32_t seed = 200;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16})
    for (const uint64_t elements : kSizes)
      for (const Kind kind : {Kind::kNormal, Kind::kNonFinite}) {
        ++seed;
        check({WireCodec::kInt8, dtype}, elements, kind, seed % 3 != 0, false, seed % 2 == 0, seed);
      }
}

TEST_F(Emulated, TopK) {
  uint32_t seed = 300;
  for (const uint64_t elements : {1U, 3U, 4097U, 9001U})
    for (const Kind kind : {Kind::kNormal, Kind::kTies, Kind::kClustered, Kind::kNonFinite})
      for (const bool momentum : {false, true}) {
        ++seed;
        const DType dtype = seed % 4 == 0 ? DType::kFloat16 : DType::kFloat32;
        check({WireCodec::kTopK, dtype, 0.01, seed % 3 != 0}, elements, kind,
              momentum || seed % 5 != 0, momentum, seed / 2 % 2 == 0, seed);
        for (const DType type : {DType::kFloat32, DType::kFloat16, DType::kBFloat16})
          check({WireCodec::kTopK, type, 0.01, seed % 3 == 0}, elements, kind,
                momentum || seed % 5 == 0, momentum, seed % 2 == 0, seed, 1 + seed % 3);
      }
  check({WireCodec::kTopK, DType::kFloat32, 0.5}, 9000, Kind::kNormal, true, false, true, ++seed);
}

TEST_F(Emulated, TopKOfMoreThanAGroupOfTiles) {
  check({WireCodec::kTopK}, uint64_t{kTileGroup + 3} * kTopKTile + 5, Kind::kClustered, true, false,
        true, 400);
}

/// A sum's output with what lies behind it, which no kernel may touch.
class Guarded {
 public:
  explicit Guarded(uint64_t bytes) : bytes_(bytes), buffer_(bytes + kGuard) {}
  [[nodiscard]] DevicePtr address() const { return buffer_.address(); }
  [[nodiscard]] bool is_whole() const {
    const auto* behind = buffer_.as<const uint8_t>() + bytes_;
    return std::all_of(behind, behind + kGuard, [](uint8_t byte) { return byte == 0xA5; });
  }
  [[nodiscard]] const Buffer& buffer() const { return buffer_; }

 private:
  static constexpr uint64_t kGuard = 4096;
  uint64_t bytes_;
  Buffer buffer_;
};

TEST_F(Emulated, WhatIsNoTopKEncodingEndsAsByTheReference) {
  const uint64_t elements = 9001;
  uint32_t corrupted = 0;
  for (uint32_t seed = 700; seed < 760; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const WireFormat format{WireCodec::kTopK, DType::kFloat32, 0.02, seed % 2 == 0};
    const TopKLayout layout = top_k_layout(format, elements);
    std::vector<Buffer> encodings;
    std::vector<DevicePtr> sources;
    const Buffer state(state_bytes(format, elements));
    for (uint32_t node = 0; node < 3; ++node) {
      const Buffer gradient = test::normal(DType::kFloat32, elements, 1, seed + node);
      encodings.emplace_back(layout.bytes);
      EncodeArguments a;
      a.gradient = gradient.address();
      a.elements = elements;
      a.encoded = encodings.back().address();
      a.state = state.address();
      a.state_capacity = state.bytes();
      ASSERT_TRUE(reference::encode(format, a).is_ok());
      sources.push_back(a.encoded);
    }
    const Buffer& bad = encodings[random() % 3];
    const uint32_t what = seed % 4;
    if (what == 0) {
      auto& start = bad.as<uint32_t>()[random() % (layout.tiles + 1)];
      start = random() % 2 == 0 ? static_cast<uint32_t>(random()) : start + random() % 9 - 4;
    } else if (what == 1) {
      bad.as<uint8_t>()[layout.exponents + random() % layout.tiles] =
          static_cast<uint8_t>(random());
    } else if (what == 2) {
      auto* offsets = reinterpret_cast<uint16_t*>(bad.as<std::byte>() + layout.offsets);
      offsets[random() % layout.entries] = static_cast<uint16_t>(random());
    } else {
      bad.as<uint8_t>()[layout.values + random() % (layout.bytes - layout.values)] ^= 0x40U;
    }
    EmulatedDevice device(seed);
    const Guarded want(elements * 4), got(elements * 4);
    uint32_t reports[2] = {0, 0};
    ASSERT_TRUE(reference::combine(format, {sources, elements, 0.7F, want.address(),
                                            reinterpret_cast<DevicePtr>(&reports[0])})
                    .is_ok());
    ASSERT_TRUE(enqueue_combine(device, format,
                                {sources, elements, 0.7F, got.address(),
                                 reinterpret_cast<DevicePtr>(&reports[1])})
                    .is_ok());
    EXPECT_EQ(reports[0], reports[1]);
    EXPECT_TRUE(want.is_whole() && got.is_whole());
    if (reports[0] != 0) ++corrupted;
    // Where two entries say one position, their order is nobody's; of a told corruption no value counts.
    if (reports[0] == 0 && (what == 1 || what == 3))
      expect_same(want.buffer(), got.buffer(), "sum");
  }
  EXPECT_GT(corrupted, 10U);
}

TEST_F(Emulated, AnyBytesAreAnInt8Encoding) {
  for (uint32_t seed = 800; seed < 810; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const uint64_t elements = 1 + random() % 3000;
    const WireFormat format{WireCodec::kInt8};
    std::vector<Buffer> encodings;
    std::vector<DevicePtr> sources;
    for (int node = 0; node < 3; ++node) {
      encodings.emplace_back(encoded_bytes(format, elements));
      for (uint64_t i = 0; i < encodings.back().bytes() / 4; ++i)
        encodings.back().as<uint32_t>()[i] = static_cast<uint32_t>(random());
      sources.push_back(encodings.back().address());
    }
    EmulatedDevice device(seed);
    const Guarded want(elements * 4), got(elements * 4);
    ASSERT_TRUE(reference::combine(format, {sources, elements, 0.7F, want.address(), 0}).is_ok());
    ASSERT_TRUE(
        enqueue_combine(device, format, {sources, elements, 0.7F, got.address(), 0}).is_ok());
    EXPECT_TRUE(want.is_whole() && got.is_whole());
    expect_same(want.buffer(), got.buffer(), "sum");
  }
}

TEST_F(Emulated, WhatIsNoEncodingOfRowsStaysInsideTheOutput) {
  for (uint32_t seed = 900; seed < 920; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const RowFormat format{DType::kFloat32, DType::kFloat32, 200, 1 + random() % 20, 100};
    std::vector<Buffer> encodings;
    std::vector<DevicePtr> sources;
    bool is_possible = true;
    for (int node = 0; node < 3; ++node) {
      encodings.emplace_back(encoded_row_bytes(format));
      auto* words = encodings.back().as<uint32_t>();
      for (uint64_t i = 0; i < encodings.back().bytes() / 4; ++i)
        words[i] = static_cast<uint32_t>(random()) % (i < 104 && random() % 4 != 0 ? 200 : ~0U);
      words[0] = static_cast<uint32_t>(random()) % (seed % 2 == 0 ? 101 : ~0U);
      is_possible = is_possible && words[0] <= format.capacity;
      sources.push_back(encodings.back().address());
    }
    EmulatedDevice device(seed);
    const uint64_t elements = format.rows * format.row_elements;
    const Guarded got(elements * 4);
    ASSERT_TRUE(enqueue_combine_rows(device, format, {sources, 2, got.address()}).is_ok());
    EXPECT_TRUE(got.is_whole());
    for (uint64_t i = 0; !is_possible && i < elements; ++i)
      ASSERT_TRUE(std::isnan(got.buffer().as<float>()[i]));
  }
}

TEST_F(Emulated, SparseRows) {
  for (const uint64_t row_elements : {1U, 7U, 96U}) {
    for (const uint64_t rows : {1U, 300U, 1030U}) {
      const DType values = rows % 3 == 1      ? DType::kFloat32
                           : row_elements > 7 ? DType::kBFloat16
                                              : DType::kFloat16;
      const RowFormat format{DType::kFloat32, values, rows, row_elements, rows};
      std::mt19937 random(static_cast<uint32_t>(rows + row_elements));
      Buffer gradient = test::normal(format.dtype, rows * row_elements, 1, 5);
      for (uint64_t row = 0; row < rows; ++row)
        if (random() % 4 != 0)
          std::fill_n(gradient.as<float>() + row * row_elements, row_elements, -0.0F);
      EmulatedDevice device(500);
      const Buffer want(encoded_row_bytes(format)), got(encoded_row_bytes(format));
      std::memset(want.as<void>(), 0xA5, want.bytes());  // what is not used is left alone
      std::memset(got.as<void>(), 0xA5, got.bytes());
      const Buffer state(row_state_bytes(format));
      const Buffer sum(rows * row_elements * 4), emulated_sum(rows * row_elements * 4);
      EncodeRowsArguments a{gradient.address(), 0.5F, want.address(), state.address(), 0};
      ASSERT_TRUE(reference::encode_rows(format, a).is_ok());
      a.encoded = got.address();
      ASSERT_TRUE(enqueue_encode_rows(device, format, a).is_ok());
      expect_same(want, got, "rows");
      const std::vector<DevicePtr> sources(rows == 300 ? 35 : 3, want.address());
      ASSERT_TRUE(reference::combine_rows(format, {sources, 2, sum.address()}).is_ok());
      ASSERT_TRUE(
          enqueue_combine_rows(device, format, {sources, 2, emulated_sum.address()}).is_ok());
      expect_same(sum, emulated_sum, "sum of rows");
    }
  }
}

TEST_F(Emulated, MoreSparseRowsThanTheBound) {
  const RowFormat format{DType::kFloat32, DType::kFloat32, 1030, 8, 101};
  const Buffer gradient = test::normal(format.dtype, format.rows * format.row_elements, 1, 5);
  EmulatedDevice device(550);
  const Buffer want(encoded_row_bytes(format)), got(encoded_row_bytes(format));
  const Buffer state(row_state_bytes(format));
  uint32_t report = 0, emulated_report = 0;
  EncodeRowsArguments a{gradient.address(), 0.5F, want.address(), state.address(),
                        reinterpret_cast<DevicePtr>(&report)};
  ASSERT_TRUE(reference::encode_rows(format, a).is_ok());
  std::memset(got.as<void>(), 0xA5, got.bytes());
  a.encoded = got.address();
  a.report = reinterpret_cast<DevicePtr>(&emulated_report);
  ASSERT_TRUE(enqueue_encode_rows(device, format, a).is_ok());
  expect_same(want, got, "rows beyond the bound");
  EXPECT_EQ(report, kReportRows);
  EXPECT_EQ(emulated_report, kReportRows);
  const Buffer sum(format.rows * format.row_elements * sizeof(float));
  const DevicePtr source = got.address();
  ASSERT_TRUE(enqueue_combine_rows(device, format, {{&source, 1}, 1, sum.address()}).is_ok());
  for (uint64_t i = 0; i < format.rows * format.row_elements; ++i)
    ASSERT_TRUE(std::isnan(sum.as<float>()[i]));
}

TEST_F(Emulated, Segments) {
  const Buffer data = test::normal(DType::kFloat32, 100000, 1, 1);
  const Buffer buffer(400000);
  std::vector<Segment> segments;
  uint64_t offset = 0, place = 0;
  for (uint64_t i = 0; i < 140; ++i) {
    const uint64_t bytes = i == 70 ? 100001 : i * 17 % 1000;
    segments.push_back({data.address() + place, offset, bytes});
    place += bytes + i % 16;
    offset += bytes;
  }
  EmulatedDevice device(600);
  ASSERT_TRUE(enqueue_copy(device, segments, buffer.address(), Direction::kPack).is_ok());
  for (const Segment& segment : segments)
    ASSERT_EQ(0, std::memcmp(reinterpret_cast<const void*>(segment.tensor),
                             buffer.as<std::byte>() + segment.offset, segment.bytes));
}

}  // namespace
}  // namespace paceline::device::cuda
