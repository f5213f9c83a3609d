// For tests only: carries out the plans of all ranks of a group in one process, in a random legal
// order.
//
// It trusts nothing that a plan says. Two steps of a rank that touch the same bytes, one of them
// writing, must be ordered by `after`; scratch and output must be written before they are read; the
// k-th message from a to b must have the length that b expects; no step may be left over. Messages
// are handed over in any order, sends complete only when the receiver has posted (or, at random, at
// once, as short ones do).
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "plan/plan.h"

namespace paceline::plan::testing {

// Half precision, by the book: round to nearest even, overflow to infinity.
inline float half_to_float(uint16_t h) {
  int exponent = (h >> 10) & 31;
  int fraction = h & 1023;
  double value = exponent == 0    ? std::ldexp(fraction, -24)
                 : exponent == 31 ? (fraction ? NAN : INFINITY)
                                  : std::ldexp(fraction + 1024, exponent - 25);
  return static_cast<float>((h & 0x8000) ? -value : value);
}
inline uint16_t float_to_half(float f) {
  uint16_t sign = std::signbit(f) ? 0x8000 : 0;
  if (std::isnan(f)) return sign | 0x7e00;
  double a = std::fabs(static_cast<double>(f));
  if (a >= 65520) return sign | 0x7c00;
  if (a < std::ldexp(1, -14)) {
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(a, 24))));
  }
  int exponent = std::ilogb(a);
  auto fraction = static_cast<int>(std::nearbyint(std::ldexp(a, 10 - exponent)));
  return static_cast<uint16_t>(sign | (((exponent + 15) << 10) + fraction - 1024));
}
inline float bf16_to_float(uint16_t h) {
  return std::bit_cast<float>(static_cast<uint32_t>(h) << 16);
}
inline uint16_t float_to_bf16(float f) {
  auto bits = std::bit_cast<uint32_t>(f);
  if (std::isnan(f)) return static_cast<uint16_t>((bits >> 16) | 64);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <class T>
T load(const std::byte* p) {
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}
template <class T>
void store(std::byte* p, T value) {
  std::memcpy(p, &value, sizeof(T));
}

template <class T>
T combine(ReduceOp op, T a, T b) {
  using W = std::conditional_t<std::is_integral_v<T>, uint64_t, T>;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return static_cast<T>(static_cast<W>(a) + static_cast<W>(b));
    case ReduceOp::kProduct:
      return static_cast<T>(static_cast<W>(a) * static_cast<W>(b));
    case ReduceOp::kMin:
      return b < a ? b : a;
    case ReduceOp::kMax:
      return a < b ? b : a;
  }
  return a;
}

/// out = op(a, b) for one element.
inline void combine_element(DType type, ReduceOp op, std::byte* out, const std::byte* a,
                            const std::byte* b) {
  switch (type) {
    case DType::kFloat32:
      return store(out, combine(op, load<float>(a), load<float>(b)));
    case DType::kFloat64:
      return store(out, combine(op, load<double>(a), load<double>(b)));
    case DType::kFloat16:
      return store(out, float_to_half(combine(op, half_to_float(load<uint16_t>(a)),
                                              half_to_float(load<uint16_t>(b)))));
    case DType::kBFloat16:
      return store(out, float_to_bf16(combine(op, bf16_to_float(load<uint16_t>(a)),
                                              bf16_to_float(load<uint16_t>(b)))));
    case DType::kInt8:
      return store(out, combine(op, load<int8_t>(a), load<int8_t>(b)));
    case DType::kInt16:
      return store(out, combine(op, load<int16_t>(a), load<int16_t>(b)));
    case DType::kInt32:
      return store(out, combine(op, load<int32_t>(a), load<int32_t>(b)));
    case DType::kInt64:
      return store(out, combine(op, load<int64_t>(a), load<int64_t>(b)));
    case DType::kUInt8:
      return store(out, combine(op, load<uint8_t>(a), load<uint8_t>(b)));
    case DType::kBool: {
      bool any = op == ReduceOp::kSum || op == ReduceOp::kMax;
      auto x = load<uint8_t>(a), y = load<uint8_t>(b);
      return store(out, static_cast<uint8_t>(any ? (x | y) : (x & y)));
    }
  }
}

