#include "simulation/tasks.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "device/cpu/casts.h"

namespace paceline::simulation {
namespace {

using plan::Collective;

float value(ReduceOp op, uint64_t seed, std::size_t task, Rank rank, std::size_t i) {
  uint64_t h = (seed * 31 + task) * 1000003 + static_cast<uint64_t>(rank) * 7919 + i * 104729;
  h ^= h >> 13;
  constexpr float kFactors[] = {-2, -1, 1, 2};
  if (op == ReduceOp::kProduct) return kFactors[h % 4];
  return static_cast<float>(static_cast<int>(h % 201) - 100);
}

using Random = std::mt19937_64;

template <class T>
Buffer as(const std::vector<float>& numbers) {
  Buffer out(numbers.size() * sizeof(T));
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const auto number = static_cast<T>(numbers[i]);
    std::memcpy(out.data() + i * sizeof(T), &number, sizeof(T));
  }
  return out;
}

Buffer encoded(const std::vector<float>& numbers, DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return as<double>(numbers);
    case DType::kInt8:
      return as<int8_t>(numbers);
    case DType::kInt16:
      return as<int16_t>(numbers);
    case DType::kInt32:
      return as<int32_t>(numbers);
    case DType::kInt64:
      return as<int64_t>(numbers);
    case DType::kUInt8:
    case DType::kBool:
      return as<uint8_t>(numbers);
    case DType::kFloat16:
    case DType::kBFloat16: {
      Buffer out(numbers.size() * 2);
      for (std::size_t i = 0; i < numbers.size(); ++i)
        cpu::store_rounded(dtype, numbers[i], out.data() + 2 * i);
      return out;
    }
    default:
      return as<float>(numbers);
  }
}

// Of which sums of all ranks' numbers are exact, and where they are not summed, the numbers.
void draw_type(Task& t, Random& random) {
  constexpr DType kExactSums[] = {DType::kFloat32, DType::kFloat32, DType::kFloat64,
                                  DType::kFloat16, DType::kInt16,   DType::kInt32,
                                  DType::kInt64,   DType::kInt8,    DType::kBFloat16,
                                  DType::kUInt8,   DType::kBool};
  t.dtype = kExactSums[random() % (t.op == ReduceOp::kSum ? 7 : 11)];
}

// Into what its type has.
float fitting(DType dtype, float number) {
  if (dtype == DType::kUInt8) return std::abs(number);
  if (dtype == DType::kBool) return number > 0 ? 1 : 0;
  return number;
}

void draw_collective(Task& t, Random& random, bool is_last) {
  constexpr Collective kKinds[] = {
      Collective::kAllReduce, Collective::kAllReduce, Collective::kAllReduce,
      Collective::kBroadcast, Collective::kAllGather, Collective::kReduceScatter,
      Collective::kReduce,    Collective::kGather,    Collective::kScatter,
      Collective::kAllToAll,  Collective::kBarrier};
  constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin,
                               ReduceOp::kProduct};
  // Ranks can't disagree about a barrier.
  t.collective = kKinds[random() % (is_last ? 10 : 11)];
  t.op = kOps[random() % 5];
  t.root = static_cast<Rank>(random() % t.members.size());
  if (t.collective != Collective::kAllReduce) return draw_type(t, random);
  for (auto& in_place : t.in_place) in_place = static_cast<char>(random() % 2);
  constexpr plan::Algorithm kWays[] = {plan::Algorithm::kAuto,     plan::Algorithm::kAuto,
                                       plan::Algorithm::kRing,     plan::Algorithm::kDirect,
                                       plan::Algorithm::kTwoLevel, plan::Algorithm::kDoubling,
                                       plan::Algorithm::kTree};
  t.algorithm = kWays[random() % 7];
  const bool averages = random() % 4 == 0;
  switch (random() % 4) {
    case 0:
      t.codec.codec = random() % 2 == 0 ? plan::Codec::kFp16 : plan::Codec::kBf16;
      t.codec.inside_node = random() % 2 == 0;
      t.op = averages ? ReduceOp::kAverage : ReduceOp::kSum;
      // Sums of several ranks' integers have more bits than bf16.
      t.is_rounded = averages || random() % 2 == 0 || t.codec.codec == plan::Codec::kBf16;
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
      if (averages) t.op = ReduceOp::kAverage;
      t.is_rounded = averages || (t.op == ReduceOp::kSum && random() % 2 == 0);
      if (!t.is_rounded) draw_type(t, random);
      break;
  }
}

bool has_blocks(Collective c) {
  return c == Collective::kAllGather || c == Collective::kReduceScatter ||
         c == Collective::kGather || c == Collective::kScatter || c == Collective::kAllToAll;
}

// Of what has blocks: more for one than for another, and nothing for some.
void draw_counts(Task& t, Random& random) {
  if (random() % 3 != 0) return;
  if (!has_blocks(t.collective)) return;
  t.counts.resize(t.collective == Collective::kAllToAll ? t.members.size() * t.members.size()
                                                        : t.members.size());
  for (auto& c : t.counts) c = random() % 4 == 0 ? 0 : 1 + random() % t.count;
}

float reduce(ReduceOp op, float a, float b) {
  switch (op) {
    case ReduceOp::kMax:
      return std::max(a, b);
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kProduct:
      return a * b;
    default:
      return a + b;
  }
}

