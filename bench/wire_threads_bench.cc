// The wire of CUDA tensors without GPUs: what a rank's pump carries between nodes with one, two … threads.
//
//   build/bin/paceline lab --nodes 2 --slots 1 --rate 25gbit -- build/bin/wire_threads_bench --threads 1 2
//
// The real pump, wires and plan of an exact all-reduce between nodes; this program plays the GPU, which has encoded every
// piece, and with three nodes or more added up what has come of it, at once. Both directions are busy, `--window`
// operations are under way. Numbers of threads take turns, medians count. With --burst all ranks begin a window of
// operations together and wait for all of it, as a step's gradients do: what a wire or a rank that got less of the link has
// left at the end shows, as does each rank's own end. With --late a node's first rank begins later: what the others leave
// of the link meanwhile is missing at the end where each may send at its even share alone. Gb/s are of gradients'
// encodings out of a node (and as many into it), headers not counted; cores are user and system time of one rank over wall
// time.
#include <fmt/format.h>
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <numeric>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "gpu/pump.h"

namespace {

using namespace paceline;       // NOLINT
using namespace paceline::gpu;  // NOLINT

struct Asked {
  std::vector<int> threads = {1, 2};
  uint64_t bytes = 16U << 20;  // of an operation
  uint64_t piece_bytes = 4U << 20;
  int window = 4;
  int rounds = 5;
  double seconds = 1;
  bool burst = false;
  double late_ms = 0;
  bool even = false;
  std::string curve;  // an interface
};

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

/// When the bytes of a burst pass an interface: looks at its counters all the time, on a thread of its own.
class Curve {
 public:
  explicit Curve(std::string interface) : name_(std::move(interface)) {
    if (!name_.empty()) thread_ = std::thread([this] { watch(); });
  }
  ~Curve() {
    ends_ = true;
    if (thread_.joinable()) thread_.join();
  }
  Curve(const Curve&) = delete;
  Curve& operator=(const Curve&) = delete;

  void begin() {
    if (!thread_.joinable()) return;
    began_ = SteadyClock().now();
    watching_ = true;
  }
  /// arrived, over: when all was here, and when all of this rank's was with the others.
  void end(Time arrived, Time over) {
    if (!thread_.joinable()) return;
    watching_ = false;
    while (busy_) std::this_thread::yield();
    if (samples_.size() > 2) {
      add(&Sample::in, in_);
      add(&Sample::out, out_);
    }
    samples_.clear();
    arrived_.push_back(milliseconds(arrived - began_));
    over_.push_back(milliseconds(over - began_));
  }
  void print() const {
    if (arrived_.empty()) return;
    fmt::print("  medians of {} bursts of rank 0, ms: all here after {:.3f}, over after {:.3f}\n",
               arrived_.size(), median(arrived_), median(over_));
    print("out", out_);
    print("in", in_);
  }

 private:
  static constexpr std::array<int, 11> kShares = {1, 5, 10, 25, 50, 75, 90, 95, 97, 98, 99};
  struct Sample {
    Time at = 0;
    uint64_t in = 0, out = 0;
  };
  using Times = std::array<std::vector<double>, kShares.size()>;

  static double milliseconds(Time t) { return static_cast<double>(t) / kMillisecond; }
  static void print(const char* way, const Times& times) {
    fmt::print("  ms until so many % of the bytes are {}:", way);
    for (size_t i = 0; i < kShares.size(); ++i)
      if (!times[i].empty()) fmt::print("  {} {:.3f}", kShares[i], median(times[i]));
    fmt::print("\n");
  }
  void look() {
    std::ifstream file("/proc/thread-self/net/dev");
    for (std::string line; std::getline(file, line);) {
      const auto colon = line.find(':');
      if (colon == std::string::npos || line.find(name_) > colon) continue;
      std::array<uint64_t, 9> fields{};
      std::istringstream text(line.substr(colon + 1));
      for (auto& field : fields) text >> field;
      samples_.push_back({SteadyClock().now() - began_, fields[0], fields[8]});
    }
  }
  void watch() {
    while (!ends_) {
      busy_ = true;
      if (watching_) look();
      busy_ = false;
      if (!watching_) std::this_thread::yield();
    }
  }
  void add(uint64_t Sample::*bytes, Times& times) {
    const uint64_t first = samples_.front().*bytes;
    const uint64_t all = samples_.back().*bytes - first;
    if (all == 0) return;
    size_t s = 0;
    for (size_t i = 0; i < kShares.size(); ++i) {
      while ((samples_[s].*bytes - first) * 100 < all * static_cast<uint64_t>(kShares[i])) ++s;
      times[i].push_back(milliseconds(samples_[s].at));
    }
  }

