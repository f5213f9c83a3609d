#include "cli/lab/namespaces.h"

#include <gtest/gtest.h>

namespace paceline::lab {
namespace {

TEST(Advice, IsForWhatThisMachineLacks) {
  const auto told = with_next_best({Code::kUnavailable, "no bridge"});
  EXPECT_EQ(told.code(), Code::kUnavailable);
  EXPECT_EQ(told.message(), std::string("no bridge. ") + kNextBest);
  for (auto code : {Code::kInvalidArgument, Code::kResourceExhausted, Code::kInternal})
    EXPECT_EQ(with_next_best({code, "x"}).message(), "x");
  EXPECT_TRUE(with_next_best(Status::ok()).is_ok());
}

TEST(Privileges, AreThereOrSayWhatIsMissing) {
  const auto found = probe_privileges();
  EXPECT_EQ(found.status.is_ok(), !found.how.empty());
  EXPECT_EQ(found.status.is_ok(), found.missing.empty());
  if (!found.status.is_ok()) {
    EXPECT_NE(found.status.message().find(kAsRoot), std::string::npos);
    EXPECT_NE(found.status.message().find(kNextBest), std::string::npos);
  }
}

}  // namespace
}  // namespace paceline::lab
