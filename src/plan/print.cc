#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>

#include "plan/plan.h"
#include "plan/shape.h"

namespace paceline::plan {

const char* collective_name(Collective c) {
  constexpr const char* kNames[] = {"all-reduce",     "broadcast",  "all-gather",
                                    "reduce-scatter", "all-to-all", "barrier",
                                    "reduce",         "gather",     "scatter"};
  auto i = static_cast<std::size_t>(c);
  return i < std::size(kNames) ? kNames[i] : "unknown";
}

const char* algorithm_name(Algorithm a) {
  constexpr const char* kNames[] = {"auto",   "ring",      "doubling", "tree",
                                    "direct", "two-level", "sparse"};
  auto i = static_cast<std::size_t>(a);
  return i < std::size(kNames) ? kNames[i] : "unknown";
}

const char* codec_name(Codec c) {
  constexpr const char* kNames[] = {"none", "fp16", "bf16", "top-k"};
  auto i = static_cast<std::size_t>(c);
  return i < std::size(kNames) ? kNames[i] : "unknown";
}

const char* step_kind_name(StepKind k) {
  constexpr const char* kNames[] = {"copy",
                                    "reduce",
                                    "scale",
                                    "encode",
                                    "decode",
                                    "decode-reduce",
                                    "zero",
                                    "send",
                                    "receive",
                                    "receive-reduce",
                                    "receive-decode-reduce",
                                    "receive-decode",
                                    "nothing",
                                    "decode-sum"};
  auto i = static_cast<std::size_t>(k);
  return i < std::size(kNames) ? kNames[i] : "unknown";
}

std::string size_text(uint64_t bytes) {
  const auto number = static_cast<double>(bytes);
  if (bytes >= 1 << 30) return fmt::format("{:.4g} GiB", number / (1 << 30));
  if (bytes >= 1 << 20) return fmt::format("{:.4g} MiB", number / (1 << 20));
  if (bytes >= 1 << 10) return fmt::format("{:.4g} KiB", number / (1 << 10));
  return fmt::format("{} B", bytes);
}

namespace {

std::string range_text(const Range& r) {
  constexpr const char* kNames[] = {"in", "out", "scratch"};
  return fmt::format("{}[{}+{}]", kNames[static_cast<std::size_t>(r.buffer)], r.offset, r.bytes);
}

std::string step_text(const Step& s) {
  std::string text = step_kind_name(s.kind);
  if (s.peer >= 0)
    text += fmt::format(" {} {}#{}", s.kind == StepKind::kSend ? "to" : "from", s.peer, s.slot);
  if (s.lane != 0) text += fmt::format(" lane {}", s.lane);
  if (s.src.bytes != 0) text += " " + range_text(s.src);
  if (s.dst.bytes != 0) text += " -> " + range_text(s.dst);
  if (s.divisor != 1.0) text += fmt::format(" / {}", s.divisor);
  if (s.bytes_from != kNoStep) text += fmt::format(" length of {}", s.bytes_from);
  for (const Coded& code : s.codes)
    text += fmt::format(" {}+{} by {}", code.range.offset, code.range.bytes, code.bytes_from);
  if (s.may_be_held) text += " or holding";
  if (!s.addends.empty()) text += fmt::format(" with {}", fmt::join(s.addends, ","));
  if (s.short_message) text += " or less";
  if (s.brings_sum) text += " the sum";
  if (s.answer.bytes != 0) text += " answered at " + range_text(s.answer);
  if (s.answers) text += " answering";
  if (s.answer_of != kNoStep) text += fmt::format(" unless {} answered", s.answer_of);
  if (!s.after.empty()) text += fmt::format(" after {}", fmt::join(s.after, ","));
  return text;
}

// "2×4", or "3 nodes of 1 to 4".
std::string layout_text(const std::vector<std::vector<Rank>>& groups) {
  std::size_t least = SIZE_MAX;
  std::size_t most = 0;
  for (const auto& g : groups) {
    least = std::min(least, g.size());
    most = std::max(most, g.size());
  }
  if (least == most) return fmt::format("{}×{}", groups.size(), most);
  return fmt::format("{} groups of {} to {}", groups.size(), least, most);
}

}  // namespace

uint64_t Plan::bytes_sent() const {
  uint64_t sum = 0;
  for (const Step& s : steps) {
    if (s.kind == StepKind::kSend) sum += s.src.bytes;
  }
  return sum;
}

uint64_t Plan::inter_node_bytes_sent() const {
  const auto& node_of = request.shape.node_of;
  uint64_t sum = 0;
  for (const Step& s : steps) {
    if (s.kind != StepKind::kSend) continue;
    if (node_of[static_cast<std::size_t>(s.peer)] != node_of[static_cast<std::size_t>(me)])
      sum += s.src.bytes;
  }
  return sum;
}

std::string Plan::to_string(std::size_t most) const {
  std::string text = fmt::format("rank {} of {}: {}\n", me, request.shape.size, summary());
  const std::size_t shown = std::min(most, steps.size());
  for (std::size_t i = 0; i < shown; ++i) {
    fmt::format_to(std::back_inserter(text), "{:>4} {}\n", i, step_text(steps[i]));
  }
  if (shown < steps.size())
    fmt::format_to(std::back_inserter(text), "     and {} steps more\n", steps.size() - shown);
  return text;
}

std::string Plan::kinds() const {
  std::map<StepKind, std::size_t> counts;
  for (const Step& s : steps) ++counts[s.kind];
  std::string text;
  for (const auto& [kind, count] : counts)
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", count, step_kind_name(kind));
  return text;
}

std::string Plan::summary() const {
  if (request.shape.size == 1)
    return fmt::format("{}, one rank", collective_name(request.collective));
  bool levels = algorithm == Algorithm::kTwoLevel || algorithm == Algorithm::kSparse;
  auto layout = levels ? inner_groups(request) : request.shape.nodes();
  std::string text = fmt::format("{} {} {}", algorithm_name(algorithm),
                                 collective_name(request.collective), layout_text(layout));
  const CodecSpec& codec = request.codec;
  bool coded = codec.codec != Codec::kNone && algorithm != Algorithm::kDoubling &&
               algorithm != Algorithm::kTree;
  if (!coded || layout.size() == 1) return text;
  text += fmt::format(", {}", codec_name(codec.codec));
  if (codec.codec == Codec::kTopK) {
    text += fmt::format(" {:g} %{}", codec.ratio * 100, codec.fp16_values ? " in fp16" : "");
  }
  return text + (codec.inside_node ? " between all ranks"
                 : levels          ? " between groups"
                                   : " between nodes");
}

}  // namespace paceline::plan
