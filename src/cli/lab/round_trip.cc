#include "cli/lab/round_trip.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/ip.h>
#include <netinet/ip_icmp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <optional>

#include "cli/lab/namespaces.h"

namespace paceline::lab {
namespace {

using Clock = std::chrono::steady_clock;
using Wall = std::chrono::system_clock;  // the kernel's time stamps are of this one
constexpr std::size_t kProbes = 40;
constexpr std::size_t kLeastProbes = 20;
constexpr int kTries = 4;
constexpr int kCandidates = 6;
// Then the next one leaves, whatever became of the last: soon, for a machine that slept wakes up slowly.
constexpr auto kLongestWait = std::chrono::milliseconds(20), kRoom = std::chrono::milliseconds(1);
constexpr auto kBound =
    std::chrono::seconds(15);  // an address that is asked for gets lost, too: once a second

/// Echo requests from a node to the switch. Nobody has to be woken for an answer or its time, so what is measured is the
/// link, whatever else the cores do.
class Prober {
 public:
  Prober() = default;
  ~Prober() {
    if (fd_ >= 0) close(fd_);
  }
  Prober(const Prober&) = delete;
  Prober& operator=(const Prober&) = delete;

  Status open(const Node& node) {
    return in_namespace(node.net_path, [&] {
      fd_ = socket(AF_INET, SOCK_RAW | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_ICMP);
      sockaddr_in to{};
      to.sin_family = AF_INET;
      inet_pton(AF_INET, kSwitchAddress, &to.sin_addr);
      const int on = 1;
      if (fd_ < 0 || setsockopt(fd_, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof on) != 0 ||
          connect(fd_, reinterpret_cast<sockaddr*>(&to), sizeof to) != 0) {
        return Status(Code::kUnavailable, fmt::format("--delay: {}: no socket for echoes: {}",
                                                      node.name, std::strerror(errno)));
      }
      return Status::ok();
    });
  }

  void send_one() {
    icmphdr echo{};
    echo.type = ICMP_ECHO;
    echo.un.echo.sequence = htons(sent_);
    echo.checksum = static_cast<uint16_t>(~(htons(ICMP_ECHO << 8) + echo.un.echo.sequence));
    sent_at_[sent_++ % sent_at_.size()] = Wall::now();
    // One that does not leave is lost, as on the way.
    [[maybe_unused]] auto n = send(fd_, &echo, sizeof echo, 0);
  }

  struct Answer {
    uint16_t number;
    double seconds;
  };
  std::optional<Answer> receive() {
    struct {
      iphdr ip;
      icmphdr echo;
    } packet{};
    alignas(cmsghdr) std::array<char, 128> control{};
    iovec place{&packet, sizeof packet};
    msghdr message{};
    message.msg_iov = &place;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    if (recvmsg(fd_, &message, 0) < static_cast<ssize_t>(sizeof packet)) return std::nullopt;
    auto* stamp = CMSG_FIRSTHDR(&message);
    if (packet.echo.type != ICMP_ECHOREPLY || stamp == nullptr ||
        stamp->cmsg_type != SCM_TIMESTAMPNS) {
      return std::nullopt;
    }
    timespec at{};
    std::memcpy(&at, CMSG_DATA(stamp), sizeof at);
    auto number = ntohs(packet.echo.un.echo.sequence);
    auto arrived = std::chrono::seconds(at.tv_sec) + std::chrono::nanoseconds(at.tv_nsec);
    auto left = sent_at_[number % sent_at_.size()].time_since_epoch();
    return Answer{number, std::chrono::duration<double>(arrived - left).count()};
  }

  [[nodiscard]] int fd() const { return fd_; }
  [[nodiscard]] uint16_t sent() const { return sent_; }

