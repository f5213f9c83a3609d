// The path's end, and its faults: what is told to whom, what is given back and what must be left behind.
#include <chrono>
#include <thread>

#include "base/clock.h"
#include "base/log.h"
#include "drivers/cuda/loader.h"
#include "gpu/path.h"

namespace paceline::gpu {
namespace {

constexpr double kFaultSeconds = 2;

}  // namespace

Path::~Path() {
  auto status = destroy();
  (void)status;
}

Status Path::check_gpu() {
  for (auto* stream : {out_, copy_, gather_}) {
    const auto error = api_.stream_query(stream);
    if (error != 0 && error != cu::kNotReady)
      return cu::explain(api_, error, "the path for CUDA tensors");
  }
  return node_ ? node_->check() : Status::ok();
}

/// Once, on whichever thread saw it; flags are released already.
void Path::on_failure(const Status& why) {
  tell(why);
  if (node_) node_->abort();
}

/// What one wire has met ends the others word for word, whoever it names; what was met here ends the first under this
/// rank's name, and the others as that one.
void Path::tell(const Status& why) const {
  const auto all = wires();
  Status met;
  for (const auto& wire : all) {
    auto health = wire.health();
    if (!health && (met || health.message() == why.message())) met = health;
  }
  if (met) {
    wire_.abort(why.message());
    met = wire_.health();
  }
  for (const auto& wire : all) {
    if (wire.health()) wire.fail(met ? why : met);
  }
}

std::vector<Wire> Path::wires() const {
  std::vector<Wire> all = {wire_};
  all.insert(all.end(), companions_.begin(), companions_.end());
  return all;
}

Status Path::wires_health() const {
  auto status = wire_.health();
  for (const auto& wire : companions_) {
    if (status) status = wire.health();
  }
  return status;
}

/// The last one made ends first, as on all ranks. After a fault nobody waits for others here: all wires have failed.
Status Path::end_companions(bool orderly) {
  Status status;
  if (auto health = wires_health(); !companions_.empty() && !(orderly && health))
    on_failure(health ? Status(Code::kAborted, "the path for CUDA tensors ends after a failure")
                      : health);
  for (; !companions_.empty(); companions_.pop_back()) {
    if (auto end = companions_.back().destroy(); !end && status) status = end;
  }
  return status;
}

/// Nobody's memory is given back before all of the node have let go of it.
Status Path::end_copies(bool orderly) {
  if (!copies_) return Status::ok();
  Status status;
  if (orderly) copies_->close();
  if (orderly && pump_) {
    const auto met =
        wire_.meet(node_groups_[NodePage::For::kInPlace], "end of the copies in the node");
    status = met ? wire_.wait(*met) : met.status();
  }
  if (!orderly || !status) copies_->leave();
  const std::lock_guard lock(memory_mutex_);
  copies_ = nullptr;
  return status;
}

void Path::abort(const std::string& reason) {
  if (pump_) pump_->fail({Code::kAborted, reason.empty() ? "no reason given" : reason});
}

Status Path::destroy() {
  if (destroyed_) return Status::ok();
  Status status;
  bool finite = true;
  // Others wait for what this rank has submitted.
  if (pump_) status = pump_->wait_arrival(0, finite);
  destroyed_ = true;
  bool idle = true;
  if (launcher_ && status) settle_launches();
  if (context_ != nullptr) {
    const CurrentContext current(api_, context_);
    for (auto* stream : objects_.streams())
      idle = idle && drain(stream, "destroy", status ? kEndSeconds : kFaultSeconds).is_ok();
    if (pump_ && status && idle) status = pump_->wait_retired();
    if (writer_) writer_->stop();
    if (launcher_) launcher_->stop();
    if (pump_) pump_->stop();
    if (auto end = end_companions(pump_ && status); status) status = end;
    if (auto end = end_copies(idle && (status || !pump_)); status) status = end;
    for (const auto group : node_groups_) {
      if (group != 0 && status) status = wire_.end_group(group);
    }
    if (node_ && status && idle) {
      status = node_->destroy();
    } else if (node_) {
      node_->abort();
    }
    if (node_) idle = node_->wait_aborted(kEndSeconds) && idle;
    {
      const std::lock_guard lock(memory_mutex_);
      for (auto* objects : {&objects_, reserved_.get(), residual_memory_.get()}) {
        if (objects == nullptr) continue;
        if (idle)
          objects->release();
        else
          objects->abandon();  // the GPU may still use it
      }
    }
    if (!idle)
      log::warning(
          "the GPU did not come to rest after a fault; its memory stays taken until the "
          "process ends");
    if (idle && kernels_) kernels_->unload();
    if (idle) api_.device_primary_ctx_release(device_);
  }
  context_ = nullptr;
  return status;
}

}  // namespace paceline::gpu
