// The residuals of a path: their memory, and what a step does with them. Their books are residuals.h's.
#include <fmt/format.h>

#include <algorithm>

#include "drivers/cuda/loader.h"
#include "gpu/path.h"

namespace paceline::gpu {
namespace {

// Behind a plane is room for so many elements, which kernels take from where they are aligned: see multiply_unaligned().
constexpr uint64_t kBehind = 4;
cu::DevicePtr behind(const Residuals::Memory& planes) {
  return planes.residual[0] + planes.elements * sizeof(float);
}

}  // namespace

// --- Memory -----------------------------------------------------------------------------------------------------

Result<Residuals::Memory> Path::make_planes(DeviceObjects& from, uint64_t elements, bool velocity) {
  Residuals::Memory m;
  m.elements = (elements + kBehind - 1) / kBehind * kBehind;
  for (auto& p : m.residual) {
    PACELINE_ASSIGN(
        p, from.memory((m.elements + kBehind) * sizeof(float), "residuals of error feedback"));
  }
  for (auto& p : m.velocity) {
    if (!velocity) break;
    PACELINE_ASSIGN(p, from.memory(m.elements * sizeof(float), "momentum correction"));
  }
  return m;
}

/// Planes for a step's gradients as float32. Nothing is under way.
Status Path::allocate_residuals(bool velocity, bool of_sums) {
  settle_launches();
  const uint64_t mine = reserved_bytes_ / sizeof(float) / static_cast<uint64_t>(shape_.local_size);
  // Runs are padded to 16 elements each, parts rounded; tails belong to the last rank.
  constexpr uint64_t kSlack = 1U << 16;
  auto fresh = std::make_unique<DeviceObjects>(api_);
  PACELINE_ASSIGN(auto planes,
                  make_planes(*fresh, mine + mine / 64 + kSlack + spare_residuals_, velocity));
  PACELINE_RETURN_IF_ERROR(residuals_->use(planes));
  few_elements_[0] = behind(planes);
  const bool sums = shape_.nodes > 2 && of_sums;
  if (shape_.local_size > 1 || sums) {  // else the only rank of a node owns all of what it encodes
    constexpr uint64_t kBytes = kHandOverElements * sizeof(float);
    PACELINE_ASSIGN(const auto memory, fresh->memory(hand_over_memory_.size() * kBytes,
                                                     "residuals that change their owner"));
    for (size_t i = 0; i < hand_over_memory_.size(); ++i)
      hand_over_memory_[i] = memory + i * kBytes;
  }
  if (sums) {
    const uint64_t parts = mine / static_cast<uint64_t>(shape_.nodes);
    PACELINE_ASSIGN(auto more, make_planes(*fresh, parts + parts / 2 + kSlack, false));
    PACELINE_RETURN_IF_ERROR(sum_residuals_->use(more));
    few_elements_[1] = behind(more);
  }
  for (auto* stream : {out_, gather_})
    PACELINE_RETURN_IF_ERROR(drain(stream, "moving residuals", kEndSeconds));
  {
    const std::lock_guard lock(memory_mutex_);
    residual_memory_.swap(fresh);
  }
  return Status::ok();
}

/// For a codec that reserve() did not know of: possible as long as no stream waits for the network, for taking memory may
/// wait for all streams.
Status Path::ensure_residuals(bool velocity, bool sums) {
  if (residuals_->ready() && (residuals_->has_velocity() || !velocity) &&
      (sum_residuals_->ready() || shape_.nodes == 2 || !sums))
    return Status::ok();
  if (!pump_->all_arrived())
    return {
        Code::kInvalidArgument,
        "the first all-reduce whose codec keeps residuals takes their memory, so it must not be "
        "submitted while others are under way: choose the codec by the settings (PACELINE_CODEC), "
        "or submit one such operation first"};
  return allocate_residuals(velocity || residuals_->has_velocity(),
                            sums || sum_residuals_->ready());
}

// --- Steps ------------------------------------------------------------------------------------------------------

Status Path::order_lanes_after_gather() {
  PACELINE_CUDA_CALL(api_, event_record, committed_, gather_);
  for (auto& lane : std::span(lanes_).first(lanes_.size() - 1))
    PACELINE_CUDA_CALL(api_, stream_wait_event, lane.in, committed_, 0);
  return Status::ok();
}

/// The step ends: of what ranks owe, then of what sums owe.
Status Path::settle(const char* what, const std::function<Status(Residuals&)>& end) {
  PACELINE_RETURN_IF_ERROR(usable(what));
  const CurrentContext current(api_, context_);
  settle_sums();
  PACELINE_RETURN_IF_ERROR(ended_by(end(*residuals_)));
  if (!sum_residuals_->ready()) return Status::ok();
  // The planes of the sums change behind all lanes, which may read next what another of them has written.
  auto status = end(*sum_residuals_);
  if (status) status = order_lanes_after_gather();
  return ended_by(status);
}

Status Path::commit_residuals() {
  return settle("residual commit", [](Residuals& r) { return r.commit(); });
}

Status Path::commit_residuals(std::span<const uint64_t> keys) {
  return settle("residual commit", [&](Residuals& r) { return r.commit(keys); });
}

Status Path::rollback_residuals() {
  return settle("residual rollback", [](Residuals& r) { return r.rollback(); });
}

Status Path::rollback_residuals(std::span<const uint64_t> keys) {
  return settle("residual rollback", [&](Residuals& r) { return r.rollback(keys); });
}

/// Decoding an exact encoding in place multiplies it.
Status Path::multiply(cu::DevicePtr values, uint64_t elements, double factor,
                      cu::Stream stream) const {
  device::cuda::CombineArguments c;
  c.encoded = {&values, 1};
  c.elements = elements;
  c.scale = static_cast<float>(factor);
  c.output = values;
  return kernels_->combine({}, c, stream);
}

/// Kernels want aligned memory: what comes before the first such address goes through a copy.
Status Path::multiply_unaligned(cu::DevicePtr values, uint64_t elements, double factor,
                                cu::Stream stream) const {
  constexpr uint64_t kAlignment = 16;
  const uint64_t before = (kAlignment - values % kAlignment) % kAlignment / sizeof(float);
  const uint64_t few = std::min(before, elements);
  if (few > 0) {
    const cu::DevicePtr aside = few_elements_[stream == gather_ ? 1 : 0];
    PACELINE_CUDA_CALL(api_, memcpy_dtod_async, aside, values, few * sizeof(float), stream);
    PACELINE_RETURN_IF_ERROR(multiply(aside, few, factor, stream));
    PACELINE_CUDA_CALL(api_, memcpy_dtod_async, values, aside, few * sizeof(float), stream);
  }
  if (elements == few) return Status::ok();
  return multiply(values + few * sizeof(float), elements - few, factor, stream);
}

Status Path::scale(double factor, const std::function<Status(Residuals&, const Multiply&)>& all) {
  PACELINE_RETURN_IF_ERROR(usable("residual scale"));
  if (!(factor > 0 && factor < 1e38))
    return {
        Code::kInvalidArgument,
        fmt::format("residuals can't be scaled by {:g}: a change of loss scale from a to b is the "
                    "finite, positive factor b / a",
                    factor)};
  const CurrentContext current(api_, context_);
  settle_sums();
  const auto on = [&](cu::Stream stream) -> Multiply {
    return [this, factor, stream](cu::DevicePtr values, uint64_t elements) {
      return multiply_unaligned(values, elements, factor, stream);
    };
  };
  PACELINE_RETURN_IF_ERROR(ended_by(all(*residuals_, on(out_))));
  if (!sum_residuals_->ready()) return Status::ok();
  auto status = all(*sum_residuals_, on(gather_));
  if (status) status = order_lanes_after_gather();
  return ended_by(status);
}

Status Path::scale_residuals(double factor) {
  return scale(factor,
               [](const Residuals& r, const Multiply& by) { return r.for_committed_planes(by); });
}

Status Path::scale_residuals(double factor, std::span<const uint64_t> keys) {
  return scale(factor,
               [&](const Residuals& r, const Multiply& by) { return r.for_committed(keys, by); });
}

Status Path::read_residual(uint64_t key, std::span<float> data) {
  PACELINE_RETURN_IF_ERROR(usable("residual read"));
  const CurrentContext current(api_, context_);
  settle_sums();
  std::fill(data.begin(), data.end(), 0.0F);
  PACELINE_RETURN_IF_ERROR(ended_by(residuals_->add_to(key, data)));
  return ended_by(sum_residuals_->add_to(key, data));
}

Status Path::make_room_for(uint64_t elements) {
  if (!pump_->all_arrived())
    return {Code::kInvalidArgument,
            "residuals of another number of ranks take more memory, so they must not be loaded "
            "while operations are under way: load them before the backward pass"};
  const uint64_t mine = reserved_bytes_ / sizeof(float) / static_cast<uint64_t>(shape_.local_size);
  constexpr uint64_t kRuns = 64;  // each of them is padded
  spare_residuals_ += std::max(elements + elements / kRuns, mine / 4);
  return ended_by(allocate_residuals(residuals_->has_velocity(), sum_residuals_->ready()));
}

Status Path::read_velocity(uint64_t key, std::span<float> data) {
  PACELINE_RETURN_IF_ERROR(usable("velocity read"));
  const CurrentContext current(api_, context_);
  settle_sums();
  std::fill(data.begin(), data.end(), 0.0F);
  if (!residuals_->has_velocity()) return Status::ok();
  return ended_by(residuals_->add_to(key, data, Residuals::Kind::kVelocity));
}

Status Path::write_kept(uint64_t key, std::span<const float> data, Residuals::Kind kind) {
  auto written = residuals_->write(key, data, kind);
  if (written.code() == Code::kResourceExhausted) {
    // Of another number of ranks: with the next step what is owed goes to its owners, until then it needs a place here.
    PACELINE_RETURN_IF_ERROR(make_room_for(data.size()));
    written = residuals_->write(key, data, kind);
  }
  return ended_by(written);
}

Status Path::write_residual(uint64_t key, std::span<const float> data) {
  PACELINE_RETURN_IF_ERROR(usable("residual write"));
  const CurrentContext current(api_, context_);
  settle_sums();
  if (!residuals_->ready() && data.empty()) return Status::ok();
  if (!residuals_->ready()) PACELINE_RETURN_IF_ERROR(ended_by(ensure_residuals(false, false)));
  PACELINE_RETURN_IF_ERROR(write_kept(key, data, Residuals::Kind::kResidual));
  // What was read of the sums is part of the values now.
  sum_residuals_->forget(key);
  return Status::ok();
}

Status Path::write_velocity(uint64_t key, std::span<const float> data) {
  PACELINE_RETURN_IF_ERROR(usable("velocity write"));
  const CurrentContext current(api_, context_);
  settle_sums();
  if (data.empty())
    return {Code::kInvalidArgument,
            fmt::format("the velocity of parameter {} to load has no elements; a residual without "
                        "elements forgets both",
                        key)};
  const bool nothing = std::all_of(data.begin(), data.end(), [](float v) { return v == 0; });
  if (!residuals_->has_velocity() && nothing) return Status::ok();
  PACELINE_RETURN_IF_ERROR(ended_by(ensure_residuals(true, false)));
  return write_kept(key, data, Residuals::Kind::kVelocity);
}

}  // namespace paceline::gpu
