#include "cli/lab/round_trip.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "cli/lab/namespaces.h"

namespace paceline::lab {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kProbes = 40;
constexpr int kTries = 4;

/// A datagram socket at `address` in the given namespace; its port comes back.
Status open_at(const std::string& path, const std::string& address, int& fd, sockaddr_in& at) {
  return in_namespace(path, [&] {
    fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    at = {};
    at.sin_family = AF_INET;
    inet_pton(AF_INET, address.c_str(), &at.sin_addr);
    socklen_t size = sizeof at;
    timeval limit{2, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    if (bind(fd, reinterpret_cast<sockaddr*>(&at), size) != 0 ||
        getsockname(fd, reinterpret_cast<sockaddr*>(&at), &size) != 0) {
      return Status(Code::kInternal, fmt::format("bind {}: {}", address, std::strerror(errno)));
    }
    return Status::ok();
  });
}

void echo(int fd) {
  char byte = 0;
  sockaddr_in from{};
  for (;;) {
    socklen_t size = sizeof from;
    if (recvfrom(fd, &byte, 1, 0, reinterpret_cast<sockaddr*>(&from), &size) != 1) return;
    sendto(fd, &byte, 1, 0, reinterpret_cast<sockaddr*>(&from), size);
    if (byte == 'e') return;
  }
}

}  // namespace

Result<double> measure_round_trip(const Network& network, const Node& node) {
  int far = -1, near = -1;
  sockaddr_in far_at{}, near_at{};
  PACELINE_RETURN_IF_ERROR(open_at(network.switch_path(), kSwitchAddress, far, far_at));
  auto opened = open_at(node.net_path, node.address, near, near_at);
  std::thread echoer([far] { echo(far); });
  std::vector<double> times;
  for (int i = 0; opened.is_ok() && i <= kProbes; ++i) {
    char byte = i == kProbes ? 'e' : 'p';
    auto started = Clock::now();
    sendto(near, &byte, 1, 0, reinterpret_cast<sockaddr*>(&far_at), sizeof far_at);
    if (recv(near, &byte, 1, 0) != 1) break;
    times.push_back(std::chrono::duration<double>(Clock::now() - started).count());
  }
  echoer.join();
  close(far);
  if (near >= 0) close(near);
  if (!opened.is_ok()) return opened;
  if (times.size() < kProbes / 2) {
    return Status(Code::kUnavailable, fmt::format("{}: probes of its link get lost", node.name));
  }
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2),
                   times.end());
  return times[times.size() / 2];
}

Status check_delay(const Network& network, const Options& options) {
  if (options.delay.count() == 0) return Status::ok();
  auto asked = std::chrono::duration<double>(options.delay).count();
  auto tolerance = std::max(60e-6, 0.2 * asked);
  for (const auto& node : network.nodes()) {
    double best = 1e9;  // the link can only look slower than it is
    for (int i = 0; i < kTries && best > asked + tolerance; ++i) {
      PACELINE_ASSIGN(double round_trip, measure_round_trip(network, node));
      best = std::min(best, round_trip);
    }
    if (best < asked || best > asked + tolerance) {
      return {Code::kUnavailable,
              fmt::format("--delay {:.0f}us does not hold here: {} takes {:.0f} µs more (median of "
                          "{} probes). Ask for a longer delay, fewer nodes, or free the cores",
                          asked * 1e6, node.name, best * 1e6, kProbes)};
    }
  }
  return Status::ok();
}

}  // namespace paceline::lab
