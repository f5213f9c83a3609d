#include "engine/describe.h"

#include <fmt/format.h>

#include <bit>

namespace paceline::engine {
namespace {

uint64_t mix_text(uint64_t h, std::string_view text) {
  h = mix(h, text.size());
  for (char c : text) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  return h;
}

std::string codec_text(const plan::CodecSpec& c) {
  std::string text = plan::codec_name(c.codec);
  if (c.codec == plan::Codec::kTopK) {
    text += fmt::format(" (ratio {:g}{})", c.ratio, c.fp16_values ? ", fp16 values" : "");
  } else if (c.codec == plan::Codec::kFp16 && c.scale != 1.0) {
    text += fmt::format(" (scale {:g})", c.scale);
  }
  if (c.codec != plan::Codec::kNone && c.inside_node) text += " everywhere";
  return text;
}

std::string length_text(const Description& d) {
  return d.count == Description::kAnyLength ? "any length" : fmt::format("{} bytes", d.count);
}

// Its two sides have names of their own ("send float32 [2, 3] to rank 1", "recv float32 [3, 2] from rank 0").
std::string transfers_differ(const Description& a, const std::string& rank_a, const Description& b,
                             const std::string& rank_b) {
  const bool a_sends = a.pair_send > 0;
  const auto& from = a_sends ? a : b;
  const auto& to = a_sends ? b : a;
  auto sent = from.contents(), expected = to.contents();
  if (sent == expected) {  // shapes that say the same of other lengths
    sent += " in " + length_text(from);
    expected += " in " + length_text(to);
  }
  return fmt::format("{}: {} sends {}, {} expects {}", from.title(), a_sends ? rank_a : rank_b,
                     sent, a_sends ? rank_b : rank_a, expected);
}

}  // namespace

uint64_t mix(uint64_t seed, uint64_t value) {
  // The finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
  // generators, 2014).
  uint64_t z = seed + 0x9e3779b97f4a7c15ULL + value;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

std::string_view Description::kind_name() const {
  if (kind == kTransfer) return "message";
  return plan::collective_name(static_cast<plan::Collective>(kind));
}

std::string Description::title() const {
  if (name.empty()) return std::string(kind_name());
  return fmt::format("{} '{}'", kind_name(), name);
}

std::string Description::contents() const {
  if (kind == kTransfer) {
    if (!shape.empty()) return shape;
    return length_text(*this);
  }
  if (kind == static_cast<uint8_t>(plan::Collective::kBarrier)) return "nothing to carry";
  // Where the caller's own type says more (bool travels as uint8), its text begins with that.
  if (!shape.empty())
    return shape.front() == '[' ? fmt::format("{} {}", dtype_name(dtype), shape) : shape;
  return fmt::format("{} [{}]", dtype_name(dtype), count);
}

uint32_t digest_of(const Description& d) {
  // mix() adds its two arguments up: small numbers go into one of them, each with bits of its own.
  uint64_t h = mix(0, static_cast<uint64_t>(d.kind) << 24 | static_cast<uint64_t>(d.dtype) << 16 |
                          static_cast<uint64_t>(d.op) << 8 | static_cast<uint64_t>(d.algorithm));
  h = mix(h, static_cast<uint64_t>(d.root));
  h = mix(h, d.counts_hash);
  h = mix(h, static_cast<uint64_t>(d.codec.codec) << 2 |
                 static_cast<uint64_t>(d.codec.fp16_values) << 1 |
                 static_cast<uint64_t>(d.codec.inside_node));
  if (d.codec.codec != plan::Codec::kNone) {
    h = mix(h, std::bit_cast<uint64_t>(d.codec.ratio));
    h = mix(h, std::bit_cast<uint64_t>(d.codec.scale));
  }
  if (d.counts_hash == 0) {  // with uneven counts each rank has its own shape
    h = mix(h, d.count);
    h = mix_text(h, d.shape);
  }
  auto folded = static_cast<uint32_t>(h ^ (h >> 32));
  return folded == 0 ? 1 : folded;
}

std::string disagreement(const Description& a, const std::string& rank_a, const Description& b,
                         const std::string& rank_b) {
  if (a.kind == Description::kTransfer && b.kind == Description::kTransfer)
    return transfers_differ(a, rank_a, b, rank_b);
  if (a.kind != b.kind || a.name != b.name) {
    return fmt::format(
        "{} is at {} ({}) where {} is at {} ({}); all ranks of a group must submit the same "
        "operations in the "
        "same order",
        rank_a, a.title(), a.contents(), rank_b, b.title(), b.contents());
  }
  auto words = [&](const Description& d) {
    auto text = d.contents();
    if (!d.shape.empty() && a.shape == b.shape && a.count != b.count)
      text += fmt::format(" ({} elements)", d.count);
    if (a.dtype != b.dtype && a.contents() == b.contents())
      text += fmt::format(" as {}", dtype_name(d.dtype));
    if (a.op != b.op) text += fmt::format(", {}", reduce_op_name(d.op));
    if (a.root != b.root) text += fmt::format(", root {}", d.root);
    if (!(a.codec == b.codec)) text += fmt::format(", codec {}", codec_text(d.codec));
    if (a.algorithm != b.algorithm)
      text += fmt::format(", algorithm {}", plan::algorithm_name(d.algorithm));
    if (a.counts_hash != b.counts_hash && a.contents() == b.contents())
      text += fmt::format(", other counts per rank (hash {:x})", d.counts_hash);
    return text;
  };
  return fmt::format("{}: {} has {}, {} has {}", a.title(), rank_a, words(a), rank_b, words(b));
}

void write_description(ByteWriter& out, const Description& d) {
  out.put(d.kind);
  out.put(static_cast<uint8_t>(d.dtype));
  out.put(static_cast<uint8_t>(d.op));
  out.put(static_cast<uint8_t>(d.algorithm));
  out.put(static_cast<uint8_t>(d.codec.codec));
  out.put(static_cast<uint8_t>(d.codec.fp16_values));
  out.put(static_cast<uint8_t>(d.codec.inside_node));
  out.put(d.codec.ratio);
  out.put(d.codec.scale);
  out.put(d.root);
  out.put(d.count);
  out.put(d.counts_hash);
  out.put(d.pair_send);
  out.put(d.pair_receive);
  out.put_string(shortened(d.name, Description::kTextLimit));
  out.put_string(shortened(d.shape, Description::kTextLimit));
}

Description read_description(ByteReader& in) {
  Description d;
  d.kind = in.get<uint8_t>();
  d.dtype = static_cast<DType>(in.get<uint8_t>());
  d.op = static_cast<ReduceOp>(in.get<uint8_t>());
  d.algorithm = static_cast<plan::Algorithm>(in.get<uint8_t>());
  d.codec.codec = static_cast<plan::Codec>(in.get<uint8_t>());
  d.codec.fp16_values = in.get<uint8_t>() != 0;
  d.codec.inside_node = in.get<uint8_t>() != 0;
  d.codec.ratio = in.get<double>();
  d.codec.scale = in.get<double>();
  d.root = in.get<Rank>();
  d.count = in.get<uint64_t>();
  d.counts_hash = in.get<uint64_t>();
  d.pair_send = in.get<uint64_t>();
  d.pair_receive = in.get<uint64_t>();
  d.name = in.get_string(Description::kTextLimit);
  d.shape = in.get_string(Description::kTextLimit);
  return d;
}

}  // namespace paceline::engine
