// The part of TensorFlow's C API for kernels that this adapter uses, declared here and bound at run time, so that
// one file serves TensorFlow 2.13 and later and building it needs no TensorFlow.
//
// Names and meanings are those of TensorFlow's c/kernels.h, c/ops.h and c/tf_status.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace paceline::tensorflow {

struct TF_Status;
struct TF_Tensor;
struct TF_OpDefinitionBuilder;
struct TF_ShapeInferenceContext;
struct TF_ShapeHandle;
struct TF_KernelBuilder;
struct TF_OpKernelConstruction;
struct TF_OpKernelContext;
struct TF_AsyncOpKernelDoneCallback;

// clang-format off
enum TF_DataType : int {
  TF_FLOAT = 1, TF_DOUBLE = 2, TF_INT32 = 3, TF_UINT8 = 4, TF_INT16 = 5, TF_INT8 = 6, TF_INT64 = 9, TF_BOOL = 10,
  TF_BFLOAT16 = 14, TF_HALF = 19
};
enum TF_Code : int {
  TF_OK = 0, TF_INVALID_ARGUMENT = 3, TF_DEADLINE_EXCEEDED = 4, TF_RESOURCE_EXHAUSTED = 8,
  TF_FAILED_PRECONDITION = 9, TF_ABORTED = 10, TF_UNIMPLEMENTED = 12, TF_INTERNAL = 13, TF_UNAVAILABLE = 14,
  TF_DATA_LOSS = 15, TF_UNAUTHENTICATED = 16
};

struct TF_StringView {
  const char* data;
  size_t len;
};

using CreateFunction = void* (*)(TF_OpKernelConstruction*);
using ComputeFunction = void (*)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*);
using DeleteFunction = void (*)(void*);
using ShapeFunction = void (*)(TF_ShapeInferenceContext*, TF_Status*);

#define PACELINE_TF_FUNCTIONS(X)                                                                                \
  X(TF_NewStatus, TF_Status*, ())                                                                               \
  X(TF_DeleteStatus, void, (TF_Status*))                                                                        \
  X(TF_SetStatus, void, (TF_Status*, TF_Code, const char*))                                                     \
  X(TF_GetCode, TF_Code, (const TF_Status*))                                                                    \
  X(TF_Message, const char*, (const TF_Status*))                                                                \
  X(TF_DeleteTensor, void, (TF_Tensor*))                                                                        \
  X(TF_TensorType, TF_DataType, (const TF_Tensor*))                                                             \
  X(TF_NumDims, int, (const TF_Tensor*))                                                                        \
  X(TF_Dim, int64_t, (const TF_Tensor*, int))                                                                   \
  X(TF_TensorData, void*, (const TF_Tensor*))                                                                   \
  X(TF_TensorElementCount, int64_t, (const TF_Tensor*))                                                         \
  X(TF_NewOpDefinitionBuilder, TF_OpDefinitionBuilder*, (const char*))                                          \
  X(TF_OpDefinitionBuilderAddInput, void, (TF_OpDefinitionBuilder*, const char*))                               \
  X(TF_OpDefinitionBuilderAddOutput, void, (TF_OpDefinitionBuilder*, const char*))                              \
  X(TF_OpDefinitionBuilderAddAttr, void, (TF_OpDefinitionBuilder*, const char*))                                \
  X(TF_OpDefinitionBuilderSetShapeInferenceFunction, void, (TF_OpDefinitionBuilder*, ShapeFunction))            \
  X(TF_RegisterOpDefinition, void, (TF_OpDefinitionBuilder*, TF_Status*))                                       \
  X(TF_NewShapeHandle, TF_ShapeHandle*, ())                                                                     \
  X(TF_DeleteShapeHandle, void, (TF_ShapeHandle*))                                                              \
  X(TF_ShapeInferenceContextGetInput, void, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))      \
  X(TF_ShapeInferenceContextSetOutput, void, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))     \
  X(TF_NewAsyncKernelBuilder, TF_KernelBuilder*,                                                                \
    (const char*, const char*, CreateFunction, ComputeFunction, DeleteFunction))                                \
  X(TF_KernelBuilder_HostMemory, void, (TF_KernelBuilder*, const char*))                                        \
  X(TF_RegisterKernelBuilder, void, (const char*, TF_KernelBuilder*, TF_Status*))                               \
  X(TF_OpKernelConstruction_GetAttrSize, void,                                                                  \
    (TF_OpKernelConstruction*, const char*, int32_t*, int32_t*, TF_Status*))                                    \
  X(TF_OpKernelConstruction_GetAttrString, void, (TF_OpKernelConstruction*, const char*, char*, size_t, TF_Status*)) \
  X(TF_OpKernelConstruction_GetAttrInt32, void, (TF_OpKernelConstruction*, const char*, int32_t*, TF_Status*))  \
  X(TF_OpKernelConstruction_GetAttrBool, void, (TF_OpKernelConstruction*, const char*, unsigned char*, TF_Status*)) \
  X(TF_OpKernelConstruction_Failure, void, (TF_OpKernelConstruction*, TF_Status*))                              \
  X(TF_OpKernelContext_Failure, void, (TF_OpKernelContext*, TF_Status*))                                        \
  X(TF_OpKernelConstruction_GetName, TF_StringView, (TF_OpKernelConstruction*))                                 \
  X(TF_StepId, int64_t, (TF_OpKernelContext*))                                                                  \
  X(TF_GetFrameId, uint64_t, (TF_OpKernelContext*))                                                             \
  X(TF_GetIterId, int64_t, (TF_OpKernelContext*))                                                               \
  X(TF_GetInput, void, (TF_OpKernelContext*, int, TF_Tensor**, TF_Status*))                                     \
  X(TF_ForwardInputOrAllocateOutput, TF_Tensor*,                                                                \
    (TF_OpKernelContext*, const int*, int, int, const int64_t*, int, int*, TF_Status*))                         \
  X(TF_RunAsyncOpKernelDoneCallback, void, (TF_AsyncOpKernelDoneCallback*))
// clang-format on

struct TfApi {
#define PACELINE_TF_MEMBER(name, result, arguments) result(*name) arguments = nullptr;
  PACELINE_TF_FUNCTIONS(PACELINE_TF_MEMBER)
#undef PACELINE_TF_MEMBER
};

/// The functions of the TensorFlow that this process has imported. Empty: bound; else what is missing.
std::string bind_tf_api();
const TfApi& tf();

/// A TF_Status that deletes itself.
class Status {
 public:
  Status() : raw_(tf().TF_NewStatus()) {}
  Status(TF_Code code, const std::string& text) : Status() {
    tf().TF_SetStatus(raw_, code, text.c_str());
  }
  Status(const Status&) = delete;
  Status& operator=(const Status&) = delete;
  ~Status() { tf().TF_DeleteStatus(raw_); }
  [[nodiscard]] TF_Status* get() const { return raw_; }
  [[nodiscard]] bool is_ok() const { return tf().TF_GetCode(raw_) == TF_OK; }
  [[nodiscard]] std::string text() const { return tf().TF_Message(raw_); }

 private:
  TF_Status* raw_;
};

}  // namespace paceline::tensorflow
