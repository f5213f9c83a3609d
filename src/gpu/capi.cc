// include/paceline/cuda.h: handles, structs and codes around gpu/path.h.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>

#include "drivers/cuda/loader.h"
#include "drivers/nccl/loader.h"
#include "gpu/path.h"
#include "paceline/cuda.h"

struct paceline_cuda {
  std::unique_ptr<paceline::gpu::Path> path;
  pid_t pid = 0;
};

namespace {

using namespace paceline;  // NOLINT: the functions below are the C ABI's

thread_local std::string error_of_thread;

paceline_code report(const Status& status) {
  error_of_thread = status ? std::string() : status.message();
  return static_cast<paceline_code>(status.code());
}

template <class F>
paceline_code guarded(F&& f) noexcept {
  try {
    return report(f());
  } catch (const std::exception& e) {
    try {
      return report({Code::kResourceExhausted, e.what()});
    } catch (...) {
      return PACELINE_RESOURCE_EXHAUSTED;
    }
  }
}

template <class T>
bool take_struct(const T* from, T& to) {
  if (from == nullptr || from->struct_size < sizeof(size_t)) return false;
  std::memcpy(&to, from, std::min(from->struct_size, sizeof(T)));
  return true;
}

Status invalid(const char* what) { return {Code::kInvalidArgument, what}; }

Status usable(const paceline_cuda* cuda) {
  if (cuda == nullptr) return invalid("the handle is null");
  if (cuda->pid != getpid())
    return {Code::kUnsupported,
            "CUDA handles belong to the parent of this process: CUDA can't be used "
            "after fork(); start workers with spawn"};
  return Status::ok();
}

#define USABLE(cuda) PACELINE_RETURN_IF_ERROR(usable(cuda))

Result<const drivers::nccl::Api*> find_nccl(const std::string& library) {
  PACELINE_ASSIGN(const auto* found, drivers::nccl::load(library));
  return &found->api;
}

Status available() {
  PACELINE_ASSIGN(const auto* api, drivers::cuda::load());
  return drivers::cuda::check_device(*api, 0);
}

Status create(paceline_comm* comm, const paceline_cuda_options& o, paceline_cuda** out) {
  if (comm == nullptr) return invalid("the communicator is null");
  if (o.lanes < 0) return invalid("lanes is negative");
  gpu::Drivers drivers;
  // A rank without a driver takes part in the first exchange all the same, so that the others hear of it.
  static const drivers::cuda::Api none;
  auto api = drivers::cuda::load();
  drivers.missing = api.status();
  drivers.cuda = api ? *api : &none;
  drivers.nccl = find_nccl;
  gpu::PathOptions options;
  options.device = o.device;
  options.lanes = o.lanes;
  options.piece_bytes = o.piece_bytes;
  options.nccl_library = o.nccl_library == nullptr ? "" : o.nccl_library;
  if (o.pinned_bytes > 0) options.least_host_bytes = o.pinned_bytes;
  options.only_prompt = o.only_prompt != 0;
  PACELINE_ASSIGN(auto path, gpu::Path::create(drivers, comm, options));
  *out = new paceline_cuda{std::move(path), getpid()};
  return Status::ok();
}

Status average_of(int32_t reduce_op, bool& average) {
  average = reduce_op == static_cast<int>(ReduceOp::kAverage);
  if (average || reduce_op == static_cast<int>(ReduceOp::kSum)) return Status::ok();
  return {Code::kUnsupported,
          "CUDA tensors are reduced by sum or average; use torch's NCCL for others"};
}

Result<gpu::Collective> collective_of(const paceline_cuda_collective_args* args) {
  paceline_cuda_collective_args a{};
  if (!take_struct(args, a)) return invalid("the arguments are null or lack their struct_size");
  gpu::Collective c;
  switch (a.collective) {
    case 1:
      c.kind = gpu::PathKind::kBroadcast;
      break;
    case 2:
      c.kind = gpu::PathKind::kAllGather;
      break;
    case 3:
      c.kind = gpu::PathKind::kReduceScatter;
      break;
    default:
      return Status(Code::kUnsupported,
                    fmt::format("collective {} is not offered for CUDA tensors: 1 broadcast, 2 "
                                "all-gather and 3 reduce-scatter are",
                                a.collective));
  }
  if (a.dtype < 0 || a.dtype >= kDTypeCount) return invalid("there is no such dtype");
  if (c.kind == gpu::PathKind::kReduceScatter)
    PACELINE_RETURN_IF_ERROR(average_of(a.reduce_op, c.average));
  c.input = reinterpret_cast<uint64_t>(a.input);
  c.output = reinterpret_cast<uint64_t>(a.output);
  c.count = a.count;
  c.dtype = static_cast<DType>(a.dtype);
  c.factor = a.factor == 0 ? 1 : a.factor;
  c.codec = a.codec;
  c.root = a.root;
  c.scratch = reinterpret_cast<uint64_t>(a.scratch);
  c.scratch_bytes = a.scratch_bytes;
  c.stream = static_cast<drivers::cuda::Stream>(a.stream);
  c.name = a.name == nullptr ? "" : a.name;
  return c;
}

}  // namespace

