// What the TCP channel carries, beside a bare TCP stream on the same path and in the same run.
//
//   wire_tcp_bench listen ADDRESS PORT ADDRESS_OF_THE_OTHER [flows] [piece KiB] [MiB] [seconds] [rounds]
//   wire_tcp_bench connect ADDRESS PORT OWN_ADDRESS …the same
//
// The two ends run in two namespaces or on two machines. Each round moves messages one way, then both ways at once
// (as a ring of two does), then a bare stream of the same bytes one way; the medians are printed in Gbit/s of
// payload, with the CPU seconds of this end per GB. Then a ping-pong of 8 bytes: median and 99th percentile.
#include <fmt/format.h>
#include <poll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "wire/tcp/socket.h"
#include "wire/tcp/tcp_channel.h"

namespace paceline::wire {
namespace {

struct Args {
  bool listens = false;
  std::string address;
  int port = 0;
  std::string own;
  int flows = 2;
  uint32_t piece = 256;
  uint64_t megabytes = 16;
  double seconds = 1;
  int rounds = 5;
};

double cpu_seconds() {
  rusage u{};
  ::getrusage(RUSAGE_SELF, &u);
  auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(u.ru_utime) + seconds(u.ru_stime);
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0 : v[v.size() / 2];
}

/// Runs one end: `out` and `in` say which directions carry `count` messages; keeps `kDepth` posted.
class Bench {
 public:
  Bench(TcpChannel& channel, Rank peer, std::size_t bytes)
      : channel_(channel),
        peer_(peer),
        send_(bytes, std::byte{1}),
        receive_(kDepth, std::vector<std::byte>(bytes)) {}

  double move(bool out, bool in, uint64_t count) {
    uint64_t sent = 0;
    uint64_t received = 0;
    uint64_t posted_out = 0;
    uint64_t posted_in = 0;
    Time begin = clock_.now();
    while ((out && sent < count) || (in && received < count)) {
      for (; out && posted_out < count && posted_out < sent + kDepth; ++posted_out) {
        channel_.send(peer_, tag_ + posted_out, 0, send_, 1);
      }
      for (; in && posted_in < count && posted_in < received + kDepth; ++posted_in) {
        auto& into = receive_[posted_in % kDepth];
        channel_.receive(peer_, tag_ + posted_in, 0, {into.data(), nullptr, into.size()}, 2);
      }
      turn();
      for (const auto& c : events_.completions) {
        if (!c.status.is_ok()) fail(c.status.to_string());
        ++(c.cookie == 1 ? sent : received);
      }
      for (const auto& l : events_.losses) fail(l.status.to_string());
      events_.clear();
    }
    tag_ += count;
    return static_cast<double>(clock_.now() - begin) * 1e-9;
  }

  /// Microseconds of each round trip.
  std::vector<double> ping_pong(bool first, int rounds) {
    std::vector<double> times;
    std::vector<std::byte> word(8);
    std::vector<std::byte> back(8);
    for (int i = 0; i < rounds; ++i) {
      Time begin = clock_.now();
      bool have = false;
      auto post = [&] { channel_.send(peer_, tag_, 0, word, 1); };
      channel_.receive(peer_, tag_, 0, {back.data(), nullptr, 8}, 2);
      if (first) post();
      while (!have) {
        turn();
        for (const auto& c : events_.completions) have |= c.cookie == 2;
        events_.clear();
      }
      if (!first) post();
      ++tag_;
      times.push_back(static_cast<double>(clock_.now() - begin) * 1e-3);
    }
    for (int i = 0; i < 3; ++i) turn();
    return times;
  }

