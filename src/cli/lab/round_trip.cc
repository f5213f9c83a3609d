#include "cli/lab/round_trip.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "cli/lab/namespaces.h"

namespace paceline::lab {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kMostProbes = 40;
constexpr int kLeastProbes = 3;
constexpr int kTries = 4;
constexpr auto kPatience = std::chrono::seconds(2);     // beyond the delay: then a probe is lost
constexpr auto kSlice = std::chrono::milliseconds(20);  // how often a wait looks up

/// A datagram socket at `address` in the given namespace; its port comes back.
Status open_at(const std::string& path, const std::string& address, int& fd, sockaddr_in& at) {
  return in_namespace(path, [&] {
    fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    at = {};
    at.sin_family = AF_INET;
    inet_pton(AF_INET, address.c_str(), &at.sin_addr);
    socklen_t size = sizeof at;
    if (bind(fd, reinterpret_cast<sockaddr*>(&at), size) != 0 ||
        getsockname(fd, reinterpret_cast<sockaddr*>(&at), &size) != 0) {
      return Status(Code::kInternal, fmt::format("bind {}: {}", address, std::strerror(errno)));
    }
    return Status::ok();
  });
}

/// True when something can be read; false when `stop` says so.
bool wait_readable(int fd, const std::function<bool()>& stop) {
  pollfd p{fd, POLLIN, 0};
  while (!stop()) {
    if (poll(&p, 1, static_cast<int>(kSlice.count())) > 0) return true;
  }
  return false;
}

void echo(int fd, const std::atomic<bool>& done) {
  char byte = 0;
  sockaddr_in from{};
  while (wait_readable(fd, [&] { return done.load(); })) {
    socklen_t size = sizeof from;
    if (recvfrom(fd, &byte, 1, 0, reinterpret_cast<sockaddr*>(&from), &size) != 1) return;
    sendto(fd, &byte, 1, 0, reinterpret_cast<sockaddr*>(&from), size);
  }
}

/// As many as fit into a second.
int probes_for(const Options& options) {
  return static_cast<int>(
      std::clamp<int64_t>(std::chrono::nanoseconds(std::chrono::seconds(1)) / options.delay,
                          kLeastProbes, kMostProbes));
}

/// Seconds that a small datagram takes from the node to the switch and back: the median.
Result<double> measure_round_trip(const Network& network, const Node& node, const Options& options,
                                  const CalibrationHooks& hooks) {
  int far = -1, near = -1;
  sockaddr_in far_at{}, near_at{};
  PACELINE_RETURN_IF_ERROR(open_at(network.switch_path(), kSwitchAddress, far, far_at));
  auto opened = open_at(node.net_path, node.address, near, near_at);
  std::atomic<bool> done{false};
  std::thread echoer([&] { echo(far, done); });
  const int probes = probes_for(options);
  std::vector<double> times;
  for (int i = 0; opened.is_ok() && i < probes; ++i) {
    char byte = 'p';
    auto started = Clock::now();
    auto lost = [&] { return Clock::now() - started > options.delay + kPatience; };
    sendto(near, &byte, 1, 0, reinterpret_cast<sockaddr*>(&far_at), sizeof far_at);
    if (!wait_readable(near, [&] { return hooks.cancelled() || lost(); })) break;
    if (recv(near, &byte, 1, 0) != 1) break;
    times.push_back(std::chrono::duration<double>(Clock::now() - started).count());
  }
  done = true;
  echoer.join();
  close(far);
  if (near >= 0) close(near);
  if (!opened.is_ok()) return opened;
  if (hooks.cancelled()) return Status(Code::kAborted, "cancelled");
  if (times.size() < static_cast<std::size_t>(probes + 1) / 2) {
    return Status(Code::kUnavailable, fmt::format("{}: probes of its link get lost", node.name));
  }
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2),
                   times.end());
  return times[times.size() / 2];
}

}  // namespace

Status check_delay(const Network& network, const Options& options, const CalibrationHooks& hooks) {
  if (options.delay.count() == 0) return Status::ok();
  auto asked = std::chrono::duration<double>(options.delay).count();
  auto tolerance = std::max(60e-6, 0.2 * asked);
  int checked = 0;
  for (const auto& node : network.nodes()) {
    double best = 1e9;  // the link can only look slower than it is
    for (int i = 0; i < kTries && best > asked + tolerance; ++i) {
      auto round_trip = measure_round_trip(network, node, options, hooks);
      if (hooks.cancelled()) return Status::ok();
      PACELINE_RETURN_IF_ERROR(round_trip.status());
      best = std::min(best, *round_trip);
    }
    if (best < asked || best > asked + tolerance) {
      return {Code::kUnavailable,
              fmt::format("--delay {:.0f}us does not hold here: {} takes {:.0f} µs more (median of "
                          "{} probes). Ask for a longer delay, fewer nodes, or free the cores",
                          asked * 1e6, node.name, best * 1e6, probes_for(options))};
    }
    hooks.progress(++checked, static_cast<int>(network.nodes().size()));
  }
  return Status::ok();
}

}  // namespace paceline::lab
