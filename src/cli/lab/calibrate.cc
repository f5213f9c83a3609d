#include "cli/lab/calibrate.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>

#include "cli/lab/namespaces.h"

namespace paceline::lab {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
constexpr std::size_t kChunk = 64 << 10;
constexpr timeval kPatience{5, 0};
constexpr int kOpenings = 12;  // a handshake that gets lost is begun again

double seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

/// Where one end of a transfer lives.
struct End {
  std::string path;
  std::string address;
};

sockaddr_in address_of(const std::string& ip, uint16_t port) {
  sockaddr_in a{};
  a.sin_family = AF_INET;
  a.sin_port = htons(port);
  inet_pton(AF_INET, ip.c_str(), &a.sin_addr);
  return a;
}

class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  Socket(Socket&& o) noexcept : fd_(std::exchange(o.fd_, -1)) {}
  Socket& operator=(Socket&& o) noexcept {
    std::swap(fd_, o.fd_);
    return *this;
  }
  [[nodiscard]] int fd() const { return fd_; }

 private:
  int fd_;
};

/// One TCP flow between two ends with a thread at each: the sender sends while it is told to, the
/// receiver counts.
class Flow {
 public:
  /// Where packets get lost, so may all of a handshake's within kPatience.
  static Result<std::unique_ptr<Flow>> open(const End& from, const End& to,
                                            const CalibrationHooks& hooks);
  ~Flow() {
    sending_ = false;
    shutdown(sender_.fd(), SHUT_RDWR);
    shutdown(receiver_.fd(), SHUT_RDWR);
    for (auto* t : {&send_thread_, &receive_thread_}) {
      if (t->joinable()) t->join();
    }
  }
  void start_sending() {
    sending_ = true;
    send_thread_ = std::thread([this] {
      std::vector<char> chunk(kChunk, 'p');
      while (sending_) {
        auto n = send(sender_.fd(), chunk.data(), chunk.size(), MSG_NOSIGNAL);
        if (n <= 0) return;
        sent_ += static_cast<uint64_t>(n);
      }
    });
  }
  void stop_sending() {
    sending_ = false;
    if (send_thread_.joinable()) send_thread_.join();
  }
  [[nodiscard]] uint64_t received() const { return received_; }
  /// Waits until all that was sent has arrived.
  bool drain(milliseconds at_most) {
    auto until = Clock::now() + at_most;
    while (received_ < sent_) {
      if (Clock::now() > until) return false;
      std::this_thread::sleep_for(milliseconds(1));
    }
    return true;
  }
  double burst(double line_bps, double frame_factor);

 private:
  static Result<std::unique_ptr<Flow>> try_open(const End& from, const End& to);
  void receive();
  Socket sender_, receiver_;
  std::atomic<bool> sending_{false};
  std::atomic<uint64_t> sent_{0}, received_{0};
  std::atomic<int64_t> burst_start_ns_{0};  ///< not 0: the receiver compares with the line
  std::atomic<uint64_t> burst_base_{0};
  std::atomic<double> burst_line_{0}, burst_factor_{1}, ahead_{0};
  std::thread send_thread_, receive_thread_;
};

Status last_error(const char* what) {
  return {Code::kUnavailable, fmt::format("calibration: {}: {}", what, std::strerror(errno))};
}

Result<std::unique_ptr<Flow>> Flow::open(const End& from, const End& to,
                                         const CalibrationHooks& hooks) {
  auto flow = try_open(from, to);
  for (int i = 1; i < kOpenings && !flow.is_ok() && !hooks.cancelled(); ++i) {
    flow = try_open(from, to);
  }
  return flow;
}

