// Loading and launching, on a driver whose functions are the reference: names, arguments and errors.
#include <gtest/gtest.h>

#include <cstring>

#include "device/cuda/codec_test_util.h"
#include "device/cuda/images.h"
#include "device/cuda/reference.h"

namespace paceline::device::cuda {
namespace {

using namespace drivers::cuda;

CudaResult load_result = 0;

Api reference_driver() {
  Api api;
  api.get_error_name = [](CudaResult, const char** name) { return *name = "CUDA_ERROR_X", 0; };
  api.get_error_string = [](CudaResult, const char** text) { return *text = "text of x", 0; };
  api.device_get_attribute = [](int* value, int which, Device) {
    *value = which == 75 ? 7 : which == 76 ? 5 : 4;
    return 0;
  };
  api.module_load_data = [](Module*, const void*) { return load_result; };
  api.module_get_function = [](Function* function, Module, const char* name) {
    for (const auto& kernel : reference::kernels()) {
      if (std::strcmp(kernel.name, name) != 0) continue;
      *function = reinterpret_cast<Function>(const_cast<reference::NamedKernel*>(&kernel));
      return 0;
    }
    return 500;
  };
  api.launch_kernel = [](Function function, unsigned grid, unsigned, unsigned, unsigned threads,
                         unsigned, unsigned, unsigned, Stream, void** arguments, void**) {
    EXPECT_GT(grid, 0U);
    EXPECT_EQ(threads % 32, 0U);
    reinterpret_cast<reference::NamedKernel*>(function)->run(arguments);
    return 0;
  };
  api.memset_d8_async = [](DevicePtr to, unsigned char value, size_t count, Stream) {
    std::memset(reinterpret_cast<void*>(to), value, count);
    return 0;
  };
  return api;
}

TEST(Kernels, LaunchWhatTheReferenceRuns) {
  const Api api = reference_driver();
  load_result = 0;
  auto kernels = Kernels::load(api, 0);
  if (images().empty()) {
    EXPECT_EQ(kernels.status().code(), Code::kUnsupported);
    EXPECT_NE(kernels.status().message().find("nvcc"), std::string::npos);
    return;
  }
  ASSERT_TRUE(kernels.is_ok()) << kernels.status().to_string();
  for (const WireCodec codec : {WireCodec::kExact, WireCodec::kFp16, WireCodec::kBf16,
                                WireCodec::kTopK, WireCodec::kInt8}) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      const WireFormat format{codec, dtype};
      const uint64_t elements = 10001, bytes = encoded_bytes(format, elements);
      const test::Buffer gradient = test::normal(dtype, elements, 1, 9);
      const test::Buffer residual = test::normal(DType::kFloat32, elements, 1, 10);
      const test::Buffer state(state_bytes(format, elements));
      const test::Buffer next[] = {test::Buffer(elements * 4), test::Buffer(elements * 4)};
      const test::Buffer encoded[] = {test::Buffer(bytes), test::Buffer(bytes)};
      const test::Buffer output[] = {test::Buffer(elements * 4), test::Buffer(elements * 4)};
      for (int i = 0; i < 2; ++i) {
        EncodeArguments a;
        a.gradient = gradient.address();
        a.elements = elements;
        a.residual = residual.address();
        a.next_residual = next[i].address();
        a.encoded = encoded[i].address();
        a.state = state.bytes() == 0 ? 0 : state.address();
        a.state_capacity = state.bytes();
        ASSERT_TRUE(
            (i == 0 ? kernels->encode(format, a, nullptr) : reference::encode(format, a)).is_ok());
        const DevicePtr sources[] = {encoded[i].address(), encoded[0].address()};
        const CombineArguments c{sources, elements, 0.5F, output[i].address(), 0};
        ASSERT_TRUE((i == 0 ? kernels->combine(format, c, nullptr) : reference::combine(format, c))
                        .is_ok());
      }
      EXPECT_EQ(encoded[0].copy<uint32_t>(), encoded[1].copy<uint32_t>());
      EXPECT_EQ(next[0].copy<uint32_t>(), next[1].copy<uint32_t>());
      EXPECT_EQ(output[0].copy<uint32_t>(), output[1].copy<uint32_t>());
    }
  }
}

TEST(Kernels, ADeviceWithoutCodeIsNamed) {
  if (images().empty()) GTEST_SKIP() << "this build holds no device code";
  const Api api = reference_driver();
  load_result = 209;
  const Status old = Kernels::load(api, 3).status();
  EXPECT_EQ(old.code(), Code::kUnsupported);
  EXPECT_NE(old.message().find("compute capability 7.5 (device 3)"), std::string::npos)
      << old.message();
  load_result = 2;
  const Status full = Kernels::load(api, 0).status();
  EXPECT_EQ(full.code(), Code::kResourceExhausted);
  EXPECT_NE(full.message().find("take a smaller batch"), std::string::npos) << full.message();
  load_result = 719;
  const Status lost = Kernels::load(api, 0).status();
  EXPECT_EQ(lost.code(), Code::kUnavailable);
  EXPECT_NE(lost.message().find("see Xid in dmesg"), std::string::npos) << lost.message();
  load_result = 0;
}

}  // namespace
}  // namespace paceline::device::cuda