 private:
  int fd_ = -1;
  uint16_t sent_ = 0;
  std::array<Wall::time_point, 1024> sent_at_{};
};

/// The median, in seconds. A probe that gets lost is sent again, for so long as kBound allows.
Result<double> measure_round_trip(const Node& node, const Options& options,
                                  const CalibrationHooks& hooks) {
  Prober prober;
  PACELINE_RETURN_IF_ERROR(prober.open(node));
  std::vector<double> times;
  std::optional<uint16_t> first;  // before it the ends asked for each other's addresses
  const auto until = Clock::now() + kBound + 4 * options.delay;
  const auto spacing = std::min<std::chrono::nanoseconds>(kLongestWait, options.delay + kRoom);
  const timespec slice{0, spacing.count()};
  while (times.size() < kProbes && Clock::now() < until) {
    prober.send_one();
    const auto next = Clock::now() + spacing;
    for (bool is_back = false; !is_back && Clock::now() < next;) {
      if (hooks.cancelled()) return Status(Code::kAborted, "cancelled");
      pollfd p{prober.fd(), POLLIN, 0};
      if (ppoll(&p, 1, &slice, nullptr) <= 0) continue;
      auto answer = prober.receive();
      if (!answer) continue;
      if (!first) first = prober.sent();
      if (answer->number >= *first) times.push_back(answer->seconds);
      is_back = answer->number + 1 == prober.sent();
    }
  }
  if (times.size() < kLeastProbes) {
    return Status(
        Code::kUnavailable,
        fmt::format(
            "--delay can't be checked here: of {} probes of {}'s link {} came "
            "back, and {} are needed. Ask for {}a higher --rate or fewer nodes, or free the cores",
            prober.sent(), node.name, times.size(), kLeastProbes,
            options.loss > 0 ? "a smaller --loss, " : ""));
  }
  auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

double seconds(std::chrono::nanoseconds d) { return std::chrono::duration<double>(d).count(); }

/// What a link may take where so much was asked for, in seconds.
double most_for(std::chrono::nanoseconds delay) {
  const double asked = seconds(delay);
  return asked + std::max(0.2 * asked, std::min(60e-6, 0.6 * asked));
}

/// The shortest delay, in tens of microseconds, that allows for so much beyond it.
std::chrono::microseconds shortest_with(double excess) {
  const double delay = excess <= 60e-6 ? excess / 0.6 : excess / 0.2;
  return std::chrono::microseconds(10 * std::llround(std::ceil(delay * 1e5)));
}

/// What every link's delay takes; empty when cancelled.
Result<std::vector<double>> measure_links(const Network& network, const Options& options,
                                          const CalibrationHooks& hooks) {
  std::vector<double> links;
  for (const auto& node : network.nodes()) {
    double best = 1e9;  // the link can only look slower than it is
    for (int i = 0; i < kTries && best > most_for(options.delay); ++i) {
      auto round_trip = measure_round_trip(node, options, hooks);
      if (hooks.cancelled()) return std::vector<double>();
      PACELINE_RETURN_IF_ERROR(round_trip.status());
      best = std::min(best, *round_trip);
    }
    links.push_back(best);
    if (hooks.progress) {
      const auto done = static_cast<int>(links.size()),
                 of = static_cast<int>(network.nodes().size());
      hooks.progress(done, of, 100 * done / of);
    }
  }
  return links;
}

/// A delay that every link holds, tried out from the one on which its `excess` would allow; nothing where that keeps
/// growing. What a longer one takes beyond itself is more, for its frames wait asleep.
Result<std::optional<std::chrono::microseconds>> find_shortest(Network& network, Options options,
                                                               double excess,
                                                               CalibrationHooks hooks) {
  hooks.progress = nullptr;
  auto delay = shortest_with(excess);
  for (int i = 0; i < kCandidates && delay <= std::chrono::seconds(1); ++i) {
    options.delay = delay;
    network.change_delay(delay);
    PACELINE_ASSIGN(auto links, measure_links(network, options, hooks));
    if (hooks.cancelled()) return std::optional<std::chrono::microseconds>();
    const auto worst = *std::max_element(links.begin(), links.end());
    if (worst <= most_for(delay)) return std::optional(delay);
    delay = std::max(shortest_with(worst - seconds(delay)), delay + std::chrono::microseconds(10));
  }
  return std::optional<std::chrono::microseconds>();
}

}  // namespace

Result<std::vector<double>> check_delay(Network& network, const Options& options,
                                        const CalibrationHooks& hooks) {
  if (options.delay.count() == 0) return std::vector<double>();
  PACELINE_ASSIGN(auto links, measure_links(network, options, hooks));
  if (hooks.cancelled()) return links;
  const auto worst = std::max_element(links.begin(), links.end());
  const auto asked = seconds(options.delay);
  if (*worst <= most_for(options.delay)) return links;
  PACELINE_ASSIGN(auto shortest, find_shortest(network, options, *worst - asked, hooks));
  auto ask =
      shortest ? fmt::format(
                     "The shortest that holds here now is --delay {}us: ask for that or more, for",
                     shortest->count())
               : std::string("None was found that holds: ask for a much longer one, or for");
  return Status(
      Code::kUnavailable,
      fmt::format(
          "--delay {:.6g}us does not hold here: node{}'s link takes {:.0f} µs each way "
          "(median of {} probes), and {:.0f} at most would do. {} fewer nodes, or free the cores",
          asked * 1e6, worst - links.begin(), *worst * 1e6, kProbes, most_for(options.delay) * 1e6,
          ask));
}

}  // namespace paceline::lab
