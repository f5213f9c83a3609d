#include "drivers/cuda/loader.h"

#include <gtest/gtest.h>

namespace paceline::drivers::cuda {
namespace {

// With or without a driver on this machine: functions, or a sentence with a fix.
TEST(Loader, FindsTheDriverOrSaysWhatToInstall) {
  auto api = load();
  if (api) {
    int version = 0;
    EXPECT_EQ((*api)->driver_get_version(&version), 0);
    EXPECT_GE(version, kOldestDriver);
  } else {
    EXPECT_EQ(api.status().code(), Code::kUnavailable);
    EXPECT_NE(api.status().message().find("driver"), std::string::npos) << api.status().message();
  }
}

TEST(Loader, ADriverThatSeesNoGpuIsNamed) {
  Api api;
  api.init = [](unsigned) { return 0; };
  api.device_get_count = [](int* count) {
    *count = 0;
    return 0;
  };
  const Status none = check_device(api, 0);
  EXPECT_EQ(none.code(), Code::kUnavailable);
  EXPECT_NE(none.message().find("sees no GPU: check nvidia-smi"), std::string::npos)
      << none.message();
  api.init = [](unsigned) { return 803; };
  const Status differs = check_device(api, 0);
  EXPECT_EQ(differs.code(), Code::kUnavailable);
  EXPECT_NE(differs.message().find("differ in version"), std::string::npos) << differs.message();
}

}  // namespace
}  // namespace paceline::drivers::cuda
