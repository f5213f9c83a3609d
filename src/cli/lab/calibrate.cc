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
#include <future>
#include <memory>
#include <mutex>
#include <thread>

#include "cli/descriptors.h"
#include "cli/lab/namespaces.h"
#include "cli/lab/shaping.h"
#include "cli/text/units.h"

namespace paceline::lab {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
constexpr std::size_t kChunk = 64 << 10;
constexpr timeval kPatience{5, 0};
constexpr int kOpenings = 12;  // a handshake that gets lost is begun again
constexpr int kWindows = 11, kLeastWindows = 5;
/// For a relay's rate: of each direction; and with a delay that TCP fills a link over within the first of them.
constexpr int kRelayTries = 3, kRelayWindows = 3;
constexpr auto kRelayDelay = milliseconds(1);
constexpr double kLongestWindow = 6, kLongEnough = 12;    // seconds: of one, and of all
constexpr int kFirstPort = 1 << 15, kPortsEnd = 1 << 16;  // of senders
constexpr auto kSlice = milliseconds(50), kTick = milliseconds(250);

double seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

/// What the threads of a calibration share: when to stop, and how far they are.
struct Watch {
  const CalibrationHooks& hooks;
  /// Of kSteps a link, and kWindows more where flows are capped.
  std::atomic<int> steps{0};
  std::atomic<int> links{0};

  [[nodiscard]] bool cancelled() const { return hooks.cancelled(); }
};
constexpr int kSteps = 2 * (kWindows + 1);

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
  /// Where packets get lost, so may all of a handshake's within kPatience. `number` tells those of a link apart, and
  /// has a class of its own where flows are capped.
  static Result<std::unique_ptr<Flow>> open(const End& from, const End& to, int number,
                                            const Watch& watch);
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
  /// All that came until the last of it came.
  struct Arrivals {
    uint64_t bytes;
    Clock::time_point last;
  };
  [[nodiscard]] Arrivals arrivals() const {
    std::lock_guard lock(mutex_);
    return {received_, last_};
  }
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
  static Result<std::unique_ptr<Flow>> try_open(const End& from, const End& to, int number);
  void receive();
  Socket sender_, receiver_;
  std::atomic<bool> sending_{false};
  std::atomic<uint64_t> sent_{0}, received_{0};
  mutable std::mutex mutex_;
  Clock::time_point last_ = Clock::now();
  std::atomic<int64_t> burst_start_ns_{0};  ///< not 0: the receiver compares with the line
  std::atomic<uint64_t> burst_base_{0};
  std::atomic<double> burst_line_{0}, burst_factor_{1}, ahead_{0};
  std::thread send_thread_, receive_thread_;
};

Status last_error(const char* what) {
  if (cli::lacks_descriptors(errno)) return cli::out_of_descriptors();
  return {Code::kUnavailable, fmt::format("calibration: {}: {}", what, std::strerror(errno))};
}

/// The sender's end, on a port that gives the flow the class of its number: the kernel's choice would have flows meet in
/// one class, of 64 several, and these would carry less than their number says.
Status bind_to_class(int fd, const End& from, const sockaddr_in& to, int number) {
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);  // an earlier flow's port does as well
  const int first = kFirstPort + ((number - ntohs(to.sin_port)) & (kFlowClasses - 1));
  for (int port = first; port < kPortsEnd; port += kFlowClasses) {
    const auto address = address_of(from.address, static_cast<uint16_t>(port));
    if (bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0)
      return Status::ok();
    if (errno != EADDRINUSE) break;
  }
  return last_error("bind");
}

Result<std::unique_ptr<Flow>> Flow::open(const End& from, const End& to, int number,
                                         const Watch& watch) {
  auto flow = try_open(from, to, number);
  for (int i = 1; i < kOpenings && !flow.is_ok() && !watch.cancelled(); ++i) {
    flow = try_open(from, to, number);
  }
  return flow;
}

