// Operations: submit, wait, completion.
#include <fmt/format.h>

#include <algorithm>

#include "base/run_queue.h"
#include "capi/handle.h"
#include "capi/options.h"
#include "engine/validate.h"

using namespace paceline;  // NOLINT: the functions below are the C ABI's
using namespace paceline::capi;

namespace {

void assign(std::string& to, const char* from) {
  if (from == nullptr) {
    to.clear();
  } else {
    to = from;
  }
}

template <class T>
void assign(std::vector<T>& to, const T* from, size_t n) {
  if (from == nullptr) {
    to.clear();
  } else {
    to.assign(from, from + n);
  }
}

// Values of enumerations are checked by the engine; here they only have to fit.
Status check_range(const char* what, int32_t value, int32_t least = 0) {
  if (value >= least && value <= 255) return Status::ok();
  return {Code::kInvalidArgument, fmt::format("{} {} does not exist", what, value)};
}

Status check_timeout(double timeout_s) {
  if (timeout_s >= 0) return Status::ok();
  return {Code::kInvalidArgument,
          fmt::format("timeout_s is {:g}; it must be positive, or 0", timeout_s)};
}

/// Said with the first gradients that the CPU carries (what leaves its codec to the settings): a job whose gradients are
/// CUDA tensors has communicators, too.
void tell_what_is_lost_on_the_cpu(paceline_comm& comm, const paceline_op_args& a) {
  const bool gradients = a.collective == 0 && a.codec < 0;
  if (!comm.speaks || !gradients || comm.has_met_gradients.load(std::memory_order_relaxed)) return;
  comm.has_met_gradients.store(true, std::memory_order_relaxed);
  warn_once(lost_on_the_cpu(comm.settings));
}

Status to_operation(paceline_comm& comm, const paceline_op_args& a, engine::Operation& o) {
  PACELINE_RETURN_IF_ERROR(check_range("collective", a.collective));
  PACELINE_RETURN_IF_ERROR(check_range("dtype", a.dtype));
  PACELINE_RETURN_IF_ERROR(check_range("reduce op", a.reduce_op));
  PACELINE_RETURN_IF_ERROR(check_range("algorithm", a.algorithm));
  PACELINE_RETURN_IF_ERROR(check_range("codec", a.codec, -1));
  PACELINE_RETURN_IF_ERROR(check_timeout(a.timeout_s));
  if (a.segment_count > 0 && a.segments == nullptr)
    return {Code::kInvalidArgument,
            fmt::format("segments is null, segment_count {}", a.segment_count)};
  o.collective = static_cast<plan::Collective>(a.collective);
  o.group = a.group;
  o.dtype = static_cast<DType>(a.dtype);
  o.op = static_cast<ReduceOp>(a.reduce_op);
  o.root = a.root;
  o.input = a.input;
  o.output = a.output;
  o.count = a.count;
  o.algorithm = static_cast<plan::Algorithm>(a.algorithm);
  o.codec = codec_for(comm.settings, a);
  tell_what_is_lost_on_the_cpu(comm, a);
  o.timeout = to_time(a.timeout_s);
  o.window_bytes = a.window_bytes;
  assign(o.name, a.name);
  assign(o.shape, a.shape);
  // Only what the collective has a use for: what a caller leaves in the rest is not looked at.
  const bool pairs = o.collective == plan::Collective::kAllToAll;
  const auto* counts = engine::per_rank(o.collective) ? a.counts : nullptr;
  const auto* send_counts = pairs ? a.send_counts : nullptr;
  const auto* receive_counts = pairs ? a.receive_counts : nullptr;
  size_t size = 0;
  if (counts != nullptr || send_counts != nullptr || receive_counts != nullptr) {
    engine::Operation probe;
    probe.group = a.group;
    PACELINE_ASSIGN(auto request, comm.runner->request_for(probe));
    size = static_cast<size_t>(request.shape.size);
  }
  assign(o.counts, counts, size);
  assign(o.send_counts, send_counts, size);
  assign(o.receive_counts, receive_counts, size);
  o.segments.clear();
  for (size_t i = 0; i < a.segment_count; ++i)
    o.segments.push_back({a.segments[i].key, a.segments[i].offset, a.segments[i].elements});
  return Status::ok();
}

// Kept, so that a steady state allocates nothing.
engine::Operation& operation_of_thread() {
  thread_local engine::Operation operation;
  return operation;
}

bool take_args(const paceline_op_args* args, paceline_op_args& a) {
  a.codec = -1;
  a.fp16_values = -1;
  return take_struct(args, a);
}

paceline_code transfer(paceline_comm* comm, const paceline_transfer_args* args, paceline_op* op,
                       bool sending) {
  PACELINE_USABLE(comm);
  paceline_transfer_args a{};
  if (!take_struct(args, a))
    return invalid(comm, "the arguments are null or lack their struct_size");
  if (op == nullptr) return invalid(comm, "the pointer that takes the operation is null");
  *op = 0;
  if (auto status = check_timeout(a.timeout_s); !status) return report(comm, status);
  engine::Transfer t;
  t.group = a.group;
  t.peer = a.peer;
  t.tag = a.tag;
  t.data = a.data;
  t.bytes = a.bytes;
  t.any_length = a.any_length != 0;
  t.timeout = to_time(a.timeout_s);
  assign(t.name, a.name);
  assign(t.shape, a.shape);
  const engine::Notice notice{a.notify, a.context};
  auto id = sending ? comm->runner->send(t, notice) : comm->runner->receive(t, notice);
  if (!id) return report(comm, id.status());
  *op = *id;
  return report(comm, Status::ok());
}

paceline_code give_result(const paceline_comm* comm, paceline_op op, const engine::Outcome& outcome,
                          paceline_result* result) {
  paceline_result out{};
  out.op = op;
  out.code = static_cast<int32_t>(outcome.status.code());
  out.finite = outcome.finite ? 1 : 0;
  give_struct(out, result);
  return report(comm, outcome.status);
}

}  // namespace

