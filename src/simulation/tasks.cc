#include "simulation/tasks.h"

#include <algorithm>

namespace paceline::simulation {
namespace {

using plan::Collective;

float value(uint64_t seed, std::size_t task, Rank rank, std::size_t i) {
  uint64_t h = (seed * 31 + task) * 1000003 + static_cast<uint64_t>(rank) * 7919 + i * 104729;
  h ^= h >> 13;
  return static_cast<float>(static_cast<int>(h % 201) - 100);
}

using Random = std::mt19937_64;

void draw_collective(Task& t, Random& random) {
  constexpr Collective kKinds[] = {Collective::kAllReduce, Collective::kAllReduce,
                                   Collective::kAllReduce, Collective::kBroadcast,
                                   Collective::kAllGather, Collective::kReduceScatter,
                                   Collective::kReduce,    Collective::kGather,
                                   Collective::kScatter,   Collective::kAllToAll};
  t.collective = kKinds[random() % 10];
  t.op = random() % 2 == 0 ? ReduceOp::kSum : ReduceOp::kMax;
  t.root = static_cast<Rank>(random() % t.members.size());
  if (t.collective != Collective::kAllReduce) return;
  for (auto& in_place : t.in_place) in_place = static_cast<char>(random() % 2);
  constexpr plan::Algorithm kWays[] = {plan::Algorithm::kAuto, plan::Algorithm::kAuto,
                                       plan::Algorithm::kRing, plan::Algorithm::kDirect};
  t.algorithm = kWays[random() % 4];
  switch (random() % 4) {
    case 0:
      t.codec.codec = plan::Codec::kFp16;
      t.codec.inside_node = random() % 2 == 0;
      t.op = ReduceOp::kSum;
      t.is_rounded = random() % 2 == 0;
      if (t.algorithm == plan::Algorithm::kRing) t.algorithm = plan::Algorithm::kAuto;
      break;
    case 1:
      t.codec.codec = plan::Codec::kTopK;
      t.keeps_back = random() % 2 == 0;
      t.codec.ratio = t.keeps_back ? 0.2 : 1;
      t.codec.fp16_values = random() % 2 == 0;
      t.op = ReduceOp::kSum;
      t.algorithm = plan::Algorithm::kAuto;
      break;
    default:
      t.is_rounded = t.op == ReduceOp::kSum && random() % 2 == 0;
      break;
  }
}

bool has_block_for_each(Collective c) {
  return c == Collective::kReduceScatter || c == Collective::kScatter || c == Collective::kAllToAll;
}

// A block per member in what is scattered and gathered, in the group's order.
void expect_collective(Task& t) {
  const auto in = [&](Rank m) -> const std::vector<float>& {
    return t.input[static_cast<std::size_t>(t.members[static_cast<std::size_t>(m)])];
  };
  const auto size = static_cast<Rank>(t.members.size());
  const auto block = [&](Rank of, Rank number) {
    const auto begin =
        in(of).begin() + static_cast<long>(static_cast<std::size_t>(number) * t.count);
    return std::vector<float>(begin, begin + static_cast<long>(t.count));
  };
  auto reduced = in(0);
  std::vector<float> gathered;
  for (Rank m = 0; m < size; ++m) {
    for (std::size_t i = 0; m > 0 && i < reduced.size(); ++i) {
      reduced[i] = t.op == ReduceOp::kSum ? reduced[i] + in(m)[i] : std::max(reduced[i], in(m)[i]);
    }
    gathered.insert(gathered.end(), in(m).begin(), in(m).end());
  }
  for (Rank m = 0; m < size; ++m) {
    auto& expected = t.expected[static_cast<std::size_t>(t.members[static_cast<std::size_t>(m)])];
    const auto own = static_cast<std::size_t>(m) * t.count;
    switch (t.collective) {
      case Collective::kAllReduce:
        expected = reduced;
        break;
      case Collective::kReduce:
        if (m == t.root) expected = reduced;
        break;
      case Collective::kBroadcast:
        expected = in(t.root);
        break;
      case Collective::kAllGather:
        expected = gathered;
        break;
      case Collective::kGather:
        if (m == t.root) expected = gathered;
        break;
      case Collective::kScatter:
        expected = block(t.root, m);
        break;
      case Collective::kAllToAll:
        for (Rank from = 0; from < size; ++from) {
          const auto theirs = block(from, m);
          expected.insert(expected.end(), theirs.begin(), theirs.end());
        }
        break;
      default:
        expected.assign(reduced.begin() + static_cast<long>(own),
                        reduced.begin() + static_cast<long>(own + t.count));
    }
  }
}

// Rank r's message to the next one, and the receive of what the one before sends, as two tasks.
void add_round(std::vector<Task>& tasks, Task& send) {
  const auto n = send.input.size();
  Task receive = send;
  send.kind = Task::Kind::kSend;
  receive.kind = Task::Kind::kReceive;
  for (std::size_t r = 0; r < n; ++r) receive.expected[r] = send.input[(r + n - 1) % n];
  tasks.push_back(send);
  tasks.push_back(receive);
}

}  // namespace

std::vector<Task> make_tasks(const Scenario& s) {
  Random random(s.seed ^ 0x7461736bULL);
  std::vector<Task> tasks;
  auto n = static_cast<std::size_t>(s.size);
  for (int k = 0; k < s.operations; ++k) {
    Task t;
    // The last one is what ranks disagree about, or do not submit: one of all ranks.
    const bool last = k + 1 == s.operations;
    t.in_group = !last && random() % 4 == 0;
    if (t.in_group) {
      t.members = s.group;
    } else {
      for (Rank r = 0; r < s.size; ++r) t.members.push_back(r);
    }
    t.in_place.resize(n);
    draw_collective(t, random);
    t.count = random() % 4 == 0 ? 1 + random() % 8000 : 1 + random() % 600;
    const auto in = has_block_for_each(t.collective) ? t.count * t.members.size() : t.count;
    t.input.assign(n, std::vector<float>(in));
    t.expected.resize(n);
    for (std::size_t r = 0; r < n; ++r) {
      for (std::size_t i = 0; i < in; ++i)
        t.input[r][i] = value(s.seed, static_cast<std::size_t>(k), static_cast<Rank>(r), i) *
                        (t.is_rounded ? 0.1F : 1.0F);
      t.submit_at.push_back(static_cast<Time>(random() % 5000) * kMicrosecond);
    }
    t.ids.resize(n);
    t.submitted_at.resize(n, kNever);
    if (!last && !t.in_group && random() % 5 == 0) {
      for (auto& v : t.input) v.resize(t.count);
      add_round(tasks, t);
    } else {
      expect_collective(t);
      tasks.push_back(t);
    }
  }
  for (Task& t : tasks) {
    for (std::size_t r = 0; r < n; ++r) {
      t.output.emplace_back(t.expected[r].size(), -12345.0F);
      if (t.in_place[r] != 0) t.output[r] = t.input[r];
    }
    t.given = t.input;
    t.taken.resize(n);
    t.ended.resize(n);
  }
  return tasks;
}

}  // namespace paceline::simulation
