// What the channel itself can do between two processes: round trips of 8 bytes, and an all-reduce by hand
// (reduce-scatter, then all-gather, in pieces) by each way the bytes can take. The ways are interleaved, so that
// a busy machine is busy for all of them; medians and minima are printed.
//
//   shm_bench [MiB=64] [rounds=9] [chunk KiB=256] [piece KiB=512]
#include <poll.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "wire/shm/shm_channel.h"

namespace {

using namespace paceline;
using namespace paceline::wire;
using namespace paceline::wire::shm;

struct Board {
  std::atomic<int> announced[2];
  char address[2][128];
  std::atomic<int> at_barrier;
};

struct Settings {
  uint64_t bytes = 64ULL << 20;
  int rounds = 9;
  uint64_t chunk = 256 << 10;
  uint64_t piece = 512 << 10;
};

/// dst += message, as it arrives.
class Add final : public Sink {
 public:
  void consume(uint64_t offset, std::span<const std::byte> data) override {
    const auto* from = reinterpret_cast<const float*>(data.data());
    float* to = target + offset / sizeof(float);
    const std::size_t n = data.size() / sizeof(float);
    for (std::size_t i = 0; i < n; ++i) to[i] += from[i];
  }
  float* target = nullptr;
};

class Rank2 {
 public:
  Rank2(Board& board, int rank, const Settings& settings)
      : board_(board), rank_(rank), s_(settings) {}

  std::unique_ptr<ShmChannel> open(bool vm_read, int generation) {
    ShmOptions o;
    o.rank = rank_;
    o.size = 2;
    o.secret = "bench";
    o.use_vm_read = vm_read;
    o.chunk_bytes = s_.chunk;
    auto channel = ShmChannel::create(o).value();
    std::snprintf(board_.address[rank_], sizeof board_.address[rank_], "%s",
                  channel->address().c_str());
    board_.announced[rank_].store(generation);
    while (board_.announced[1 - rank_].load() < generation) sched_yield();
    channel->set_peer(1 - rank_, board_.address[1 - rank_], "here");
    meet(nullptr);
    return channel;
  }

  void meet(Channel* channel) {
    const int target = ++met_ * 2;
    board_.at_barrier.fetch_add(1);
    Events events;
    while (board_.at_barrier.load() < target) {
      if (channel != nullptr) channel->progress(clock_.now(), events);
      sched_yield();
    }
  }

  void drive(Channel& channel, std::size_t completions) {
    Events events;
    while (completions > 0) {
      channel.progress(clock_.now(), events);
      for (auto& c : events.completions) {
        if (!c.status.is_ok()) std::printf("%s\n", c.status.to_string().c_str()), std::exit(1);
      }
      completions -= events.completions.size();
      events.clear();
    }
  }

  /// Microseconds of one round trip.
  double ping(Channel& channel, int count) {
    std::byte word[8]{};
    std::byte back[8];
    meet(&channel);
    const Time begin = clock_.now();
    for (int i = 0; i < count; ++i) {
      const auto tag = static_cast<uint64_t>(next_tag_++);
      channel.receive(1 - rank_, tag, 1, {back, nullptr, 8}, 1);
      if (rank_ == 0) {
        channel.send(1, tag, 1, word, 2);
        drive(channel, 2);
      } else {
        drive(channel, 1);
        channel.send(0, tag, 1, word, 2);
        drive(channel, 1);
      }
    }
    return static_cast<double>(clock_.now() - begin) / count / 1e3;
  }