inline void divide_element(DType type, std::byte* p, double divisor) {
  switch (type) {
    case DType::kFloat32:
      return store(p, static_cast<float>(load<float>(p) / divisor));
    case DType::kFloat64:
      return store(p, load<double>(p) / divisor);
    case DType::kFloat16:
      return store(p,
                   float_to_half(static_cast<float>(half_to_float(load<uint16_t>(p)) / divisor)));
    case DType::kBFloat16:
      return store(p,
                   float_to_bf16(static_cast<float>(bf16_to_float(load<uint16_t>(p)) / divisor)));
    default:
      return;
  }
}

/// What a rank ends with.
struct Memory {
  std::vector<std::byte> input;
  std::vector<std::byte> output;
  std::vector<std::byte> scratch;
};

class Interpreter {
 public:
  Interpreter(std::vector<Plan> plans, std::vector<Memory> memory, uint64_t seed)
      : plans_(std::move(plans)), memory_(std::move(memory)), random_(seed) {}

  /// Runs to the end; what went wrong, or nothing.
  std::optional<std::string> run() {
    for (std::size_t r = 0; r < plans_.size(); ++r) {
      if (auto wrong = check_alone(r)) return wrong;
      states_.emplace_back(plans_[r].steps.size());
      for (std::size_t i = 0; i < plans_[r].steps.size(); ++i) {
        auto& s = states_[r][i];
        s.waiting_for = plans_[r].steps[i].after.size();
        for (uint32_t d : plans_[r].steps[i].after)
          states_[r][d].then.push_back(static_cast<uint32_t>(i));
        if (s.waiting_for == 0) ready_.push_back({r, static_cast<uint32_t>(i)});
      }
      auto& m = memory_[r];
      m.scratch.assign(plans_[r].scratch_bytes, std::byte{0xa5});
      written_output_.emplace_back(m.output.size(), plans_[r].request.in_place);
      written_scratch_.emplace_back(m.scratch.size(), false);
    }
    while (!ready_.empty() || !deliverable_.empty()) {
      std::size_t pick = random_() % (ready_.size() + deliverable_.size());
      std::optional<std::string> wrong;
      if (pick < ready_.size()) {
        auto [r, i] = ready_[pick];
        ready_[pick] = ready_.back();
        ready_.pop_back();
        wrong = start(r, i);
      } else {
        auto key = deliverable_[pick - ready_.size()];
        deliverable_[pick - ready_.size()] = deliverable_.back();
        deliverable_.pop_back();
        wrong = deliver(key);
      }
      if (wrong) return wrong;
    }
    for (std::size_t r = 0; r < plans_.size(); ++r) {
      for (std::size_t i = 0; i < states_[r].size(); ++i) {
        if (!states_[r][i].done)
          return fmt::format("rank {} step {} never ends\n{}", r, i, plans_[r].to_string());
      }
    }
    for (auto& [key, m] : messages_) {
      if (!m.delivered)
        return fmt::format("message {}->{} #{} was never taken", std::get<0>(key), std::get<1>(key),
                           std::get<2>(key));
    }
    return std::nullopt;
  }

  [[nodiscard]] const std::vector<Memory>& memory() const { return memory_; }
  [[nodiscard]] const std::vector<Plan>& plans() const { return plans_; }