Result<std::unique_ptr<Flow>> Flow::try_open(const End& from, const End& to) {
  Socket listener;
  sockaddr_in address = address_of(to.address, 0);
  PACELINE_RETURN_IF_ERROR(in_namespace(to.path, [&] {
    listener = Socket(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    setsockopt(listener.fd(), SOL_SOCKET, SO_RCVTIMEO, &kPatience, sizeof kPatience);
    socklen_t size = sizeof address;
    if (bind(listener.fd(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
        listen(listener.fd(), 1) != 0 ||
        getsockname(listener.fd(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
      return last_error("listen");
    }
    return Status::ok();
  }));
  auto flow = std::make_unique<Flow>();
  PACELINE_RETURN_IF_ERROR(in_namespace(from.path, [&] {
    flow->sender_ = Socket(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    setsockopt(flow->sender_.fd(), SOL_SOCKET, SO_SNDTIMEO, &kPatience, sizeof kPatience);
    if (connect(flow->sender_.fd(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
      return last_error("connect");
    }
    return Status::ok();
  }));
  flow->receiver_ = Socket(accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC));
  if (flow->receiver_.fd() < 0) return last_error("accept");
  flow->receive_thread_ = std::thread([raw = flow.get()] { raw->receive(); });
  return flow;
}

void Flow::receive() {
  for (;;) {
    // MSG_TRUNC: the kernel drops the bytes instead of copying them; two cores are few.
    auto n = recv(receiver_.fd(), nullptr, kChunk, MSG_TRUNC);
    if (n <= 0) return;
    received_ += static_cast<uint64_t>(n);
    auto start = burst_start_ns_.load();
    if (start == 0) continue;
    auto elapsed = static_cast<double>(Clock::now().time_since_epoch().count() - start) * 1e-9;
    auto wire = static_cast<double>(received_ - burst_base_) * burst_factor_;
    ahead_ = std::max(ahead_.load(), wire - elapsed * burst_line_ / 8);
  }
}

double Flow::burst(double line_bps, double frame_factor) {
  drain(milliseconds(2000));
  std::this_thread::sleep_for(milliseconds(50));
  auto bytes = static_cast<std::size_t>(std::max(1e6, line_bps / 8 * 2e-3));
  std::vector<char> chunk(bytes, 'b');
  burst_base_ = received_.load();
  burst_line_ = line_bps;
  burst_factor_ = frame_factor;
  ahead_ = 0;
  burst_start_ns_ = Clock::now().time_since_epoch().count();
  const auto until = Clock::now() + std::chrono::seconds(kPatience.tv_sec);
  for (std::size_t at = 0; at < bytes && Clock::now() < until;) {
    auto n = send(sender_.fd(), chunk.data() + at, bytes - at, MSG_NOSIGNAL);
    if (n <= 0) break;
    at += static_cast<std::size_t>(n);
    sent_ += static_cast<uint64_t>(n);
  }
  drain(milliseconds(5000));
  burst_start_ns_ = 0;
  return ahead_;
}

/// Median over windows of the sum of all flows; the first fifth of a second is TCP finding the
/// line.
double steady_rate(std::vector<std::unique_ptr<Flow>>& flows, double line_bps,
                   const CalibrationHooks& hooks) {
  auto total = [&] {
    uint64_t sum = 0;
    for (const auto& f : flows) sum += f->received();
    return static_cast<double>(sum);
  };
  auto window = std::clamp(24.0 * kChunk * 8 / line_bps, 0.04, 0.6);
  for (auto& f : flows) f->start_sending();
  std::this_thread::sleep_for(std::chrono::duration<double>(std::max(0.12, window)));
  std::vector<double> rates;
  auto before = total();
  auto then = Clock::now();
  for (int i = 0; i < 11 && !hooks.cancelled(); ++i) {
    std::this_thread::sleep_for(std::chrono::duration<double>(window));
    auto now = Clock::now();
    auto after = total();
    rates.push_back((after - before) * 8 / seconds(now - then));
    before = after;
    then = now;
  }
  for (auto& f : flows) f->stop_sending();
  if (rates.empty()) return 0;
  std::nth_element(rates.begin(), rates.begin() + static_cast<std::ptrdiff_t>(rates.size() / 2),
                   rates.end());
  return rates[rates.size() / 2];
}

Result<std::vector<std::unique_ptr<Flow>>> open_flows(const End& from, const End& to, int count,
                                                      const CalibrationHooks& hooks) {
  std::vector<std::unique_ptr<Flow>> flows;
  for (int i = 0; i < count; ++i) {
    flows.emplace_back();
    PACELINE_ASSIGN(flows.back(), Flow::open(from, to, hooks));
  }
  return flows;
}

Result<DirectionCalibration> measure(const End& from, const End& to, const Options& options,
                                     bool capped, const CalibrationHooks& hooks) {
  DirectionCalibration result;
  double one_line = capped ? options.per_flow_bps : options.rate_bps;
  double frame_factor = (options.mtu + 14.0) / (options.mtu - 52.0);
  {
    PACELINE_ASSIGN(auto flows, open_flows(from, to, 1, hooks));
    auto rate = steady_rate(flows, one_line, hooks);
    (capped ? result.one_flow_bps : result.payload_bps) = rate;
    if (!hooks.cancelled()) result.ahead_bytes = flows[0]->burst(one_line, frame_factor);
  }
  if (capped && !hooks.cancelled()) {
    result.flows = static_cast<int>(std::ceil(options.rate_bps / options.per_flow_bps)) + 1;
    PACELINE_ASSIGN(auto flows, open_flows(from, to, result.flows, hooks));
    result.payload_bps = steady_rate(flows, options.rate_bps, hooks);
  }
  return result;
}

Result<LinkCalibration> measure_link(const Network& network, const Node& node,
                                     const Options& options, const CalibrationHooks& hooks) {
  End inside{node.net_path, node.address}, outside{network.switch_path(), kSwitchAddress};
  LinkCalibration link;
  PACELINE_ASSIGN(link.up, measure(inside, outside, options, options.per_flow_bps > 0, hooks));
  if (!hooks.cancelled()) {
    PACELINE_ASSIGN(link.down, measure(outside, inside, options, false, hooks));
  }
  return link;
}

}  // namespace

Result<std::vector<LinkCalibration>> calibrate(const Network& network, const Options& options,
                                               const CalibrationHooks& hooks) {
  const auto& nodes = network.nodes();
  // About 4 Gb/s per core leaves room for the machine's other work; beyond that, links would
  // measure each other.
  auto together = static_cast<std::size_t>(std::max(
      1.0, std::floor(4e9 * std::max(1U, std::thread::hardware_concurrency()) / options.rate_bps)));
  std::vector<LinkCalibration> links(nodes.size());
  for (std::size_t first = 0; first < nodes.size() && !hooks.cancelled(); first += together) {
    auto last = std::min(nodes.size(), first + together);
    std::vector<Status> results(last - first);
    std::vector<std::thread> threads;
    for (auto i = first; i < last; ++i) {
      threads.emplace_back([&, i] {
        auto link = measure_link(network, nodes[i], options, hooks);
        results[i - first] = link.status();
        if (link.is_ok()) links[i] = link.value();
      });
    }
    for (auto& t : threads) t.join();
    for (auto& r : results) PACELINE_RETURN_IF_ERROR(r);
    if (hooks.progress) hooks.progress(static_cast<int>(last), static_cast<int>(nodes.size()));
  }
  return links;
}

}  // namespace paceline::lab
