#include "engine/plan_cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "engine/describe.h"

namespace paceline::engine {
namespace {

using plan::Buffer;
using plan::Range;
using plan::Step;
using plan::StepKind;

bool same_request(const plan::PlanRequest& a, const plan::PlanRequest& b) {
  return a.collective == b.collective && a.algorithm == b.algorithm && a.dtype == b.dtype &&
         a.op == b.op && a.count == b.count && a.root == b.root && a.in_place == b.in_place &&
         a.codec == b.codec && a.counts == b.counts && a.send_counts == b.send_counts &&
         a.receive_counts == b.receive_counts;
}

Status broken(const plan::Plan& plan, std::size_t step, std::string_view what) {
  return {Code::kInternal, fmt::format("the {} plan of rank {} is broken at step {} ({}): {}",
                                       plan::algorithm_name(plan.algorithm), plan.me, step,
                                       plan::step_kind_name(plan.steps[step].kind), what)};
}

bool sends(StepKind k) { return k == StepKind::kSend; }
bool receives(StepKind k) {
  return k == StepKind::kReceive || k == StepKind::kReceiveReduce ||
         k == StepKind::kReceiveDecode || k == StepKind::kReceiveDecodeReduce;
}

Status check(const plan::Plan& plan, uint64_t input_bytes, uint64_t output_bytes) {
  auto fits = [&](const Range& r) {
    uint64_t limit = r.buffer == Buffer::kInput    ? input_bytes
                     : r.buffer == Buffer::kOutput ? output_bytes
                                                   : plan.scratch_bytes;
    return r.bytes <= limit && r.offset <= limit - r.bytes;
  };
  for (std::size_t i = 0; i < plan.steps.size(); ++i) {
    const Step& s = plan.steps[i];
    for (auto a : s.after) {
      if (a >= i) return broken(plan, i, "it waits for a later step");
    }
    if (!fits(s.src)) return broken(plan, i, "its source lies outside of its buffer");
    if (!fits(s.dst)) return broken(plan, i, "its destination lies outside of its buffer");
    if ((s.kind == StepKind::kCopy || s.kind == StepKind::kReduce) && s.src.bytes != s.dst.bytes)
      return broken(plan, i, "its source and destination differ in length");
    if (s.dst.buffer == Buffer::kInput && s.dst.bytes > 0 && !plan.request.in_place)
      return broken(plan, i, "it writes to the input");
    if (sends(s.kind) || receives(s.kind)) {
      if (s.peer < 0 || s.peer >= plan.request.shape.size || s.peer == plan.me)
        return broken(plan, i, "no such peer");
    }
    if (s.kind == StepKind::kEncode && plan.request.codec.codec == plan::Codec::kTopK &&
        s.src.buffer == Buffer::kScratch)
      return broken(plan, i, "what it encodes has no place in the operation's buffer");
    if (s.bytes_from != plan::kNoStep && s.bytes_from >= i)
      return broken(plan, i, "its length comes from a later step");
    for (const plan::Coded& code : s.codes) {
      if (!fits(code.range)) return broken(plan, i, "an encoding lies outside of its buffer");
      if (code.bytes_from >= i)
        return broken(plan, i, "an encoding's length comes from a later step");
    }
  }
  return Status::ok();
}

}  // namespace

uint64_t PreparedPlan::predicted_link_bytes(const Packets& packets) {
  if (!link_bytes || predicted_with != packets) {
    auto p = plan::predict(plan.request, 1e9, packets, plan.me);
    link_bytes = p ? p->link_bytes : 0;
    predicted_with = packets;
  }
  return *link_bytes;
}

namespace {

std::vector<std::pair<uint64_t, uint64_t>> encoded_elements(const plan::Plan& plan) {
  std::vector<std::pair<uint64_t, uint64_t>> all;
  for (const Step& s : plan.steps) {
    if (s.kind != StepKind::kEncode) continue;
    const uint64_t begin = s.src.offset / sizeof(float);
    all.emplace_back(begin, begin + s.src.bytes / sizeof(float));
  }
  std::sort(all.begin(), all.end());
  std::vector<std::pair<uint64_t, uint64_t>> merged;
  for (const auto& one : all) {
    if (merged.empty() || one.first > merged.back().second)
      merged.push_back(one);
    else
      merged.back().second = std::max(merged.back().second, one.second);
  }
  return merged;
}

std::vector<Rank> sources_on_node(const plan::Plan& plan) {
  const auto& node_of = plan.request.shape.node_of;
  const auto on = [&](Rank r) { return node_of.at(static_cast<std::size_t>(r)); };
  std::vector<Rank> all;
  for (const Step& s : plan.steps)
    if (receives(s.kind) && on(s.peer) == on(plan.me)) all.push_back(s.peer);
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

}  // namespace

Result<std::shared_ptr<PreparedPlan>> prepare(plan::Plan plan, uint64_t input_bytes,
                                              uint64_t output_bytes) {
  PACELINE_RETURN_IF_ERROR(check(plan, input_bytes, output_bytes));
  auto out = std::make_shared<PreparedPlan>();
  auto n = plan.steps.size();
  out->waits.resize(n);
  out->successor_start.assign(n + 1, 0);
  for (std::size_t i = 0; i < n; ++i) {
    const Step& s = plan.steps[i];
    out->waits[i] = static_cast<uint32_t>(s.after.size());
    for (auto a : s.after) ++out->successor_start[a + 1];
    if (s.kind == StepKind::kDecodeSum) out->finite_samples.push_back(s.dst.offset);
    if (sends(s.kind) || receives(s.kind))
      out->slots = std::max<uint64_t>(out->slots, s.slot + 1ULL);
  }
  for (std::size_t i = 0; i < n; ++i) out->successor_start[i + 1] += out->successor_start[i];
  out->successors.resize(out->successor_start[n]);
  auto fill = out->successor_start;
  for (std::size_t i = 0; i < n; ++i) {
    for (auto a : plan.steps[i].after) out->successors[fill[a]++] = static_cast<uint32_t>(i);
  }
  out->neighbours = sources_on_node(plan);
  if (plan.request.codec.codec == plan::Codec::kTopK) out->encoded = encoded_elements(plan);
  out->plan = std::move(plan);
  return out;
}

uint64_t hash_request(const plan::PlanRequest& r) {
  uint64_t h =
      mix(static_cast<uint64_t>(r.collective) << 32 | static_cast<uint64_t>(r.algorithm) << 24 |
              static_cast<uint64_t>(r.dtype) << 16 | static_cast<uint64_t>(r.op) << 8 |
              static_cast<uint64_t>(r.codec.codec) << 1 | static_cast<uint64_t>(r.in_place),
          r.count);
  h = mix(h, static_cast<uint64_t>(r.root));
  if (r.codec.codec != plan::Codec::kNone) {
    h = mix(h, std::bit_cast<uint64_t>(r.codec.ratio));
    h = mix(h, std::bit_cast<uint64_t>(r.codec.scale));
  }
  for (auto c : r.counts) h = mix(h, c);
  for (auto c : r.send_counts) h = mix(h, c);
  for (auto c : r.receive_counts) h = mix(h, c);
  return h;
}

std::shared_ptr<PreparedPlan> PlanCache::find(uint64_t hash, const plan::PlanRequest& probe) {
  auto [first, last] = index_.equal_range(hash);
  for (auto it = first; it != last; ++it) {
    if (!same_request(it->second->plan->plan.request, probe)) continue;
    entries_.splice(entries_.begin(), entries_, it->second);
    return it->second->plan;
  }
  return nullptr;
}

std::shared_ptr<PreparedPlan> PlanCache::insert(uint64_t hash, std::shared_ptr<PreparedPlan> plan) {
  plan->is_kept = true;
  entries_.push_front({hash, std::move(plan)});
  index_.emplace(hash, entries_.begin());
  if (entries_.size() <= capacity_) return nullptr;
  auto victim = std::prev(entries_.end());
  auto [first, last] = index_.equal_range(victim->hash);
  for (auto it = first; it != last; ++it) {
    if (it->second == victim) {
      index_.erase(it);
      break;
    }
  }
  auto gone = std::move(victim->plan);
  entries_.erase(victim);
  gone->is_kept = false;
  return gone;
}

}  // namespace paceline::engine