 private:
  static constexpr uint64_t kDepth = 4;
  static void fail(const std::string& why) {
    fmt::print(stderr, "{}\n", why);
    std::exit(1);
  }
  void turn() {
    if (channel_.progress(clock_.now(), events_) || !channel_.prepare_wait()) return;
    pollfd p{channel_.poll_fd(), POLLIN, 0};
    ::poll(&p, 1, 10);
  }
  TcpChannel& channel_;
  Rank peer_;
  std::vector<std::byte> send_;
  std::vector<std::vector<std::byte>> receive_;
  Tag tag_ = 1;
  Events events_;
  SteadyClock clock_;
};

/// A bare blocking stream with large calls: what the path gives.
double bare_stream(const Args& a, uint64_t bytes) {
  bool is_v6 = a.address.find(':') != std::string::npos;
  auto host = is_v6 ? "[" + a.address + "]" : a.address;
  Endpoint at = parse_endpoint(fmt::format("{}:{}", host, a.port + 1)).value();
  // As much memory as the channel's messages take, in calls of 1 MiB: a small buffer would stay in the cache.
  constexpr uint64_t kCall = 1 << 20;
  static std::vector<std::byte> buffer((a.listens ? 4 : 1) * (a.megabytes << 20), std::byte{1});
  SteadyClock clock;
  Descriptor fd;
  if (a.listens) {
    static Descriptor listener = listen_on(at).value();
    pollfd p{listener.get(), POLLIN, 0};
    ::poll(&p, 1, 20000);
    fd.reset(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  } else {
    for (int i = 0; i < 200; ++i) {
      fd.reset(::socket(at.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
      if (::connect(fd.get(), at.get(), at.length) == 0) break;
      ::usleep(10000);
    }
  }
  Time begin = clock.now();
  for (uint64_t done = 0; done < bytes;) {
    uint64_t at_byte = done % buffer.size();
    auto size = std::min({kCall, bytes - done, buffer.size() - at_byte});
    ssize_t n = a.listens ? ::recv(fd.get(), buffer.data() + at_byte, size, 0)
                          : ::send(fd.get(), buffer.data() + at_byte, size, MSG_NOSIGNAL);
    if (n <= 0) return 1e9;
    done += static_cast<uint64_t>(n);
  }
  char end = 1;
  if (a.listens) {
    if (::send(fd.get(), &end, 1, MSG_NOSIGNAL) != 1) return 1e9;
  } else if (::recv(fd.get(), &end, 1, 0) != 1) {
    return 1e9;
  }
  return static_cast<double>(clock.now() - begin) * 1e-9;
}

int run(const Args& a) {
  TcpOptions o;
  o.rank = a.listens ? 0 : 1;
  o.size = 2;
  o.bind_address = a.listens ? a.address : a.own;
  o.port = static_cast<uint16_t>(a.listens ? a.port : a.port + 2);
  o.flows = a.flows;
  o.protocol.piece_bytes = a.piece * 1024;
  auto channel = TcpChannel::listen(o);
  if (!channel.is_ok()) {
    fmt::print(stderr, "{}\n", channel.status().to_string());
    return 1;
  }
  const char* form = a.address.find(':') == std::string::npos ? "tcp={}:{}" : "tcp=[{}]:{}";
  Rank peer = a.listens ? 1 : 0;
  auto known = (*channel)->set_peer(peer,
                                    a.listens ? fmt::format(fmt::runtime(form), a.own, a.port + 2)
                                              : fmt::format(fmt::runtime(form), a.address, a.port),
                                    "the other end");
  if (!known.is_ok()) {
    fmt::print(stderr, "{}\n", known.to_string());
    return 1;
  }
  const uint64_t bytes = a.megabytes << 20;
  Bench bench(**channel, peer, bytes);
  // Warm up, and find out how many messages fill the time: the connecting end decides and tells.
  double once = bench.move(!a.listens, a.listens, 8) / 8;
  std::vector<std::byte> word(8);
  auto count = static_cast<uint64_t>(std::clamp(a.seconds / once, 2.0, 10000.0));
  {
    SteadyClock clock;
    Events events;
    bool done = false;
    if (!a.listens) (*channel)->send(peer, 1ULL << 60, 0, std::as_bytes(std::span(&count, 1)), 1);
    if (a.listens)
      (*channel)->receive(peer, 1ULL << 60, 0, {reinterpret_cast<std::byte*>(&count), nullptr, 8},
                          1);
    while (!done) {
      (*channel)->progress(clock.now(), events);
      done = !events.completions.empty();
    }
  }
  std::vector<double> one_way;
  std::vector<double> both;
  std::vector<double> bare;
  double cpu_channel = 0;
  double cpu_bare = 0;
  double total = static_cast<double>(bytes) * static_cast<double>(count);
  for (int i = 0; i < a.rounds; ++i) {
    double c0 = cpu_seconds();
    one_way.push_back(total * 8e-9 / bench.move(!a.listens, a.listens, count));
    double c1 = cpu_seconds();
    both.push_back(total * 8e-9 / bench.move(true, true, count));
    double c2 = cpu_seconds();
    bare.push_back(total * 8e-9 / bare_stream(a, bytes * count));
    cpu_channel += c1 - c0;
    cpu_bare += cpu_seconds() - c2;
  }
  auto times = bench.ping_pong(!a.listens, 2000);
  std::sort(times.begin(), times.end());
  double gigabytes = total * 1e-9 * a.rounds;
  fmt::print(
      "{} flows={} piece={}KiB message={}MiB one_way={:.3f} both_ways={:.3f} bare={:.3f} Gbit/s "
      "channel/bare={:.3f} cpu_s_per_GB={:.3f} (bare {:.3f}) pingpong_us p50={:.1f} p99={:.1f}\n",
      a.listens ? "receiver" : "sender  ", a.flows, a.piece, a.megabytes, median(one_way),
      median(both), median(bare), median(one_way) / median(bare), cpu_channel / gigabytes,
      cpu_bare / gigabytes, times[times.size() / 2], times[times.size() * 99 / 100]);
  return 0;
}

}  // namespace
}  // namespace paceline::wire

int main(int argc, char** argv) try {
  paceline::wire::Args a;
  if (argc < 5) {
    fmt::print(
        stderr,
        "usage: {} listen|connect ADDRESS PORT OTHER_END [flows] [piece KiB] [MiB] [s] [rounds]\n",
        argv[0]);
    return 2;
  }
  a.listens = std::string(argv[1]) == "listen";
  a.address = argv[2];
  a.port = std::atoi(argv[3]);
  a.own = argv[4];
  if (argc > 5) a.flows = std::atoi(argv[5]);
  if (argc > 6) a.piece = static_cast<uint32_t>(std::atoi(argv[6]));
  if (argc > 7) a.megabytes = static_cast<uint64_t>(std::atoi(argv[7]));
  if (argc > 8) a.seconds = std::atof(argv[8]);
  if (argc > 9) a.rounds = std::atoi(argv[9]);
  return paceline::wire::run(a);
} catch (const std::exception& error) {
  std::fputs(error.what(), stderr);
  return 1;
}
