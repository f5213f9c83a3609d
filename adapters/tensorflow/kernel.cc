// The operation PacelineQueueAllreduce and its kernels.
//
// It is never declared stateful: SetIsStateful(builder, false) sets the flag all the same, and a tf.function then runs
// its stateful operations one after the other. What keeps two call sites with equal inputs apart is their
// `tensor_name`, which is also the name that ranks agree by; call_sites.h says what becomes of it where a function or a
// loop has one node for many operations. A function that is never inlined (tf.function's attribute _noinline) has no
// path; of its calls only those are told apart, and refused, that are under way at once. "Queue" in its name tells TensorFlow's graph optimizer
// that it has an effect (its IsFreeOfSideEffect looks for that word): otherwise it would fold an all-reduce of a
// constant into a constant, on the ranks where the input happens to be one. The executor's own constant folding
// knows no such word; it runs the kernel under a step id of its own, and gives up when the kernel fails.
#include <fmt/format.h>

#include <memory>
#include <string>
#include <vector>

#include "attach.h"
#include "call_sites.h"
#include "done.h"
#include "tf_api.h"

namespace paceline::tensorflow {
namespace {

constexpr const char* kOp = "PacelineQueueAllreduce";

/// LogMemory::CONSTANT_FOLDING_STEP_ID of TensorFlow.
constexpr int64_t kFoldingStep = -1;

struct DType {
  TF_DataType tensorflow;
  int32_t paceline;  ///< comm.h's
  const char* name;
};
constexpr DType kDTypes[] = {
    {TF_FLOAT, 0, "float32"},     {TF_DOUBLE, 1, "float64"}, {TF_HALF, 2, "float16"},
    {TF_BFLOAT16, 3, "bfloat16"}, {TF_INT8, 4, "int8"},      {TF_INT16, 5, "int16"},
    {TF_INT32, 6, "int32"},       {TF_INT64, 7, "int64"},    {TF_UINT8, 8, "uint8"},
    {TF_BOOL, 9, "bool"},
};
constexpr const char* kReduceOps[] = {"sum", "average", "min", "max", "product"};

TF_Code code_of(paceline_code code) {
  switch (code) {
    case PACELINE_INVALID_ARGUMENT:
    case PACELINE_MISMATCH:
      return TF_INVALID_ARGUMENT;
    case PACELINE_TIMEOUT:
      return TF_DEADLINE_EXCEEDED;
    case PACELINE_PEER_LOST:
    case PACELINE_UNAVAILABLE:
      return TF_UNAVAILABLE;
    case PACELINE_ABORTED:
      return TF_ABORTED;
    case PACELINE_UNAUTHENTICATED:
      return TF_UNAUTHENTICATED;
    case PACELINE_RESOURCE_EXHAUSTED:
      return TF_RESOURCE_EXHAUSTED;
    case PACELINE_UNSUPPORTED:
      return TF_UNIMPLEMENTED;
    case PACELINE_CORRUPTED:
      return TF_DATA_LOSS;
    default:
      return TF_INTERNAL;
  }
}

struct DeleteTensor {
  void operator()(TF_Tensor* tensor) const { tf().TF_DeleteTensor(tensor); }
};
using Tensor = std::unique_ptr<TF_Tensor, DeleteTensor>;

/// What a node of the graph fixes.
struct Kernel {
  agreement::CallSite site;
  int32_t reduce_op = 0;
  bool named = false;
};

agreement::CallSites& sites() {
  static auto* instance = new agreement::CallSites;  // outlives static destruction
  return *instance;
}

/// One execution: lives until its callback has run.
struct Execution {
  Execution(TF_OpKernelContext* c, TF_AsyncOpKernelDoneCallback* lent) : context(c), done(lent) {}
  void end(TF_Code code, const std::string& text) {
    if (!name.empty()) sites().end(name);
    if (code != TF_OK) tf().TF_OpKernelContext_Failure(context, Status(code, text).get());
    input.reset();
    output.reset();
    done.run();
  }
  TF_OpKernelContext* context;
  Done done;
  Tensor input;
  Tensor output;
  std::string name;  ///< not empty: under way
};

std::string string_attribute(TF_OpKernelConstruction* construction, const char* name,
                             Status& status) {
  int32_t list = 0;
  int32_t bytes = 0;
  if (status.is_ok())
    tf().TF_OpKernelConstruction_GetAttrSize(construction, name, &list, &bytes, status.get());
  std::string value;
  if (!status.is_ok()) return value;
  value.resize(static_cast<std::size_t>(bytes));
  tf().TF_OpKernelConstruction_GetAttrString(construction, name, value.data(), value.size(),
                                             status.get());
  return value;
}

void* create(TF_OpKernelConstruction* construction) {
  auto kernel = std::make_unique<Kernel>();
  Status status;
  kernel->site.name = string_attribute(construction, "tensor_name", status);
  kernel->site.trace = string_attribute(construction, "trace", status);
  const auto traced_as = string_attribute(construction, "traced_as", status);
  if (status.is_ok()) {
    tf().TF_OpKernelConstruction_GetAttrInt32(construction, "reduce_op", &kernel->reduce_op,
                                              status.get());
  }
  unsigned char named = 0;
  if (status.is_ok())
    tf().TF_OpKernelConstruction_GetAttrBool(construction, "named", &named, status.get());
  kernel->named = named != 0;
  if (status.is_ok() && (kernel->reduce_op < 0 || kernel->reduce_op > 4)) {
    tf().TF_SetStatus(status.get(), TF_INVALID_ARGUMENT,
                      "reduce_op must be 0 (sum) to 4 (product)");
  }
  if (status.is_ok()) {
    const auto node = tf().TF_OpKernelConstruction_GetName(construction);
    kernel->site.path = agreement::call_path({node.data, node.len}, traced_as);
    sites().add(kernel->site);
    return kernel.release();
  }
  tf().TF_OpKernelConstruction_Failure(construction, status.get());
  return nullptr;
}

void destroy(void* kernel) { delete static_cast<Kernel*>(kernel); }

std::vector<int64_t> shape_of(const TF_Tensor* tensor) {
  std::vector<int64_t> shape(static_cast<std::size_t>(tf().TF_NumDims(tensor)));
  for (std::size_t i = 0; i < shape.size(); ++i)
    shape[i] = tf().TF_Dim(tensor, static_cast<int>(i));
  return shape;
}

/// Fills the tensors; the text of the failure, or empty.
std::string take_tensors(Execution& run) {
  Status status;
  TF_Tensor* input = nullptr;
  tf().TF_GetInput(run.context, 0, &input, status.get());
  if (!status.is_ok()) return status.text();
  run.input.reset(input);
  const auto shape = shape_of(input);
  const int candidates[] = {0};
  int forwarded = -1;
  run.output.reset(tf().TF_ForwardInputOrAllocateOutput(run.context, candidates, 1, 0, shape.data(),
                                                        static_cast<int>(shape.size()), &forwarded,
                                                        status.get()));
  return status.is_ok() ? std::string() : status.text();
}

void compute(void* raw, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* lent) {
  auto& kernel = *static_cast<Kernel*>(raw);
  auto run = std::make_shared<Execution>(context, lent);
  if (tf().TF_StepId(context) == kFoldingStep) {
    return run->end(TF_UNIMPLEMENTED, "an all-reduce is no constant");
  }
  const auto active = queue();
  if (active == nullptr) {
    return run->end(TF_FAILED_PRECONDITION,
                    "call paceline.tensorflow.init() before an all-reduce runs");
  }
  if (auto why = take_tensors(*run); !why.empty()) return run->end(TF_INTERNAL, why);
  const auto type = tf().TF_TensorType(run->input.get());
  const DType* dtype = nullptr;
  for (const auto& known : kDTypes) {
    if (known.tensorflow == type) dtype = &known;
  }
  if (dtype == nullptr) {
    return run->end(TF_UNIMPLEMENTED,
                    fmt::format("dtype {} can't be reduced", static_cast<int>(type)));
  }
  auto call = sites().begin(kernel.site, tf().TF_StepId(context), tf().TF_GetFrameId(context),
                            tf().TF_GetIterId(context));
  if (!call.refusal.empty()) return run->end(TF_INVALID_ARGUMENT, call.refusal);
  run->name = call.name;
  agreement::Request request;
  request.name = call.name;
  request.one_parameter = kernel.named && call.is_one;
  const auto shape = shape_of(run->input.get());
  request.shape = fmt::format("[{}]", fmt::join(shape, ", "));
  request.signature = fmt::format("{} of {} {}{}", kReduceOps[kernel.reduce_op], dtype->name,
                                  request.shape, call.note);
  request.dtype = dtype->paceline;
  request.reduce_op = kernel.reduce_op;
  request.input = tf().TF_TensorData(run->input.get());
  request.output = tf().TF_TensorData(run->output.get());
  request.count = static_cast<uint64_t>(tf().TF_TensorElementCount(run->input.get()));
  request.done = [run](const agreement::Outcome& outcome) {
    run->end(outcome.code == PACELINE_OK ? TF_OK : code_of(outcome.code), outcome.text);
  };
  active->enqueue(std::move(request));
}

void infer_shape(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeHandle* shape = tf().TF_NewShapeHandle();
  tf().TF_ShapeInferenceContextGetInput(context, 0, shape, status);
  if (tf().TF_GetCode(status) == TF_OK)
    tf().TF_ShapeInferenceContextSetOutput(context, 0, shape, status);
  tf().TF_DeleteShapeHandle(shape);
}

std::string register_op() {
  auto* op = tf().TF_NewOpDefinitionBuilder(kOp);
  tf().TF_OpDefinitionBuilderAddAttr(
      op, "T: {float32, float64, half, bfloat16, int8, int16, int32, int64, uint8, bool}");
  tf().TF_OpDefinitionBuilderAddAttr(op, "tensor_name: string");
  tf().TF_OpDefinitionBuilderAddAttr(op, "reduce_op: int = 0");
  // Whether the user gave the name; the graph that the node was traced in, and the node's name there (empty: eager).
  tf().TF_OpDefinitionBuilderAddAttr(op, "named: bool = false");
  tf().TF_OpDefinitionBuilderAddAttr(op, "trace: string = ''");
  tf().TF_OpDefinitionBuilderAddAttr(op, "traced_as: string = ''");
  tf().TF_OpDefinitionBuilderAddInput(op, "tensor: T");
  tf().TF_OpDefinitionBuilderAddOutput(op, "reduced: T");
  tf().TF_OpDefinitionBuilderSetShapeInferenceFunction(op, infer_shape);
  Status status;
  tf().TF_RegisterOpDefinition(op, status.get());
  return status.is_ok() ? std::string() : status.text();
}

/// On GPUs the tensors are asked for in host memory: the C API gives no stream of built-in devices.
std::string register_kernel(const char* device, bool host_memory) {
  auto* kernel = tf().TF_NewAsyncKernelBuilder(kOp, device, create, compute, destroy);
  if (host_memory) {
    tf().TF_KernelBuilder_HostMemory(kernel, "tensor");
    tf().TF_KernelBuilder_HostMemory(kernel, "reduced");
  }
  Status status;
  tf().TF_RegisterKernelBuilder(fmt::format("{}{}", kOp, device).c_str(), kernel, status.get());
  return status.is_ok() ? std::string() : status.text();
}

}  // namespace
}  // namespace paceline::tensorflow

/// Registers the operation with the TensorFlow of this process, once. NULL, or the text of the failure.
extern "C" PACELINE_API const char* paceline_tensorflow_register() {
  using namespace paceline::tensorflow;
  static const std::string why = [] {
    auto failure = bind_tf_api();
    if (failure.empty()) failure = register_op();
    if (failure.empty()) failure = register_kernel("CPU", false);
    if (failure.empty()) failure = register_kernel("GPU", true);
    return failure;
  }();
  return why.empty() ? nullptr : why.c_str();
}