extern "C" {

int paceline_cuda_available(char* reason, size_t capacity) {
  if (guarded(available) == PACELINE_OK) return 1;
  if (reason != nullptr && capacity > 0) {
    const auto n = std::min(error_of_thread.size(), capacity - 1);
    std::memcpy(reason, error_of_thread.data(), n);
    reason[n] = '\0';
  }
  return 0;
}

paceline_code paceline_cuda_create(paceline_comm* comm, const paceline_cuda_options* options,
                                   paceline_cuda** cuda) {
  return guarded([&]() -> Status {
    if (cuda == nullptr) return invalid("the pointer that takes the handle is null");
    *cuda = nullptr;
    paceline_cuda_options o{};
    if (!take_struct(options, o)) return invalid("the options are null or lack their struct_size");
    return create(comm, o, cuda);
  });
}

paceline_code paceline_cuda_reserve(paceline_cuda* cuda, uint64_t bytes, uint64_t largest) {
  return guarded([&]() -> Status {
    USABLE(cuda);
    return cuda->path->reserve(bytes, largest);
  });
}

paceline_code paceline_cuda_all_reduce(paceline_cuda* cuda, const paceline_cuda_args* args,
                                       paceline_op* op) {
  return guarded([&]() -> Status {
    USABLE(cuda);
    if (op == nullptr) return invalid("the pointer that takes the operation is null");
    *op = 0;
    paceline_cuda_args a{};
    a.codec = -1;
    if (!take_struct(args, a)) return invalid("the arguments are null or lack their struct_size");
    gpu::AllReduce r;
    PACELINE_RETURN_IF_ERROR(average_of(a.reduce_op, r.average));
    if (a.dtype < 0 || a.dtype >= kDTypeCount) return invalid("there is no such dtype");
    if (a.segment_count > 0 && a.segments == nullptr) return invalid("segments is null");
    r.data = reinterpret_cast<uint64_t>(a.data);
    r.count = a.count;
    r.dtype = static_cast<DType>(a.dtype);
    r.codec = a.codec;
    r.factor = a.factor == 0 ? 1 : a.factor;
    r.ratio = a.ratio;
    r.momentum = a.momentum;
    r.row_elements = a.row_elements;
    r.prompt = a.prompt != 0;
    r.segments.reserve(a.segment_count);
    for (size_t i = 0; i < a.segment_count; ++i)
      r.segments.push_back({a.segments[i].key, a.segments[i].offset, a.segments[i].elements});
    r.stream = static_cast<drivers::cuda::Stream>(a.stream);
    r.name = a.name == nullptr ? "" : a.name;
    PACELINE_ASSIGN(*op, cuda->path->all_reduce(r));
    return Status::ok();
  });
}

paceline_code paceline_cuda_collective(paceline_cuda* cuda,
                                       const paceline_cuda_collective_args* args, paceline_op* op) {
  return guarded([&]() -> Status {
    USABLE(cuda);
    if (op == nullptr) return invalid("the pointer that takes the operation is null");
    *op = 0;
    PACELINE_ASSIGN(const auto c, collective_of(args));
    PACELINE_ASSIGN(*op, cuda->path->collective(c));
    return Status::ok();
  });
}

paceline_code paceline_cuda_scratch(const paceline_cuda* cuda,
                                    const paceline_cuda_collective_args* args, uint64_t* bytes) {
  return guarded([&]() -> Status {
    USABLE(cuda);
    if (bytes == nullptr) return invalid("the pointer that takes the size is null");
    PACELINE_ASSIGN(const auto c, collective_of(args));
    *bytes = cuda->path->scratch_bytes(c);
    return Status::ok();
  });
}

paceline_code paceline_cuda_join(paceline_cuda* cuda, paceline_op op, void* stream) {
  return guarded([&]() -> Status {
    USABLE(cuda);
    return cuda->path->join(op, static_cast<drivers::cuda::Stream>(stream));
  });
}

paceline_code paceline_cuda_wait_arrival(paceline_cuda* cuda, double timeout_s, int32_t* finite) {
  return guarded([&]() -> Status {
    USABLE(cuda);
    bool all = true;
    PACELINE_RETURN_IF_ERROR(cuda->path->wait_arrival(timeout_s, all));
    if (finite != nullptr) *finite = all ? 1 : 0;
    return Status::ok();
  });
}

paceline_code paceline_cuda_wait_operation(paceline_cuda* cuda, paceline_op op, double timeout_s,
                                           int32_t* finite) {
  return guarded([&]() -> Status {
    USABLE(cuda);
    bool all = true;
    PACELINE_RETURN_IF_ERROR(cuda->path->wait_operation(op, timeout_s, all));
    if (finite != nullptr) *finite = all ? 1 : 0;
    return Status::ok();
  });
}

uint64_t paceline_cuda_not_finite(paceline_cuda* cuda, paceline_op* ops, uint64_t capacity) {
  if (!usable(cuda) || ops == nullptr) return 0;
  return cuda->path->take_not_finite(std::span(ops, capacity));
}

int paceline_cuda_arrived(paceline_cuda* cuda, paceline_op op) {
  // What can't be asked is over: the wait says why.
  return !usable(cuda) || cuda->path->arrived(op) ? 1 : 0;
}

paceline_code paceline_cuda_gate(paceline_cuda* cuda, uint64_t* address) {
  return guarded([&]() -> Status {
    USABLE(cuda);
    if (address == nullptr) return invalid("the gate's address is null");
    PACELINE_ASSIGN(*address, cuda->path->gate());
    return Status::ok();
  });
}

paceline_code paceline_cuda_rest(paceline_cuda* cuda) {
  return guarded([&]() -> Status {
    USABLE(cuda);
    return cuda->path->rest();
  });
}

paceline_code paceline_cuda_abort(paceline_cuda* cuda, const char* reason) {
  return guarded([&]() -> Status {
    USABLE(cuda);
    cuda->path->abort(reason == nullptr ? "" : reason);
    return Status::ok();
  });
}

paceline_code paceline_cuda_destroy(paceline_cuda* cuda) {
  return guarded([&]() -> Status {
    if (cuda == nullptr) return Status::ok();
    USABLE(cuda);  // a forked child's is leaked: its threads are the parent's
    auto status = cuda->path->destroy();
    delete cuda;
    return status;
  });
}

const char* paceline_cuda_describe(const paceline_cuda* cuda) {
  if (auto status = usable(cuda); !status) {
    report(status);
    return "";
  }
  return cuda->path->describe().c_str();
}

const char* paceline_cuda_error(const paceline_cuda*) { return error_of_thread.c_str(); }

paceline_code paceline_cuda_stats_get(const paceline_cuda* cuda, paceline_cuda_stats* stats) {
  return guarded([&]() -> Status {
    USABLE(cuda);
    if (stats == nullptr || stats->struct_size < sizeof(size_t))
      return invalid("the statistics are null or lack their struct_size");
    auto s = cuda->path->statistics();
    s.struct_size = stats->struct_size;
    std::memcpy(stats, &s, std::min(s.struct_size, sizeof s));
    return Status::ok();
  });
}

paceline_code paceline_cuda_residual_commit(paceline_cuda* cuda, const uint64_t* keys,
                                            uint64_t count) {
  return guarded([&]() -> Status {
    USABLE(cuda);
    if (keys == nullptr) return cuda->path->commit_residuals();
    return cuda->path->commit_residuals(std::span(keys, count));
  });
}

paceline_code paceline_cuda_residual_rollback(paceline_cuda* cuda, const uint64_t* keys,
                                              uint64_t count) {
  return guarded([&]() -> Status {
    USABLE(cuda);
    if (keys == nullptr) return cuda->path->rollback_residuals();
    return cuda->path->rollback_residuals(std::span(keys, count));
  });
}

paceline_code paceline_cuda_residual_scale(paceline_cuda* cuda, double factor, const uint64_t* keys,
                                           uint64_t count) {
  return guarded([&]() -> Status {
    USABLE(cuda);
    if (keys == nullptr) return cuda->path->scale_residuals(factor);
    return cuda->path->scale_residuals(factor, std::span(keys, count));
  });
}

paceline_code paceline_cuda_residual_read(paceline_cuda* cuda, uint64_t key, float* data,
                                          uint64_t elements) {
  return guarded([&]() -> Status {
    USABLE(cuda);
    if (data == nullptr && elements > 0) return invalid("the buffer is null");
    return cuda->path->read_residual(key, {data, elements});
  });
}

paceline_code paceline_cuda_residual_write(paceline_cuda* cuda, uint64_t key, const float* data,
                                           uint64_t elements) {
  return guarded([&]() -> Status {
    USABLE(cuda);
    if (data == nullptr && elements > 0) return invalid("the buffer is null");
    return cuda->path->write_residual(key, {data, elements});
  });
}

paceline_code paceline_cuda_velocity_read(paceline_cuda* cuda, uint64_t key, float* data,
                                          uint64_t elements) {
  return guarded([&]() -> Status {
    USABLE(cuda);
    if (data == nullptr && elements > 0) return invalid("the buffer is null");
    return cuda->path->read_velocity(key, {data, elements});
  });
}

paceline_code paceline_cuda_velocity_write(paceline_cuda* cuda, uint64_t key, const float* data,
                                           uint64_t elements) {
  return guarded([&]() -> Status {
    USABLE(cuda);
    if (data == nullptr) return invalid("the buffer is null");
    return cuda->path->write_velocity(key, {data, elements});
  });
}
}
