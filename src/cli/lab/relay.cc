#include "cli/lab/relay.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <deque>

#include "cli/descriptors.h"
#include "cli/lab/namespaces.h"
#include "cli/lab/network.h"

namespace paceline::lab {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t kLargestFrame = 10 + 14 + 65536;  // virtio header, Ethernet, a GSO batch
constexpr int kBatch = 64;  // frames read before the clock is looked at again

Status make_tap(const std::string& name, int& into) {
  int fd = open("/dev/net/tun", O_RDWR | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0 && cli::lacks_descriptors(errno)) return cli::out_of_descriptors();
  if (fd < 0) {
    return {Code::kUnavailable,
            fmt::format("--delay needs /dev/net/tun: {}. Run as root, or load the tun module",
                        std::strerror(errno))};
  }
  ifreq request{};
  std::strncpy(request.ifr_name, name.c_str(), IFNAMSIZ - 1);
  request.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
  unsigned offloads = TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6;
  if (ioctl(fd, TUNSETIFF, &request) != 0 || ioctl(fd, TUNSETOFFLOAD, offloads) != 0) {
    auto why = std::strerror(errno);
    close(fd);
    return {Code::kUnavailable,
            fmt::format("--delay: can't make the TAP device {}: {}", name, why)};
  }
  into = fd;
  return Status::ok();
}

struct Frame {
  Clock::time_point due;
  std::size_t link;
  std::vector<char> bytes;
};

/// Frames wait microseconds, not scheduling slices: a real-time priority where we may have one.
void hurry() {
  prctl(PR_SET_TIMERSLACK, 1);
  prctl(PR_SET_NAME, "lab-relay");
  sched_param priority{};
  priority.sched_priority = 10;
  pthread_setschedparam(pthread_self(), SCHED_FIFO, &priority);
}

}  // namespace

Result<TapPair> make_taps(const Node& node, const std::string& switch_path) {
  TapPair pair;
  PACELINE_RETURN_IF_ERROR(in_namespace(node.net_path, [&] { return make_tap(kNic, pair.nic); }));
  auto port = in_namespace(switch_path, [&] { return make_tap(node.port, pair.port); });
  if (!port.is_ok()) {
    close(pair.nic);
    return port;
  }
  return pair;
}

Result<std::unique_ptr<Relay>> Relay::start(std::vector<TapPair> links,
                                            std::chrono::nanoseconds delay) {
  const int wake = eventfd(0, EFD_CLOEXEC);
  if (wake < 0) {  // nothing else ends the thread
    for (const auto& link : links) {
      close(link.nic);
      close(link.port);
    }
    return cli::out_of_descriptors();
  }
  std::unique_ptr<Relay> relay(new Relay(std::move(links), delay, wake));
  relay->thread_ = std::thread([raw = relay.get()] { raw->carry(); });
  return relay;
}

Relay::~Relay() {
  eventfd_write(wake_, 1);
  thread_.join();
  for (auto& link : links_) {
    close(link.nic);
    close(link.port);
  }
  close(wake_);
}

void Relay::carry() {
  hurry();
  std::vector<pollfd> fds{{wake_, POLLIN, 0}};
  for (const auto& link : links_) {
    fds.push_back({link.nic, POLLIN, 0});
    fds.push_back({link.port, POLLIN, 0});
  }
  std::vector<char> buffer(kLargestFrame);
  std::deque<Frame> waiting;  // in order of `due`, for all wait equally long
  while (fds[0].revents == 0) {
    auto now = Clock::now();
    for (; !waiting.empty() && waiting.front().due <= now; waiting.pop_front()) {
      const auto& frame = waiting.front();
      // A write that fails is a frame lost, as on any link.
      [[maybe_unused]] auto n =
          write(links_[frame.link].port, frame.bytes.data(), frame.bytes.size());
    }
    timespec limit{};
    if (!waiting.empty()) {
      auto left = std::max(std::chrono::nanoseconds(0),
                           std::chrono::nanoseconds(waiting.front().due - Clock::now()));
      limit = {left.count() / 1'000'000'000, left.count() % 1'000'000'000};
    }
    if (ppoll(fds.data(), fds.size(), waiting.empty() ? nullptr : &limit, nullptr) <= 0) continue;
    for (std::size_t i = 0; i < links_.size(); ++i) {
      for (int k = 0; fds[1 + 2 * i].revents != 0 && k < kBatch; ++k) {
        auto n = read(links_[i].nic, buffer.data(), buffer.size());
        if (n <= 0) break;
        waiting.push_back({Clock::now() + delay_.load(), i, {buffer.data(), buffer.data() + n}});
      }
      for (int k = 0; fds[2 + 2 * i].revents != 0 && k < kBatch; ++k) {
        auto n = read(links_[i].port, buffer.data(), buffer.size());
        if (n <= 0) break;
        [[maybe_unused]] auto m = write(links_[i].nic, buffer.data(), static_cast<std::size_t>(n));
      }
    }
  }
}

}  // namespace paceline::lab