  /// Milliseconds of one all-reduce in place.
  double all_reduce(Channel& channel, float* data) {
    const uint64_t half = s_.bytes / 2;
    auto* bytes = reinterpret_cast<std::byte*>(data);
    std::byte* mine = bytes + static_cast<uint64_t>(rank_) * half;
    std::byte* theirs = bytes + static_cast<uint64_t>(1 - rank_) * half;
    const uint64_t pieces = (half + s_.piece - 1) / s_.piece;
    std::vector<Add> sinks(pieces);
    meet(&channel);
    const Time begin = clock_.now();
    for (int phase = 0; phase < 2; ++phase) {
      const auto tag = static_cast<uint64_t>(next_tag_++) << 32;
      for (uint64_t p = 0; p < pieces; ++p) {
        const uint64_t at = p * s_.piece;
        const uint64_t n = std::min(s_.piece, half - at);
        std::byte* out = phase == 0 ? theirs : mine;
        std::byte* in = phase == 0 ? mine : theirs;
        channel.send(1 - rank_, tag + p, 1, {out + at, n}, 1);
        sinks[p].target = reinterpret_cast<float*>(in + at);
        channel.receive(1 - rank_, tag + p, 1, {in + at, phase == 0 ? &sinks[p] : nullptr, n}, 2);
      }
      drive(channel, 2 * pieces);
    }
    return static_cast<double>(clock_.now() - begin) / 1e6;
  }

  void run() {
    auto fast = open(true, 1);
    auto copying = open(false, 2);
    auto* huge = static_cast<float*>(std::aligned_alloc(kHugePage, s_.bytes));
    ::madvise(huge, s_.bytes, MADV_HUGEPAGE);
    auto* small = static_cast<float*>(
        ::mmap(nullptr, s_.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    ::madvise(small, s_.bytes, MADV_NOHUGEPAGE);
    auto* shared = static_cast<float*>(fast->allocator()->allocate(s_.bytes));
    struct Case {
      const char* name;
      Channel* channel;
      float* data;
      std::vector<double> ms;
    };
    Case cases[] = {{"private, 4 KiB pages, process_vm_readv", fast.get(), small, {}},
                    {"private, 2 MiB pages, process_vm_readv", fast.get(), huge, {}},
                    {"allocator, read in place", fast.get(), shared, {}},
                    {"private, copied through slots", copying.get(), small, {}}};
    for (auto& c : cases) std::fill_n(c.data, s_.bytes / sizeof(float), 1.0F);
    for (int round = 0; round < s_.rounds; ++round) {
      for (auto& c : cases) c.ms.push_back(all_reduce(*c.channel, c.data));
    }
    for (auto& c : cases) {
      const float expected =
          static_cast<float>(1 << std::min(s_.rounds, 30)) *
          (c.data == small && s_.rounds < 15 ? static_cast<float>(1 << s_.rounds) : 1.0F);
      if (c.data[12345] != expected)
        std::printf("rank %d: %s: wrong sum %g\n", rank_, c.name, c.data[12345]);
      std::sort(c.ms.begin(), c.ms.end());
      if (rank_ == 0) {
        std::printf("%-42s median %7.2f ms  least %7.2f ms\n", c.name, c.ms[c.ms.size() / 2],
                    c.ms[0]);
      }
    }
    std::vector<double> us;
    us.reserve(15);
    for (int i = 0; i < 15; ++i) us.push_back(ping(*fast, 2000));
    std::sort(us.begin(), us.end());
    if (rank_ == 0)
      std::printf("8 bytes there and back: median %.2f us, least %.2f us\n", us[us.size() / 2],
                  us[0]);
    meet(fast.get());
  }

 private:
  Board& board_;
  int rank_;
  Settings s_;
  SteadyClock clock_;
  int met_ = 0;
  int64_t next_tag_ = 1;
};

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  if (argc > 1) settings.bytes = std::strtoull(argv[1], nullptr, 10) << 20;
  if (argc > 2) settings.rounds = std::atoi(argv[2]);
  if (argc > 3) settings.chunk = std::strtoull(argv[3], nullptr, 10) << 10;
  if (argc > 4) settings.piece = std::strtoull(argv[4], nullptr, 10) << 10;
  auto* board = new (::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Board();
  const pid_t child = ::fork();
  Rank2(*board, child == 0 ? 1 : 0, settings).run();
  std::fflush(nullptr);
  if (child == 0) std::_Exit(0);
  int status = 0;
  ::waitpid(child, &status, 0);
  return status == 0 ? 0 : 1;
}
