#include "base/status.h"

#include <gtest/gtest.h>

#include <memory>
#include <set>

namespace paceline {
namespace {

TEST(Status, IsOkWithoutAnything) {
  const Status status;
  EXPECT_TRUE(status.is_ok());
  EXPECT_TRUE(static_cast<bool>(status));
  EXPECT_EQ(status.code(), Code::kOk);
  EXPECT_EQ(status.to_string(), "ok");
}

TEST(Status, SaysItsCodeAndItsSentence) {
  const Status status(Code::kPeerLost, "rank 3 (host b) is gone");
  EXPECT_FALSE(status.is_ok());
  EXPECT_EQ(status.code(), Code::kPeerLost);
  EXPECT_EQ(status.message(), "rank 3 (host b) is gone");
  EXPECT_EQ(status.to_string(), "peer lost: rank 3 (host b) is gone");
}

TEST(Status, EveryCodeHasANameOfItsOwn) {
  std::set<std::string> names;
  for (int code = 0; code <= static_cast<int>(Code::kInternal); ++code)
    names.insert(code_name(static_cast<Code>(code)));
  EXPECT_EQ(names.size(), static_cast<std::size_t>(Code::kInternal) + 1);
  EXPECT_FALSE(names.contains(code_name(static_cast<Code>(99))))
      << "what is no code has no code's name";
}

Result<int> half(int n) {
  if (n % 2 != 0) return Status(Code::kInvalidArgument, "odd");
  return n / 2;
}

Result<int> quarter(int n) {
  PACELINE_ASSIGN(const int once, half(n));
  PACELINE_ASSIGN(const int twice, half(once));
  return twice;
}

Status checked(int n, int& reached) {
  PACELINE_RETURN_IF_ERROR(half(n).status());
  ++reached;
  return Status::ok();
}

TEST(Result, IsAValueOrTheReasonWhyThereIsNone) {
  EXPECT_EQ(*half(8), 4);
  EXPECT_TRUE(half(8).status().is_ok());
  EXPECT_FALSE(half(7));
  EXPECT_EQ(half(7).status().message(), "odd");
}

TEST(Result, TheFirstFailureLeavesTheFunction) {
  EXPECT_EQ(*quarter(8), 2);
  EXPECT_EQ(quarter(6).status().code(), Code::kInvalidArgument);
  int reached = 0;
  EXPECT_FALSE(checked(7, reached));
  EXPECT_EQ(reached, 0);
  EXPECT_TRUE(checked(8, reached));
  EXPECT_EQ(reached, 1);
}

TEST(Result, AValueThatCantBeCopiedMovesOut) {
  Result<std::unique_ptr<int>> result(std::make_unique<int>(5));
  const std::unique_ptr<int> taken = std::move(result).value();
  EXPECT_EQ(*taken, 5);
}

}  // namespace
}  // namespace paceline
