// The books of residual planes themselves: gaps between what is kept are made one where none is large enough.
#include "gpu/residuals.h"

#include <gtest/gtest.h>

#include "drivers/cuda/mock/machine.h"
#include "gpu/device.h"

namespace paceline::gpu {
namespace {

class ResidualPlanes : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(api_.device_primary_ctx_retain(&context_, 0), 0);
    ASSERT_EQ(api_.ctx_set_current(context_), 0);
    for (auto* stream : {&stream_, &other_})
      ASSERT_EQ(api_.stream_create_with_priority(stream, 1, 0), 0);
    objects_ = std::make_unique<DeviceObjects>(api_);
  }
  void TearDown() override {
    objects_.reset();
    api_.ctx_set_current(nullptr);
  }

  /// Planes of so many elements, of residuals and of velocities.
  std::unique_ptr<Residuals> planes(uint64_t elements) {
    auto made = std::make_unique<Residuals>(api_, stream_);
    Residuals::Memory memory;
    memory.elements = elements;
    for (auto* of : {&memory.residual, &memory.velocity})
      for (auto& plane : *of) plane = objects_->memory(elements * sizeof(float), "a plane").value();
    EXPECT_TRUE(made->use(memory).is_ok());
    return made;
  }

  static float value(uint64_t key, uint64_t i) {
    return static_cast<float>(key) + static_cast<float>(i) / 4096;
  }

  /// As an encoding of the whole parameter would write.
  Status write(Residuals& residuals, uint64_t key, uint64_t elements) {
    const ResidualRange range{key, 0, elements};
    PACELINE_ASSIGN(const auto place, residuals.place({&range, 1}, stream_));
    std::vector<float> values(elements);
    for (const auto& [to, sign] : {std::pair(place.after, 1.0F), {place.velocity_after, -1.0F}}) {
      for (uint64_t i = 0; i < elements; ++i) values[i] = sign * value(key, i);
      EXPECT_EQ(api_.memcpy_htod_async(to, values.data(), elements * sizeof(float), stream_), 0);
      EXPECT_EQ(api_.stream_synchronize(stream_), 0);
    }
    return Status::ok();
  }

  void expect(Residuals& residuals, uint64_t key, uint64_t elements) {
    std::vector<float> residual(elements), velocity(elements);
    ASSERT_TRUE(residuals.add_to(key, residual).is_ok());
    ASSERT_TRUE(residuals.add_to(key, velocity, Residuals::Kind::kVelocity).is_ok());
    for (uint64_t i = 0; i < elements; ++i) {
      ASSERT_EQ(residual[i], value(key, i)) << "parameter " << key << ", element " << i;
      ASSERT_EQ(velocity[i], -value(key, i)) << "parameter " << key << ", element " << i;
    }
  }

  static Status take_back(Residuals& residuals, std::vector<uint64_t> keys) {
    return residuals.rollback(keys);
  }
  static Status keep(Residuals& residuals, std::vector<uint64_t> keys) {
    return residuals.commit(keys);
  }

  cu::mock::Machine machine_{cu::mock::Options{}};
  const cu::Api& api_ = machine_.api();
  cu::Context context_ = nullptr;
  cu::Stream stream_ = nullptr, other_ = nullptr;
  std::unique_ptr<DeviceObjects> objects_;
};

// Two steps end before and behind one that is open: what it has written moves, in pieces, for it is longer than the gap.
TEST_F(ResidualPlanes, GapsAmidAPassAreMadeOne) {
  const auto residuals = planes(1600);
  ASSERT_TRUE(write(*residuals, 1, 480) && write(*residuals, 2, 635) && write(*residuals, 3, 480));
  ASSERT_TRUE(take_back(*residuals, {1, 3}));
  const ResidualRange range{4, 0, 960};
  EXPECT_EQ(residuals->place({&range, 1}, other_).status().code(), Code::kResourceExhausted)
      << "another stream would overtake what the move has to come behind";
  const Status written = write(*residuals, 4, 960);
  ASSERT_TRUE(written) << written.message();
  const Status full = write(*residuals, 5, 1);
  EXPECT_EQ(full.code(), Code::kResourceExhausted);
  EXPECT_NE(full.message().find("reserve() the gradients of all models"), std::string::npos);
  ASSERT_TRUE(residuals->commit());
  expect(*residuals, 2, 635);
  expect(*residuals, 4, 960);
}

