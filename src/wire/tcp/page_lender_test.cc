#include "wire/tcp/page_lender.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <string>
#include <vector>

#include "base/testing/no_descriptors.h"

namespace paceline::wire {
namespace {

TEST(PageLender, WantOfDescriptorsIsNotForEver) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  const Descriptor sender(ends[0]);
  const Descriptor receiver(ends[1]);
  const std::vector<std::byte> data(PageLender::kWorthwhile, std::byte{7});
  PageLender lender(true);
  ::testing::internal::CaptureStderr();
  for (int spare : {0, 1, 2, 0}) {  // it needs three
    const paceline::testing::NoDescriptors few(spare);
    EXPECT_EQ(lender.send_some(sender.get(), data).outcome, PageLender::Outcome::kUnsuitable);
    EXPECT_TRUE(lender.usable() && !lender.has_lent());
  }
  const std::string said = ::testing::internal::GetCapturedStderr();
  const auto first = said.find("ulimit -n");
  EXPECT_TRUE(first != std::string::npos && said.find("ulimit -n", first + 1) == std::string::npos)
      << said;
  const auto sent = lender.send_some(sender.get(), data);
  ASSERT_EQ(sent.outcome, PageLender::Outcome::kSent);
  std::vector<std::byte> got(sent.bytes);
  ASSERT_EQ(::recv(receiver.get(), got.data(), got.size(), MSG_WAITALL),
            static_cast<ssize_t>(got.size()));
  EXPECT_EQ(got, std::vector<std::byte>(got.size(), std::byte{7}));
}

}  // namespace
}  // namespace paceline::wire