// Where the block of member `number` begins, and how long it is.
struct Block {
  std::size_t begin = 0, count = 0;
};
Block block_of(const Task& t, Rank number, Rank row = 0) {
  const auto at = static_cast<std::size_t>(number);
  if (t.counts.empty()) return {at * t.count, t.count};
  const auto counts =
      t.counts.begin() + static_cast<long>(static_cast<std::size_t>(row) * t.members.size());
  return {std::accumulate(counts, counts + number, std::size_t{0}), counts[number]};
}

std::size_t input_count(const Task& t, Rank member) {
  const auto last = static_cast<Rank>(t.members.size()) - 1;
  switch (t.collective) {
    case Collective::kBarrier:
      return 0;
    case Collective::kReduceScatter:
    case Collective::kScatter:
    case Collective::kAllToAll: {
      const auto end = block_of(t, last, t.collective == Collective::kAllToAll ? member : 0);
      return end.begin + end.count;
    }
    case Collective::kAllGather:
    case Collective::kGather:
      return block_of(t, member).count;
    default:
      return t.count;
  }
}

// A block per member in what is scattered and gathered, in the group's order.
void expect_collective(Task& t) {
  const auto in = [&](Rank m) -> const std::vector<float>& {
    return t.numbers[static_cast<std::size_t>(t.members[static_cast<std::size_t>(m)])];
  };
  const auto size = static_cast<Rank>(t.members.size());
  const auto cut = [](const std::vector<float>& from, Block block) {
    const auto begin = from.begin() + static_cast<long>(block.begin);
    return std::vector<float>(begin, begin + static_cast<long>(block.count));
  };
  auto reduced = in(0);
  std::vector<float> gathered;
  for (Rank m = 0; m < size; ++m) {
    for (std::size_t i = 0; m > 0 && i < std::min(reduced.size(), in(m).size()); ++i)
      reduced[i] = reduce(t.op, reduced[i], in(m)[i]);
    gathered.insert(gathered.end(), in(m).begin(), in(m).end());
  }
  if (t.op == ReduceOp::kAverage)
    for (auto& x : reduced) x /= static_cast<float>(size);
  for (Rank m = 0; m < size; ++m) {
    auto& wanted = t.wanted[static_cast<std::size_t>(t.members[static_cast<std::size_t>(m)])];
    switch (t.collective) {
      case Collective::kAllReduce:
        wanted = reduced;
        break;
      case Collective::kReduce:
        if (m == t.root) wanted = reduced;
        break;
      case Collective::kBroadcast:
        wanted = in(t.root);
        break;
      case Collective::kAllGather:
        wanted = gathered;
        break;
      case Collective::kGather:
        if (m == t.root) wanted = gathered;
        break;
      case Collective::kScatter:
        wanted = cut(in(t.root), block_of(t, m));
        break;
      case Collective::kAllToAll:
        for (Rank from = 0; from < size; ++from) {
          const auto theirs = cut(in(from), block_of(t, m, from));
          wanted.insert(wanted.end(), theirs.begin(), theirs.end());
        }
        break;
      case Collective::kBarrier:
        break;
      case Collective::kReduceScatter:
        wanted = cut(reduced, block_of(t, m));
        break;
    }
  }
}

// Rank r's message to the next one, and the receive of what the one before sends, as two tasks.
void add_round(std::vector<Task>& tasks, Task& send) {
  const auto n = send.numbers.size();
  Task receive = send;
  send.kind = Task::Kind::kSend;
  receive.kind = Task::Kind::kReceive;
  for (std::size_t r = 0; r < n; ++r) receive.wanted[r] = send.numbers[(r + n - 1) % n];
  tasks.push_back(send);
  tasks.push_back(receive);
}

}  // namespace

std::vector<float> floats_of(const Buffer& buffer) {
  std::vector<float> out(buffer.size() / sizeof(float));
  std::memcpy(out.data(), buffer.data(), out.size() * sizeof(float));
  return out;
}

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
    draw_collective(t, random, last);
    t.count = random() % 4 == 0 ? 1 + random() % 8000 : 1 + random() % 600;
    const bool is_round = !last && !t.in_group && random() % 5 == 0;
    if (!last && !is_round) draw_counts(t, random);
    t.numbers.resize(n);
    t.wanted.resize(n);
    for (std::size_t m = 0; m < t.members.size(); ++m) {
      const Rank r = t.members[m];
      auto& numbers = t.numbers[static_cast<std::size_t>(r)];
      numbers.resize(is_round ? t.count : input_count(t, static_cast<Rank>(m)));
      for (std::size_t i = 0; i < numbers.size(); ++i)
        numbers[i] = fitting(t.dtype, value(t.op, s.seed, static_cast<std::size_t>(k), r, i)) *
                     (t.is_rounded ? 0.1F : 1.0F);
    }
    for (std::size_t r = 0; r < n; ++r)
      t.submit_at.push_back(static_cast<Time>(random() % 5000) * kMicrosecond);
    t.ids.resize(n);
    t.submitted_at.resize(n, kNever);
    if (is_round) {
      add_round(tasks, t);
    } else {
      expect_collective(t);
      tasks.push_back(t);
    }
  }
  for (Task& t : tasks) {
    for (std::size_t r = 0; r < n; ++r) {
      t.input.push_back(encoded(t.numbers[r], t.dtype));
      t.expected.push_back(encoded(t.wanted[r], t.dtype));
      t.output.emplace_back(t.expected[r].size(), std::byte{0x5A});
      if (t.in_place[r] != 0) t.output[r] = t.input[r];
    }
    t.given = t.input;
    t.taken.resize(n);
    t.ended.resize(n);
  }
  return tasks;
}

}  // namespace paceline::simulation