extern "C" {

paceline_code paceline_submit(paceline_comm* comm, const paceline_op_args* args, paceline_op* op) {
  return guarded(comm, [&] {
    PACELINE_USABLE(comm);
    if (op == nullptr) return invalid(comm, "the pointer that takes the operation is null");
    *op = 0;
    paceline_op_args a{};
    if (!take_args(args, a))
      return invalid(comm, "the arguments are null or lack their struct_size");
    auto& o = operation_of_thread();
    if (auto status = to_operation(*comm, a, o); !status) return report(comm, status);
    auto id = comm->runner->submit(o, {a.notify, a.context});
    if (!id) return report(comm, id.status());
    *op = *id;
    return report(comm, Status::ok());
  });
}

paceline_code paceline_send(paceline_comm* comm, const paceline_transfer_args* args,
                            paceline_op* op) {
  return guarded(comm, [&] { return transfer(comm, args, op, true); });
}

paceline_code paceline_receive(paceline_comm* comm, const paceline_transfer_args* args,
                               paceline_op* op) {
  return guarded(comm, [&] { return transfer(comm, args, op, false); });
}

paceline_code paceline_run(paceline_comm* comm, const paceline_op_args* args,
                           paceline_result* result) {
  return guarded(comm, [&] {
    PACELINE_USABLE(comm);
    paceline_op_args a{};
    if (!take_args(args, a))
      return invalid(comm, "the arguments are null or lack their struct_size");
    auto& o = operation_of_thread();
    if (auto status = to_operation(*comm, a, o); !status) return report(comm, status);
    auto outcome = comm->runner->run(o);
    if (!outcome) return report(comm, outcome.status());
    return give_result(comm, 0, *outcome, result);
  });
}

int paceline_test(paceline_comm* comm, paceline_op op) {
  if (auto status = usable(comm); !status) {
    report(comm, status);
    return 1;
  }
  return comm->runner->test(op) ? 1 : 0;
}

paceline_code paceline_wait(paceline_comm* comm, paceline_op op, double timeout_s,
                            paceline_result* result) {
  return guarded(comm, [&] {
    PACELINE_USABLE(comm);
    auto outcome = comm->runner->wait(op, timeout_s < 0 ? -1 : to_time(timeout_s));
    if (!outcome) return report(comm, outcome.status());
    return give_result(comm, op, *outcome, result);
  });
}

int paceline_give_way(paceline_comm* comm, paceline_op op, double timeout_s) {
  int met = 0;
  guarded(comm, [&] {
    PACELINE_USABLE(comm);
    met = comm->runner->give_way(op, to_time(std::max(timeout_s, 0.0)), cores_are_taken) ? 1 : 0;
    return report(comm, Status::ok());
  });
  return met;
}

paceline_code paceline_watch(paceline_comm* comm, paceline_op op) {
  return guarded(comm, [&] {
    PACELINE_USABLE(comm);
    return report(comm, comm->runner->watch(op));
  });
}

int paceline_wait_any(paceline_comm* comm, double timeout_s, paceline_result* results,
                      int capacity) {
  int written = 0;
  auto code = guarded(comm, [&] {
    PACELINE_USABLE(comm);
    if (results == nullptr || capacity <= 0) return invalid(comm, "no room for results");
    thread_local std::vector<engine::Runner::Ended> ended;
    ended.clear();
    if (!comm->runner->wait_any(timeout_s < 0 ? -1 : to_time(timeout_s),
                                static_cast<size_t>(capacity), ended))
      return report(comm, {Code::kAborted, "the communicator is being destroyed"});
    // The first element's size tells how far apart the caller's structs lie.
    auto stride =
        results->struct_size >= sizeof(size_t) ? results->struct_size : sizeof(paceline_result);
    for (const auto& e : ended) {
      paceline_result out{};
      out.op = e.id;
      out.code = static_cast<int32_t>(e.outcome.status.code());
      out.finite = e.outcome.finite ? 1 : 0;
      out.struct_size = stride;
      std::memcpy(reinterpret_cast<char*>(results) + static_cast<size_t>(written) * stride, &out,
                  std::min(stride, sizeof out));
      ++written;
    }
    return report(comm, Status::ok());
  });
  return code == PACELINE_OK ? written : -1;
}
}