// What is used twice in a step is found where it has moved to.
TEST_F(ResidualPlanes, WhatHasMovedIsWrittenInItsNewPlace) {
  const auto residuals = planes(1600);
  ASSERT_TRUE(write(*residuals, 1, 480) && write(*residuals, 2, 640) && write(*residuals, 3, 480));
  ASSERT_TRUE(take_back(*residuals, {1, 3}));
  ASSERT_TRUE(write(*residuals, 4, 960));
  const ResidualRange range{2, 0, 640};
  const auto again = residuals->place({&range, 1}, stream_);
  ASSERT_TRUE(again) << again.status().message();
  EXPECT_EQ(again->before, again->after) << "the plane is full: there is no other place";
  ASSERT_TRUE(residuals->commit());
  expect(*residuals, 2, 640);
  expect(*residuals, 4, 960);
}

// The same among committed values, where a step ends beside an open one.
TEST_F(ResidualPlanes, GapsAtAStepsEndAreMadeOne) {
  const auto residuals = planes(1600);
  ASSERT_TRUE(write(*residuals, 1, 480) && write(*residuals, 2, 640) && write(*residuals, 3, 480));
  ASSERT_TRUE(residuals->commit());
  residuals->forget(1);
  residuals->forget(3);
  ASSERT_TRUE(write(*residuals, 5, 640));  // another model's, that stays open
  ASSERT_TRUE(write(*residuals, 4, 960));
  const Status kept = keep(*residuals, {4});
  ASSERT_TRUE(kept) << kept.message();
  expect(*residuals, 2, 640);
  expect(*residuals, 4, 960);
  ASSERT_TRUE(take_back(*residuals, {5}));
  expect(*residuals, 2, 640);
}

// Half of a shard goes to another rank: its memory is for others when that counts, and its own again when it does not.
TEST_F(ResidualPlanes, WhatIsGivenAwayLeavesItsMemory) {
  for (const bool counts : {true, false}) {
    const auto residuals = planes(1600);
    ASSERT_TRUE(write(*residuals, 1, 1600));
    ASSERT_TRUE(residuals->commit());
    const ResidualRange away{1, 800, 800};
    std::vector<Residuals::Parting> partings;
    residuals->release({&away, 1}, partings);
    ASSERT_EQ(partings.size(), 1U);
    ASSERT_TRUE(write(*residuals, 6, 16));  // stays open
    ASSERT_TRUE(counts ? keep(*residuals, {1}) : take_back(*residuals, {1}));
    if (counts) {
      ASSERT_TRUE(write(*residuals, 2, 800));
      const Status kept = keep(*residuals, {2});
      ASSERT_TRUE(kept) << kept.message();
      expect(*residuals, 2, 800);
      expect(*residuals, 1, 800);
    } else {
      expect(*residuals, 1, 1600);
    }
  }
}

// A long run beside a short gap would take too many copies.
TEST_F(ResidualPlanes, WhatWouldMoveInTooManyPiecesStays) {
  constexpr uint64_t kLong = 16 * 513;
  const auto residuals = planes(kLong + 32);
  ASSERT_TRUE(write(*residuals, 1, 16) && write(*residuals, 2, kLong));
  ASSERT_TRUE(take_back(*residuals, {1}));
  const auto before = machine_.calls("memcpy_dtod_async", 0);
  EXPECT_EQ(write(*residuals, 3, 32).code(), Code::kResourceExhausted);
  EXPECT_EQ(machine_.calls("memcpy_dtod_async", 0), before);
  ASSERT_TRUE(write(*residuals, 3, 16));
  ASSERT_TRUE(residuals->commit());
  expect(*residuals, 2, kLong);
}

}  // namespace
}  // namespace paceline::gpu