Result<std::unique_ptr<Flow>> Flow::try_open(const End& from, const End& to, int number) {
  Socket listener;
  sockaddr_in address = address_of(to.address, 0);
  PACELINE_RETURN_IF_ERROR(in_namespace(to.path, [&] {
    listener = Socket(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (listener.fd() < 0) return last_error("socket");
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
    if (flow->sender_.fd() < 0) return last_error("socket");
    PACELINE_RETURN_IF_ERROR(bind_to_class(flow->sender_.fd(), from, address, number));
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
    {
      std::lock_guard lock(mutex_);
      received_ += static_cast<uint64_t>(n);
      last_ = Clock::now();
    }
    auto start = burst_start_ns_.load();
    if (start == 0) continue;
    auto elapsed = static_cast<double>(Clock::now().time_since_epoch().count() - start) * 1e-9;
    auto wire = static_cast<double>(received_ - burst_base_) * burst_factor_;
    ahead_ = std::max(ahead_.load(), wire - elapsed * burst_line_ / 8);
  }
}

double Flow::burst(double line_bps, double frame_factor) {
  // What waits in the queue and before it: slow lines take their time.
  drain(milliseconds(2000 + std::llround(std::min(8e9 / line_bps, 10e3))));
  std::this_thread::sleep_for(milliseconds(50));
  auto bytes =
      static_cast<std::size_t>(std::max({4.0 * static_cast<double>(burst_bytes(line_bps)),
                                         std::min(1e6, line_bps / 8 * 0.1), line_bps / 8 * 2e-3}));
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

using Flows = std::vector<std::unique_ptr<Flow>>;

/// Bits a second of all flows, over a window that is as long as `at_least` and until each has got something, `at_most` a
/// longer one. Each flow's is counted from arrival to arrival: at a slow rate a window holds few batches, and half of one
/// would be many per cent.
double rate_of_window(const Flows& flows, std::vector<Flow::Arrivals>& before, double at_least,
                      double at_most, const Watch& watch) {
  const auto began = Clock::now();
  auto passed = [&] { return seconds(Clock::now() - began); };
  auto still_waits = [&] {
    if (passed() < at_least) return true;
    for (std::size_t i = 0; i < flows.size(); ++i) {
      if (flows[i]->arrivals().bytes == before[i].bytes) return passed() < at_most;
    }
    return false;
  };
  while (still_waits() && !watch.cancelled()) {
    auto left = std::chrono::duration<double>(std::max(0.001, at_least - passed()));
    std::this_thread::sleep_for(std::min<std::chrono::duration<double>>(left, kSlice));
  }
  double rate = 0;
  for (std::size_t i = 0; i < flows.size(); ++i) {
    const auto now = flows[i]->arrivals();
    if (now.bytes > before[i].bytes) {
      rate +=
          static_cast<double>(now.bytes - before[i].bytes) * 8 / seconds(now.last - before[i].last);
    }
    before[i] = now;
  }
  return rate;
}

/// Median over windows of the sum of all flows; the first one is TCP finding the line.
double steady_rate(Flows& flows, double line_bps, Watch& watch, int windows = kWindows) {
  const double batch = 8.0 * kChunk / line_bps;
  const double window = std::clamp(24 * batch, 0.04, 0.6);
  const double longest =
      std::clamp(3 * batch * static_cast<double>(flows.size()), 2 * window, kLongestWindow);
  std::vector<Flow::Arrivals> before;
  for (auto& f : flows) {
    before.push_back(f->arrivals());
    f->start_sending();
  }
  rate_of_window(flows, before, std::max(0.12, window), longest, watch);
  std::vector<double> rates;
  const auto began = Clock::now();
  for (int i = 0; i < windows && !watch.cancelled(); ++i, ++watch.steps) {
    if (i >= kLeastWindows && seconds(Clock::now() - began) > kLongEnough) continue;
    rates.push_back(rate_of_window(flows, before, window, longest, watch));
  }
  for (auto& f : flows) f->stop_sending();
  if (rates.empty()) return 0;
  std::nth_element(rates.begin(), rates.begin() + static_cast<std::ptrdiff_t>(rates.size() / 2),
                   rates.end());
  return rates[rates.size() / 2];
}

Result<Flows> open_flows(const End& from, const End& to, int count, const Watch& watch) {
  Flows flows;
  for (int i = 0; i < count; ++i) {
    flows.emplace_back();
    PACELINE_ASSIGN(flows.back(), Flow::open(from, to, i, watch));
  }
  return flows;
}

/// Of a direction, whose flows may be capped or not.
struct Load {
  Load(const Options& options, bool capped) : flows(capped ? flows_that_fill(options) : 1) {
    line_bps = options.rate_bps;
    if (capped) line_bps = std::min(line_bps, flows * options.per_flow_bps);
  }
  int flows;
  double line_bps;  ///< what these may carry
};

Result<DirectionCalibration> measure(const End& from, const End& to, const Options& options,
                                     bool capped, Watch& watch) {
  const Load load(options, capped);
  DirectionCalibration result;
  result.flows = load.flows;
  result.may_carry_bps = load.line_bps;
  double one_line = capped ? options.per_flow_bps : options.rate_bps;
  double frame_factor = (options.mtu + 14.0) / (options.mtu - 52.0);
  {
    PACELINE_ASSIGN(auto flows, open_flows(from, to, 1, watch));
    auto rate = steady_rate(flows, one_line, watch);
    (capped ? result.one_flow_bps : result.payload_bps) = rate;
    if (!watch.cancelled()) result.ahead_bytes = flows[0]->burst(one_line, frame_factor);
    ++watch.steps;
  }
  if (capped && !watch.cancelled()) {
    PACELINE_ASSIGN(auto flows, open_flows(from, to, load.flows, watch));
    result.payload_bps = steady_rate(flows, load.line_bps, watch);
  }
  return result;
}

/// What a link carries from its node, and to it.
struct Ends {
  explicit Ends(const Network& network, const Node& node)
      : inside{node.net_path, node.address}, outside{network.switch_path(), kSwitchAddress} {}
  End inside, outside;
};

Result<LinkCalibration> measure_link(const Ends& ends, const Options& options, Watch& watch) {
  LinkCalibration link;
  const bool capped = options.per_flow_bps > 0;
  PACELINE_ASSIGN(link.up, measure(ends.inside, ends.outside, options, capped, watch));
  if (!watch.cancelled()) {
    PACELINE_ASSIGN(link.down, measure(ends.outside, ends.inside, options, false, watch));
  }
  return link;
}

/// What `measure(ends)` says of every link, of `steps` steps each. Some at once: about 4 Gb/s per core leaves room for the
/// machine's other work; beyond that, links would measure each other.
template <class T, class Measure>
Result<std::vector<T>> by_link(const Network& network, const Options& options, Watch& watch,
                               int steps, const Measure& measure) {
  const auto& nodes = network.nodes();
  const auto fast =
      std::floor(4e9 * std::max(1U, std::thread::hardware_concurrency()) / options.rate_bps);
  const int links_of_flows = kFlowsAtOnce / Load(options, options.per_flow_bps > 0).flows;
  const auto together =
      static_cast<std::size_t>(std::max(1.0, std::min<double>(fast, links_of_flows)));
  std::vector<T> links(nodes.size());
  auto tell = [&] {
    if (!watch.hooks.progress) return;
    const auto all = static_cast<int>(nodes.size());
    watch.hooks.progress(watch.links, all, std::min(100, 100 * watch.steps / (all * steps)));
  };
  for (std::size_t first = 0; first < nodes.size() && !watch.cancelled(); first += together) {
    auto last = std::min(nodes.size(), first + together);
    std::vector<std::future<Result<T>>> measured;
    for (auto i = first; i < last; ++i) {
      measured.push_back(std::async(std::launch::async, [&, i] {
        Result<T> link = measure(Ends(network, nodes[i]));
        ++watch.links;
        return link;
      }));
    }
    for (auto i = first; i < last; ++i) {
      auto& link = measured[i - first];
      while (link.wait_for(kTick) != std::future_status::ready) tell();
      PACELINE_ASSIGN(links[i], link.get());
    }
    tell();
  }
  return links;
}

/// The best of a few short measurements: what else the machine does can only make a relay look slower.
Result<double> relayed_rate(const End& from, const End& to, const Options& options, bool capped,
                            Watch& watch) {
  const Load load(options, capped);
  const double enough = least_payload(options, load.line_bps);
  double best = 0;
  for (int i = 0; i < kRelayTries && best < enough && !watch.cancelled(); ++i) {
    PACELINE_ASSIGN(auto flows, open_flows(from, to, load.flows, watch));
    best = std::max(best, steady_rate(flows, load.line_bps, watch, kRelayWindows));
  }
  // Flows that are too few for the line were carried: nothing is known against it.
  return best >= enough ? std::max(best, least_payload(options)) : best;
}

}  // namespace

int flows_that_fill(const Options& options) {
  const double wanted = std::ceil(options.rate_bps / options.per_flow_bps) + 1;
  return static_cast<int>(std::min(wanted, static_cast<double>(kMostFlows)));
}

double least_payload(const Options& options) { return least_payload(options, options.rate_bps); }

double least_payload(const Options& options, double line_bps) {
  const double frames = (options.mtu - 52.0) / (options.mtu + 38.0);
  return kHolds * std::min(kTcpShare, frames) * line_bps;
}

Status check_relay(Network& network, const Options& options, const CalibrationHooks& hooks) {
  if (options.delay.count() == 0) return Status::ok();
  Watch watch{hooks};
  network.change_delay(std::min<std::chrono::nanoseconds>(options.delay, kRelayDelay));
  auto links = by_link<double>(
      network, options, watch, 2 * kRelayWindows, [&](const Ends& ends) -> Result<double> {
        const bool capped = options.per_flow_bps > 0;
        PACELINE_ASSIGN(double up, relayed_rate(ends.inside, ends.outside, options, capped, watch));
        PACELINE_ASSIGN(double down,
                        relayed_rate(ends.outside, ends.inside, options, false, watch));
        return std::min(up, down);
      });
  network.change_delay(options.delay);
  PACELINE_RETURN_IF_ERROR(links.status());
  if (hooks.cancelled()) return Status::ok();
  const auto slowest = std::min_element(links->begin(), links->end());
  if (*slowest >= least_payload(options)) return Status::ok();
  const bool single = options.loss > 0;
  return {Code::kUnavailable,
          fmt::format("--delay does not hold here: node{}'s link carries {} of {}{}, for the relay "
                      "needs more of the cores. Ask for a lower --rate{} fewer nodes{}",
                      slowest - links->begin(), cli::format_rate(*slowest),
                      cli::format_rate(options.rate_bps),
                      single ? " in single packets, as --loss has them" : "", single ? "," : " or",
                      single ? " or no --loss" : "")};
}

Result<std::vector<LinkCalibration>> calibrate(const Network& network, const Options& options,
                                               const CalibrationHooks& hooks) {
  Watch watch{hooks};
  return by_link<LinkCalibration>(
      network, options, watch, kSteps + (options.per_flow_bps > 0 ? kWindows : 0),
      [&](const Ends& ends) { return measure_link(ends, options, watch); });
}

}  // namespace paceline::lab
