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

}  // namespace
}  // namespace paceline::drivers::cuda
