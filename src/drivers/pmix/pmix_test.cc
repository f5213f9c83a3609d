// The client against a library that stands in for libpmix.so.2: loaded first, so that its name leads to it.
#include "drivers/pmix/pmix.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

namespace paceline::drivers {
namespace {

class Pmix : public testing::Test {
 protected:
  void SetUp() override {
    library_ = ::dlopen(PACELINE_PMIX_STAND_IN, RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(library_, nullptr) << ::dlerror();
    users_ = reinterpret_cast<int (*)()>(::dlsym(library_, "stand_in_users"));
    ASSERT_NE(users_, nullptr);
    ::setenv("PMIX_NAMESPACE", "job.1", 1);
  }
  void TearDown() override { ::unsetenv("PMIX_NAMESPACE"); }
  [[nodiscard]] int users() const { return users_(); }

 private:
  void* library_ = nullptr;  // stays: what was loaded by its name is this
  int (*users_)() = nullptr;
};

TEST_F(Pmix, WhatWasPutIsThereOnceAllHaveFenced) {
  const auto client = open_pmix();
  ASSERT_TRUE(client.is_ok()) << client.status().message();
  PmixClient& mine = **client;
  EXPECT_EQ(mine.rank(), 3U);
  ASSERT_TRUE(mine.put("address", "10.0.0.1 7").is_ok());
  EXPECT_EQ(*mine.get(3, "address"), std::nullopt);
  ASSERT_TRUE(mine.fence().is_ok());
  EXPECT_EQ(*mine.get(3, "address"), std::nullopt) << "it was not committed";
  ASSERT_TRUE(mine.commit().is_ok());
  ASSERT_TRUE(mine.fence().is_ok());
  EXPECT_EQ(*mine.get(3, "address"), "10.0.0.1 7");
  EXPECT_EQ(*mine.get(3, "another"), std::nullopt);
  EXPECT_EQ(*mine.get(2, "address"), std::nullopt) << "another rank's";
}

TEST_F(Pmix, ANameThatIsPublishedIsThereAtOnce) {
  const auto client = *open_pmix();
  EXPECT_FALSE(*client->is_published("rank 3 is here"));
  ASSERT_TRUE(client->publish("rank 3 is here").is_ok());
  EXPECT_TRUE(*client->is_published("rank 3 is here"));
  EXPECT_FALSE(*client->is_published("rank 2 is here"));
  EXPECT_EQ(client->publish(std::string(600, 'n')).code(), Code::kInternal);
}

TEST_F(Pmix, ItEndsWithItsLastUserButNotInAForkedChild) {
  auto client = *open_pmix();
  EXPECT_EQ(users(), 1);
  const pid_t child = ::fork();
  if (child == 0) {
    client.reset();
    ::_exit(users());
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 1) << "the parent's connection was ended by its child";
  client.reset();
  EXPECT_EQ(users(), 0);
}

TEST_F(Pmix, NoLauncherAndOneThatRefusesAreNamed) {
  ::setenv("PMIX_NAMESPACE", "another", 1);
  const auto refused = open_pmix();
  ASSERT_FALSE(refused.is_ok());
  EXPECT_EQ(refused.status().code(), Code::kUnavailable);
  EXPECT_EQ(refused.status().message(), "PMIx_Init: NOT-FOUND");
  EXPECT_EQ(users(), 0);
  ::unsetenv("PMIX_NAMESPACE");
  const auto none = open_pmix();
  ASSERT_FALSE(none.is_ok());
  EXPECT_EQ(none.status().code(), Code::kUnavailable);
  EXPECT_NE(none.status().message().find("PMIX_NAMESPACE is not set"), std::string::npos);
}

}  // namespace
}  // namespace paceline::drivers