 private:
  struct State {
    std::size_t waiting_for = 0;
    std::vector<uint32_t> then;
    bool done = false;
    uint64_t bytes = 0;  ///< that an encode or a receive came to
  };
  using Key = std::tuple<Rank, Rank, uint32_t>;
  struct Message {
    std::optional<uint32_t> send, receive;
    std::optional<std::vector<std::byte>> held;  ///< a copy: the send has completed already
    bool delivered = false;
    uint8_t lane = 0;
  };
  static bool overlap(const Range& a, const Range& b) {
    return a.bytes && b.bytes && a.buffer == b.buffer && a.offset < b.offset + b.bytes &&
           b.offset < a.offset + a.bytes;
  }
  /// One of them writes what the other touches. `src` is read, `dst` written.
  static bool conflict(const Step& a, const Step& b) {
    return overlap(a.dst, b.dst) || overlap(a.dst, b.src) || overlap(a.src, b.dst);
  }
  static bool reads_own_destination(const Step& s) {
    switch (s.kind) {
      case StepKind::kReduce:
      case StepKind::kScale:
      case StepKind::kDecodeReduce:
        return true;
      case StepKind::kReceiveReduce:
      case StepKind::kReceiveDecodeReduce:
        return s.src.bytes == 0;
      default:
        return false;
    }
  }