  std::string name_;
  std::atomic<bool> ends_{false}, watching_{false}, busy_{false};
  Time began_ = 0;
  std::vector<Sample> samples_;
  Times in_, out_;
  std::vector<double> arrived_, over_;
  std::thread thread_;
};

[[noreturn]] void leave(const Status& status) {
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

double processor_seconds() {
  rusage u{};
  getrusage(RUSAGE_SELF, &u);
  return static_cast<double>(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
         1e-6 * static_cast<double>(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

struct Figures {
  double gigabits = 0, cores = 0;
  double burst_ms = 0;  ///< of this rank alone, the median
};

/// A pump over some of the wires, with this program in the GPU's place.
class Load {
 public:
  Load(const std::vector<Wire>& wires, const paceline_identity& me, const std::vector<int>& peers,
       NodePage* page, const Asked& asked)
      : asked_(asked) {
    PathRequest q;
    q.shape = {me.node_count, me.local_size, me.node, me.local_rank};
    q.count = asked.bytes / sizeof(float) * static_cast<uint64_t>(me.local_size);
    q.piece_bytes = asked.piece_bytes;
    auto plan = build_path(q);
    if (!plan) leave(plan.status());
    plan_ = std::make_shared<const PathPlan>(std::move(*plan));
    host_.resize(plan_->host_bytes * static_cast<size_t>(asked.window));
    const int lanes = q.lanes + 1;
    flag_memory_ = std::aligned_alloc(Flags::kLine, Flags::bytes(lanes));
    std::memset(flag_memory_, 0, Flags::bytes(lanes));
    Pump::Options o;
    o.flags = flags_ = Flags(static_cast<std::byte*>(flag_memory_), me.local_size > 1);
    o.lanes = lanes;
    o.node = me.node;
    o.peers = peers;
    o.page = page;
    o.local_rank = me.local_rank;
    o.local_size = me.local_size;
    o.shares_link = page != nullptr && std::atof(setting("link_rate").c_str()) > 0;
    o.check = [] { return Status::ok(); };
    o.tell = [](const Status& why) { leave(why); };
    o.failed = [](const Status&) {};
    o.enter = [] {};
    pump_ = std::make_unique<Pump>(wires, std::move(o));
    if (plan_->hops == 2) adder_ = std::thread([this, lanes] { add_up(lanes); });
  }
  ~Load() {
    ends_ = true;
    if (adder_.joinable()) adder_.join();
    pump_.reset();
    std::free(flag_memory_);
  }
  Load(const Load&) = delete;
  Load& operator=(const Load&) = delete;

  /// A window of operations together, until they have come; all ranks begin at once.
  void burst() {
    const uint64_t first = sequence_ + 1;
    for (int i = 0; i < asked_.window; ++i) submit();
    for (uint64_t s = first; s <= sequence_; ++s) finish(s);
    arrived_at = SteadyClock().now();
    if (auto status = pump_->wait_retired(); !status) leave(status);
  }

  /// So many operations; returns when all is over here.
  Figures run(uint64_t operations) {
    const Time start = SteadyClock().now();
    const double before = processor_seconds();
    const auto window = static_cast<uint64_t>(asked_.window);
    const uint64_t first = sequence_;
    for (uint64_t i = 0; i < operations; ++i) {
      if (sequence_ - first >= window) finish(sequence_ - window + 1);
      submit();
    }
    for (uint64_t s = sequence_ - std::min(window, sequence_ - first) + 1; s <= sequence_; ++s)
      finish(s);
    if (auto status = pump_->wait_retired(); !status) leave(status);
    const double wall = static_cast<double>(SteadyClock().now() - start) / kSecond;
    const double bits = static_cast<double>(operations * plan_->node_bytes) * 8;
    return {bits / wall / 1e9, (processor_seconds() - before) / wall, 0};
  }

  Time arrived_at = 0;
  [[nodiscard]] uint64_t node_bytes() const { return plan_->node_bytes; }

 private:
  /// Three nodes or more: what has come of a piece is added up and encoded at once.
  void add_up(int lanes) {
    while (!ends_) {
      for (int l = 0; l < lanes; ++l) Flags::store(flags_.sums(l), Flags::load(flags_.in(l)));
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
  void submit() {
    auto o = std::make_shared<Operation>();
    o->sequence = ++sequence_;
    o->plan = plan_;
    o->name = "load";
    const auto window = static_cast<uint64_t>(asked_.window);
    o->host = host_.data() + o->sequence % window * plan_->host_bytes;
    o->tenant = o->sequence > window ? o->sequence - window : 0;
    o->out_before = out_;
    out_ += static_cast<uint32_t>(plan_->pieces.size());
    pump_->submit(o);
    Flags::store(flags_.out(), out_);
  }
  void finish(uint64_t sequence) {
    bool finite = true;
    if (auto status = pump_->wait_operation(sequence, 0, finite); !status) leave(status);
    Flags::store(flags_.done(), static_cast<uint32_t>(sequence));
  }

  const Asked& asked_;
  std::shared_ptr<const PathPlan> plan_;
  std::vector<std::byte> host_;
  void* flag_memory_ = nullptr;
  Flags flags_;
  std::unique_ptr<Pump> pump_;
  uint64_t sequence_ = 0;
  uint32_t out_ = 0;
  std::atomic<bool> ends_{false};
  std::thread adder_;
};

/// The slowest rank's time decides, so all do as many operations; the number follows from the first round.
uint64_t largest_of_all(const Wire& wire, uint64_t mine) {
  auto word = static_cast<int32_t>(std::min<uint64_t>(mine, 1U << 30));
  auto op = wire.largest(&word, "operations", "");
  if (!op) leave(op.status());
  if (auto status = wire.wait(*op); !status) leave(status);
  return static_cast<uint64_t>(word);
}

/// Every rank's number, in the order of the ranks.
std::string of_all_ranks(const Wire& wire, double mine) {
  auto rows = wire.gather(fmt::format("{:9.1f}", mine), 9, "bursts");
  if (!rows) leave(rows.status());
  std::string text;
  for (const auto& row : *rows) text += row;
  return text;
}

std::vector<int> find_peers(const Wire& wire, const paceline_identity& me) {
  auto rows = wire.gather(fmt::format("{} {}", me.node, me.local_rank), 64, "places");
  if (!rows) leave(rows.status());
  std::vector<int> peers(static_cast<size_t>(me.node_count));
  for (size_t r = 0; r < rows->size(); ++r) {
    int node = 0;
    int local_rank = 0;
    if (std::sscanf((*rows)[r].c_str(), "%d %d", &node, &local_rank) == 2 &&
        local_rank == me.local_rank)
      peers[static_cast<size_t>(node)] = static_cast<int>(r);
  }
  return peers;
}

/// By which the ranks of a node tell each other what they have to send; null: even parts of the link.
std::unique_ptr<NodePage> open_page(const Wire& wire, const paceline_identity& me) {
  std::unique_ptr<NodePage> page;
  if (me.local_rank == 0) {
    auto made = NodePage::make(me.local_size);
    if (!made) leave(made.status());
    page = std::make_unique<NodePage>(std::move(*made));
  }
  const auto mine = fmt::format("{:4}{:4}", me.node, me.local_rank) +
                    (page ? page->ticket() : std::string(NodePage::kTicketBytes, '\0'));
  auto rows = wire.gather(mine, mine.size(), "pages");
  if (!rows) leave(rows.status());
  for (const auto& row : *rows) {
    if (page || row.substr(0, 8) != fmt::format("{:4}{:4}", me.node, 0)) continue;
    auto opened = NodePage::open(std::string_view(row).substr(8), me.local_size);
    if (!opened) leave(opened.status());
    page = std::make_unique<NodePage>(std::move(*opened));
  }
  largest_of_all(wire, 0);  // all have opened it
  return page;
}

/// Windows of operations, each from all ranks' beginning until the last rank's end.
Figures run_bursts(Load& load, const Asked& asked, const Wire& wire, uint64_t operations, bool late,
                   Curve& curve) {
  const double before = processor_seconds();
  const Time start = SteadyClock().now();
  uint64_t microseconds = 0;
  std::vector<double> mine;
  const uint64_t bursts = std::max<uint64_t>(operations / static_cast<uint64_t>(asked.window), 1);
  for (uint64_t i = 0; i < bursts; ++i) {
    largest_of_all(wire, 0);
    curve.begin();
    const Time began = SteadyClock().now();
    if (late) std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(asked.late_ms));
    load.burst();
    const Time over = SteadyClock().now();
    curve.end(load.arrived_at, over);
    mine.push_back(static_cast<double>(over - began) / kMillisecond);
    microseconds += largest_of_all(wire, static_cast<uint64_t>((over - began) / kMicrosecond));
  }
  const double wall = static_cast<double>(SteadyClock().now() - start) / kSecond;
  const double bits = 8.0 * static_cast<double>(bursts) * static_cast<double>(asked.window) *
                      static_cast<double>(load.node_bytes());
  return {bits / static_cast<double>(microseconds) / 1e3, (processor_seconds() - before) / wall,
          median(mine)};
}

void measure(const Asked& asked, const std::vector<Wire>& wires, const paceline_identity& me) {
  const auto peers = find_peers(wires[0], me);
  const auto page = asked.even ? nullptr : open_page(wires[0], me);
  std::vector<std::vector<double>> gigabits(asked.threads.size()), cores(asked.threads.size()),
      bursts(asked.threads.size());
  std::vector<std::unique_ptr<Curve>> curves;
  for (size_t i = 0; i < asked.threads.size(); ++i)
    curves.push_back(std::make_unique<Curve>(me.rank == 0 ? asked.curve : ""));
  uint64_t operations = 8;
  for (int round = -1; round < asked.rounds; ++round) {
    for (size_t i = 0; i < asked.threads.size(); ++i) {
      Load load({wires.begin(), wires.begin() + asked.threads[i]}, me, peers, page.get(), asked);
      load.run(4);  // connections open
      largest_of_all(wires[0], 0);
      const Time start = SteadyClock().now();
      Curve& curve = *curves[i];
      const auto figures =
          asked.burst ? run_bursts(load, asked, wires[0], operations, me.local_rank == 0, curve)
                      : load.run(operations);
      const double took = static_cast<double>(SteadyClock().now() - start) / kSecond;
      if (round < 0) {
        operations = std::max<uint64_t>(
            8, largest_of_all(wires[0], static_cast<uint64_t>(static_cast<double>(operations) *
                                                              asked.seconds / took)));
        continue;
      }
      gigabits[i].push_back(figures.gigabits);
      cores[i].push_back(figures.cores);
      bursts[i].push_back(figures.burst_ms);
    }
  }
  std::vector<std::string> by_rank;
  by_rank.reserve(bursts.size());
  for (const auto& own : bursts) by_rank.push_back(of_all_ranks(wires[0], median(own)));
  if (me.rank != 0) return;
  fmt::print("{} nodes × {} ranks, operations of {} MiB a rank in pieces of {} KiB\n",
             me.node_count, me.local_size, asked.bytes >> 20, asked.piece_bytes >> 10);
  for (size_t i = 0; i < asked.threads.size(); ++i) {
    fmt::print("{} thread{}: {:.2f} Gb/s each way out of a node, {:.2f} cores a rank\n",
               asked.threads[i], asked.threads[i] == 1 ? " " : "s", median(gigabits[i]),
               median(cores[i]));
    if (asked.burst) fmt::print("  a burst by rank, ms:{}\n", by_rank[i]);
    curves[i]->print();
  }
}

}  // namespace

int main(int argc, char** argv) try {
  Asked asked;
  CLI::App app{"What a rank's pump carries between nodes, by the number of threads on the wire"};
  app.add_option("--threads", asked.threads, "numbers of threads, in turn")
      ->check(CLI::Range(1, kMostWires));
  app.add_option("--bytes", asked.bytes, "bytes of an operation, a rank");
  app.add_option("--piece", asked.piece_bytes, "bytes of a piece");
  app.add_option("--window", asked.window, "operations under way")->check(CLI::Range(1, 64));
  app.add_flag("--burst", asked.burst, "a window of operations at once, then the next");
  app.add_option("--late", asked.late_ms,
                 "of a burst: milliseconds that a node's first rank begins later")
      ->check(CLI::NonNegativeNumber);
  app.add_flag("--even", asked.even, "with PACELINE_LINK_RATE every rank keeps its even part");
  app.add_option("--curve", asked.curve,
                 "an interface of rank 0: when the bytes of a burst have passed it");
  app.add_option("--rounds", asked.rounds)->check(CLI::Range(1, 1000));
  app.add_option("--seconds", asked.seconds, "of each measurement, about");
  CLI11_PARSE(app, argc, argv);
  // A rate is dealt to all communicators that there are, and a part of them would have a part of it.
  if (asked.threads.size() > 1 && std::atof(setting("link_rate").c_str()) > 0)
    leave({Code::kInvalidArgument,
           "with PACELINE_LINK_RATE one number of threads at a time: --threads 4"});

  paceline_comm_options o{};
  o.struct_size = sizeof o;
  o.rank = o.size = -1;
  paceline_comm* first = nullptr;
  if (paceline_comm_create(&o, &first) != PACELINE_OK)
    leave({Code::kUnavailable, paceline_error(nullptr)});
  std::vector<Wire> wires = {Wire(first)};
  for (int i = 1; i < *std::max_element(asked.threads.begin(), asked.threads.end()); ++i) {
    auto made = make_companion(first);
    if (!made) leave(made.status());
    wires.emplace_back(*made);
  }
  auto me = wires[0].identity();
  if (!me) leave(me.status());
  if (me->node_count < 2)
    leave({Code::kInvalidArgument, "one node: nothing travels between nodes; give it two or more"});
  measure(asked, wires, *me);
  for (; !wires.empty(); wires.pop_back()) {
    if (auto status = wires.back().destroy(); !status) leave(status);
  }
  return 0;
} catch (const std::exception& error) {
  std::fputs(error.what(), stderr);
  return 1;
}