  // Bounds, order of `after`, and that conflicting steps are ordered.
  std::optional<std::string> check_alone(std::size_t r) {
    const Plan& plan = plans_[r];
    const auto& steps = plan.steps;
    auto fail = [&](std::size_t i, std::string what) {
      return fmt::format("rank {} step {}: {}\n{}", r, i, what, plan.to_string());
    };
    std::size_t words = steps.size() / 64 + 1;
    std::vector<std::vector<uint64_t>> before(steps.size(), std::vector<uint64_t>(words));
    for (std::size_t i = 0; i < steps.size(); ++i) {
      for (uint32_t d : steps[i].after) {
        if (d >= i) return fail(i, "waits for a later step");
        before[i][d / 64] |= uint64_t{1} << (d % 64);
        for (std::size_t w = 0; w <= d / 64; ++w) before[i][w] |= before[d][w];
      }
      for (const Range* range : {&steps[i].src, &steps[i].dst}) {
        uint64_t limit = range->buffer == Buffer::kInput    ? memory_[r].input.size()
                         : range->buffer == Buffer::kOutput ? memory_[r].output.size()
                                                            : plan.scratch_bytes;
        if (range->bytes && range->offset + range->bytes > limit) return fail(i, "out of bounds");
      }
      if (steps[i].dst.bytes && steps[i].dst.buffer == Buffer::kInput) {
        return fail(i, "writes the input");
      }
      for (std::size_t k = 0; k < i; ++k) {
        if ((before[i][k / 64] >> (k % 64)) & 1) continue;
        if (!conflict(steps[i], steps[k])) continue;
        if (!steps[i].brings_sum) return fail(i, fmt::format("races with step {}", k));
        // Ordered by what other ranks do; check_sum() looks when it comes.
        before[i][k / 64] |= uint64_t{1} << (k % 64);
        for (std::size_t w = 0; w <= k / 64; ++w) before[i][w] |= before[k][w];
      }
    }
    auto ordered = [&](std::size_t first, std::size_t second) {
      return ((before[second][first / 64] >> (first % 64)) & 1) != 0;
    };
    // Where an answer comes, all is done before the question, or after the answer.
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const Range& answer = steps[i].answer;
      if (answer.bytes == 0) continue;
      auto comes = std::find_if(steps.begin(), steps.end(), [&](const Step& s) {
        return s.kind == StepKind::kReceive && s.peer == steps[i].peer && s.dst == answer;
      });
      if (comes == steps.end() || answer.bytes != steps[i].src.bytes)
        return fail(i, "its answer never comes");
      auto last = static_cast<std::size_t>(comes - steps.begin());
      for (std::size_t k = 0; k < steps.size(); ++k) {
        bool touches = overlap(steps[k].src, answer) || overlap(steps[k].dst, answer);
        if (k == i || k == last || !touches || ordered(k, i) || ordered(last, k)) continue;
        return fail(k, fmt::format("races with the answer to step {}", i));
      }
    }
    return std::nullopt;
  }

  std::byte* at(std::size_t r, const Range& range) {
    auto& m = memory_[r];
    auto& buffer = range.buffer == Buffer::kInput    ? m.input
                   : range.buffer == Buffer::kOutput ? m.output
                                                     : m.scratch;
    return buffer.data() + range.offset;
  }
  std::vector<bool>* written(std::size_t r, const Range& range) {
    if (range.buffer == Buffer::kInput) return nullptr;
    return range.buffer == Buffer::kOutput ? &written_output_[r] : &written_scratch_[r];
  }
  bool unwritten(std::size_t r, const Range& range, uint64_t bytes) {
    auto* w = written(r, range);
    if (w == nullptr) return false;
    auto from = w->begin() + static_cast<std::ptrdiff_t>(range.offset);
    return std::find(from, from + static_cast<std::ptrdiff_t>(bytes), false) !=
           from + static_cast<std::ptrdiff_t>(bytes);
  }
  void mark(std::size_t r, const Range& range, uint64_t bytes) {
    auto* w = written(r, range);
    auto from = w->begin() + static_cast<std::ptrdiff_t>(range.offset);
    std::fill(from, from + static_cast<std::ptrdiff_t>(bytes), true);
  }

  uint64_t source_bytes(std::size_t r, const Step& s) {
    return s.bytes_from == kNoStep ? s.src.bytes : states_[r][s.bytes_from].bytes;
  }

  std::optional<std::string> start(std::size_t r, uint32_t i) {
    const Step& s = plans_[r].steps[i];
    auto fail = [&](std::string what) {
      return fmt::format("rank {} step {}: {}\n{}", r, i, what, plans_[r].to_string());
    };
    if (s.bytes_from != kNoStep && !states_[r][s.bytes_from].done)
      return fail("length is not known yet");
    if (s.codes.empty() && s.src.bytes && unwritten(r, s.src, source_bytes(r, s)))
      return fail("reads what was never written");
    for (const Coded& code : s.codes) {
      if (code.bytes_from == kNoStep || !states_[r][code.bytes_from].done)
        return fail("an encoding's length is not known yet");
      if (unwritten(r, code.range, states_[r][code.bytes_from].bytes))
        return fail("adds an encoding that was never written");
      if (code.range.offset < s.src.offset ||
          code.range.offset + code.range.bytes > s.src.offset + s.src.bytes)
        return fail("its source does not span its encodings");
    }
    if (reads_own_destination(s) && unwritten(r, s.dst, s.dst.bytes))
      return fail("reduces into what was never written");
    bool communicates = s.peer >= 0;
    if (communicates) return post(r, i);
    compute(r, i);
    finish(r, i);
    return std::nullopt;
  }

  std::optional<std::string> post(std::size_t r, uint32_t i) {
    const Step& s = plans_[r].steps[i];
    bool sending = s.kind == StepKind::kSend;
    auto me = static_cast<Rank>(r);
    Key key = sending ? Key{me, s.peer, s.slot} : Key{s.peer, me, s.slot};
    Message& m = messages_[key];
    auto& end = sending ? m.send : m.receive;
    if (end) return fmt::format("rank {} step {}: slot {} is used twice", r, i, s.slot);
    end = i;
    if ((sending ? m.receive : m.send) && m.lane != s.lane)
      return fmt::format("rank {} step {}: lanes differ", r, i);
    m.lane = s.lane;
    if (sending && !m.receive && random_() % 3 == 0) {
      auto* from = at(r, s.src);
      m.held.emplace(from, from + source_bytes(r, s));
      finish(r, i);
    }
    if (m.send && m.receive) deliverable_.push_back(key);
    return std::nullopt;
  }

  std::optional<std::string> deliver(const Key& key) {
    Message& m = messages_[key];
    m.delivered = true;
    auto from = static_cast<std::size_t>(std::get<0>(key));
    auto to = static_cast<std::size_t>(std::get<1>(key));
    const Step& send = plans_[from].steps[*m.send];
    const Step& receive = plans_[to].steps[*m.receive];
    std::vector<std::byte> data;
    if (m.held) {
      data = *m.held;
    } else {
      auto* source = at(from, send.src);
      data.assign(source, source + source_bytes(from, send));
    }
    if (receive.brings_sum) {
      if (auto wrong = check_sum(to, *m.receive)) return wrong;
    }
    const PlanRequest& q = plans_[to].request;
    uint64_t expected = message_bytes(q, receive);
    if (data.size() > expected || (data.size() < expected && !receive.short_message)) {
      return fmt::format("message {}->{} #{} has {} bytes, {} are expected\n{}\n{}", from, to,
                         std::get<2>(key), data.size(), expected, plans_[from].to_string(),
                         plans_[to].to_string());
    }
    states_[to][*m.receive].bytes = data.size();
    const bool was_answered =
        send.answer_of != kNoStep && answered_.contains({from, send.answer_of});
    if (!was_answered) take(to, receive, data);
    if (!receive.answers && send.answer.bytes != 0) return "an answer is expected, none is given";
    // As shared memory may do: what came out is written to the sender while its send is under way, and not sent again.
    if (receive.answers && !m.held && random_() % 2 == 0) {
      answered_.emplace(to, *m.receive);
      std::memcpy(at(from, send.answer), at(to, receive.dst), data.size());
      mark(from, send.answer, data.size());
    }
    if (!m.held) finish(from, *m.send);
    finish(to, *m.receive);
    return std::nullopt;
  }

  // A sum must not come before all that it replaces has left, or is done.
  std::optional<std::string> check_sum(std::size_t r, uint32_t i) {
    const auto& steps = plans_[r].steps;
    for (uint32_t k = 0; k < i; ++k) {
      if (!conflict(steps[i], steps[k])) continue;
      const bool is_send = steps[k].kind == StepKind::kSend;
      const Key key{static_cast<Rank>(r), steps[k].peer, steps[k].slot};
      if (is_send ? messages_[key].delivered : states_[r][k].done) continue;
      return fmt::format("rank {} step {}: the sum comes before step {} is through\n{}", r, i, k,
                         plans_[r].to_string());
    }
    return std::nullopt;
  }

  void take(std::size_t r, const Step& s, const std::vector<std::byte>& data) {
    std::byte* dst = at(r, s.dst);
    const std::byte* left = s.src.bytes ? at(r, s.src) : dst;
    const PlanRequest& q = plans_[r].request;
    std::vector<std::byte> plain = data;
    if (s.kind == StepKind::kReceiveDecode || s.kind == StepKind::kReceiveDecodeReduce) {
      plain.resize(s.dst.bytes);
      decode_dense(q.codec, data.data(), plain.data(), s.dst.bytes / 4);
    }
    bool reduces = s.kind == StepKind::kReceiveReduce || s.kind == StepKind::kReceiveDecodeReduce;
    if (reduces) {
      combine_all(q, dst, left, plain.data(), plain.size());
      for (uint64_t at = 0; s.divisor != 1.0 && at < s.dst.bytes; at += dtype_size(q.dtype))
        divide_element(q.dtype, dst + at, s.divisor);
    } else {
      std::memcpy(dst, plain.data(), plain.size());
    }
    mark(r, s.dst, plain.size());
  }

  void compute(std::size_t r, uint32_t i) {
    const Step& s = plans_[r].steps[i];
    const PlanRequest& q = plans_[r].request;
    std::byte* dst = s.dst.bytes ? at(r, s.dst) : nullptr;
    const std::byte* src = s.src.bytes ? at(r, s.src) : nullptr;
    uint64_t bytes = s.dst.bytes;
    std::size_t element = dtype_size(q.dtype);
    switch (s.kind) {
      case StepKind::kCopy:
        std::memcpy(dst, src, bytes);
        break;
      case StepKind::kReduce:
        combine_all(q, dst, dst, src, bytes);
        break;
      case StepKind::kScale:
        for (uint64_t at = 0; at < bytes; at += element)
          divide_element(q.dtype, dst + at, s.divisor);
        break;
      case StepKind::kEncode:
        if (q.codec.codec == Codec::kTopK) {
          bytes = encode_sparse(q.codec, src, s.src.bytes / 4, dst);
        } else {
          encode_dense(q.codec, src, dst, s.src.bytes / 4);
        }
        states_[r][i].bytes = bytes;
        break;
      case StepKind::kDecode:
        decode_dense(q.codec, src, dst, bytes / 4);
        break;
      case StepKind::kDecodeReduce: {
        std::vector<std::byte> plain(bytes);
        decode_dense(q.codec, src, plain.data(), bytes / 4);
        combine_all(q, dst, dst, plain.data(), bytes);
        break;
      }
      case StepKind::kDecodeSum:
        std::memset(dst, 0, bytes);
        for (const Coded& code : s.codes) decode_add_sparse(at(r, code.range), dst);
        for (uint64_t at = 0; at < bytes; at += element)
          divide_element(q.dtype, dst + at, s.divisor);
        break;
      case StepKind::kZero:
        std::memset(dst, 0, bytes);
        break;
      default:
        break;
    }
    if (s.dst.bytes) mark(r, s.dst, bytes);
  }

  static void combine_all(const PlanRequest& q, std::byte* dst, const std::byte* a,
                          const std::byte* b, uint64_t bytes) {
    std::size_t element = dtype_size(q.dtype);
    for (uint64_t at = 0; at < bytes; at += element)
      combine_element(q.dtype, q.op, dst + at, a + at, b + at);
  }

  static void encode_dense(const CodecSpec& c, const std::byte* src, std::byte* dst, uint64_t n) {
    for (uint64_t i = 0; i < n; ++i) {
      float f = load<float>(src + 4 * i);
      store(dst + 2 * i, c.codec == Codec::kBf16 ? float_to_bf16(f)
                                                 : float_to_half(f * static_cast<float>(c.scale)));
    }
  }
  static void decode_dense(const CodecSpec& c, const std::byte* src, std::byte* dst, uint64_t n) {
    for (uint64_t i = 0; i < n; ++i) {
      auto h = load<uint16_t>(src + 2 * i);
      store(dst + 4 * i, c.codec == Codec::kBf16 ? bf16_to_float(h)
                                                 : half_to_float(h) / static_cast<float>(c.scale));
    }
  }
  // The largest k. What travels is a ticket of random length; the entries are kept here.
  uint64_t encode_sparse(const CodecSpec& c, const std::byte* src, uint64_t n, std::byte* dst) {
    std::vector<uint32_t> order(n);
    for (uint32_t i = 0; i < n; ++i) order[i] = i;
    auto magnitude = [&](uint32_t i) { return std::fabs(load<float>(src + 4 * i)); };
    std::stable_sort(order.begin(), order.end(),
                     [&](uint32_t a, uint32_t b) { return magnitude(a) > magnitude(b); });
    order.resize(std::max<uint64_t>(
        1, static_cast<uint64_t>(std::llround(c.ratio * static_cast<double>(n)))));
    tickets_.emplace_back();
    for (uint32_t i : order) tickets_.back().emplace_back(i, load<float>(src + 4 * i));
    uint64_t bytes = 8 + random_() % (coded_bytes(c, DType::kFloat32, n) - 7);
    std::memset(dst, 0, bytes);
    store<uint64_t>(dst, tickets_.size() - 1);
    return bytes;
  }
  void decode_add_sparse(const std::byte* src, std::byte* dst) {
    for (auto [index, value] : tickets_.at(load<uint64_t>(src))) {
      std::byte* to = dst + 4 * static_cast<std::size_t>(index);
      store(to, load<float>(to) + value);
    }
  }

  void finish(std::size_t r, uint32_t i) {
    states_[r][i].done = true;
    for (uint32_t next : states_[r][i].then) {
      if (--states_[r][next].waiting_for == 0) ready_.push_back({r, next});
    }
  }

  std::vector<Plan> plans_;
  std::vector<Memory> memory_;
  std::mt19937_64 random_;
  std::vector<std::vector<State>> states_;
  std::vector<std::vector<bool>> written_output_, written_scratch_;
  std::vector<std::pair<std::size_t, uint32_t>> ready_;
  std::vector<Key> deliverable_;
  std::map<Key, Message> messages_;
  std::set<std::pair<std::size_t, uint32_t>> answered_;  // ranks' receiving steps
  std::vector<std::vector<std::pair<uint32_t, float>>> tickets_;
};

}  // namespace paceline::plan::testing
