// The bytes of an established connection, before a frame's CRC is known: whatever comes, cut wherever the network cuts
// it, ends with a value or a named error, and the same bytes cut otherwise end the same way. Read over a socket pair, by
// the functions that read TCP's sockets.
//
// Input: one byte of options, eight of cuts, then what the stream is made of: raw bytes, and frames with a true CRC
// (no mutation would find one) whose fields are the expected ones or any others, with a payload that may end early.
#include <sys/socket.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/crc32c.h"
#include "base/testing/fuzz_input.h"
#include "wire/tcp/connection.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#include <sanitizer/asan_interface.h>
#endif
#endif
#ifndef ASAN_POISON_MEMORY_REGION
#define ASAN_POISON_MEMORY_REGION(at, bytes) ((void)(at), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(at, bytes) ((void)(at), (void)(bytes))
#endif

namespace {

using namespace paceline;        // NOLINT: a fuzzer has no headers to leak into
using namespace paceline::wire;  // NOLINT
using paceline::testing::FuzzInput;
using paceline::testing::require;

constexpr uint64_t kLargish = 0xFFFFF;
constexpr uint32_t kPiece = 256;
constexpr uint32_t kEagerLimit = 128;
constexpr std::size_t kLongestStream = 192 * 1024;
constexpr std::size_t kMostInput =
    256 * 1024;  // of a connection's buffer, however long frames say they are
/// Of the posted receives; those beyond kEagerLimit are announced, and numbered by their place here.
constexpr uint64_t kCapacities[] = {1000, 4096, 64, 129, 3000};
constexpr uint64_t kSinkAt = 1;

/// Every byte comes once, and none from beyond the capacity.
struct OnceSink : Sink {
  void consume(uint64_t offset, std::span<const std::byte> data) override {
    require(offset % kPieceAlign == 0 && offset <= bytes.size() &&
            data.size() <= bytes.size() - offset);
    for (std::size_t i = 0; i < data.size(); ++i) {
      require(!seen[offset + i]);
      seen[offset + i] = true;
      bytes[offset + i] = data[i];
    }
  }
  std::vector<bool> seen = std::vector<bool>(kCapacities[kSinkAt]);
  std::vector<std::byte> bytes = std::vector<std::byte>(kCapacities[kSinkAt]);
};

Frame piece_of(FuzzInput& in) {
  Frame f;
  f.type = FrameType::kPiece;
  const uint64_t slot = in.byte() % std::size(kCapacities);
  f.tag = slot;
  f.message = slot + 1;
  f.total = kCapacities[slot] - (in.byte() % 4) * 8;
  f.position = in.byte() % (f.total / kPiece + 1) * kPiece;
  f.length = static_cast<uint32_t>(std::min<uint64_t>(kPiece, f.total - f.position));
  return f;
}

Frame control_of(FuzzInput& in, uint64_t sequence) {
  Frame f;
  f.type = static_cast<FrameType>(in.byte() % 24);
  f.position = sequence;
  f.tag = in.byte() % 16;
  f.length = static_cast<uint32_t>(in.number(kLargish));
  f.total = f.type == FrameType::kEager ? f.length : in.number(kLargish);
  f.message = in.byte() % 8;
  f.acknowledged = in.byte() % 4;
  f.freed = in.byte();
  return f;
}

std::vector<std::byte> stream_of(FuzzInput& in, bool is_data) {
  std::vector<std::byte> stream;
  uint64_t sequence = 0;
  while (!in.rest.empty() && stream.size() < kLongestStream) {
    const uint8_t what = in.byte();
    if (what % 8 == 0) {
      const std::size_t n = std::min<std::size_t>(what / 8 + 1U, in.rest.size());
      const auto raw = std::as_bytes(in.rest.first(n));
      stream.insert(stream.end(), raw.begin(), raw.end());
      in.rest = in.rest.subspan(n);
      continue;
    }
    Frame f = is_data == (what % 8 != 1) ? piece_of(in) : control_of(in, sequence + 1);
    if (is_sequenced(f.type)) ++sequence;
    f.digest = what / 8 % 2;
    switch (what / 16) {  // one field is another than the one that is due
      case 1:
        f.position = in.number(kLargish) * 64;
        break;
      case 2:
        f.length = static_cast<uint32_t>(in.number(kLargish));
        break;
      case 3:
        f.total = in.number(kLargish);
        break;
      case 4:
        f.message = in.number(kLargish) | in.number(kLargish) << 32;
        break;
      case 5:
        f.tag = in.number(kLargish);
        break;
      default:
        break;
    }
    std::vector<std::byte> payload(std::min<uint64_t>(f.length, 2 * kMaxEager));
    for (std::size_t i = 0; i < payload.size(); ++i)
      payload[i] = static_cast<std::byte>(i * 7 + what + stream.size());
    f.has_sum = what / 16 > 11;
    f.sum = what / 16 == 15 ? in.byte() : crc32c(payload);
    if (what / 16 == 6) payload.resize(std::min<std::size_t>(payload.size(), in.byte()));
    std::byte header[kFrameHeader];
    encode_frame(f, header);
    if (what / 16 == 7) header[in.byte() % kFrameHeader] ^= std::byte{1};
    stream.insert(stream.end(), header, header + kFrameHeader);
    stream.insert(stream.end(), payload.begin(), payload.end());
  }
  stream.resize(std::min(stream.size(), kLongestStream));
  return stream;
}

/// All that a peer's bytes bring about.
struct Outcome {
  IoEnd how = IoEnd::kBlocked;
  std::string why;
  std::vector<std::string> events;
  std::vector<std::vector<std::byte>> memory;
  std::vector<std::byte> answers;
  bool operator==(const Outcome&) const = default;
};

std::string text(const Status& status) {
  require(status.is_ok() || !status.message().empty());
  return std::to_string(static_cast<int>(status.code())) + status.message();
}

IoResult read_some(Connection& c, Session& session, Shared& shared, bool is_data) {
  if (is_data) return read_pieces(c, session, shared);
  IoResult r = fill_input(c, shared.counters);
  if (r.end == IoEnd::kBroken) return r;
  // What the last bytes left behind in the buffer is not this stream's to read.
  ASAN_POISON_MEMORY_REGION(c.in.data() + c.in_end, c.in.size() - c.in_end);
  IoResult parsed = parse_control(c, session);
  ASAN_UNPOISON_MEMORY_REGION(c.in.data(), c.in.size());
  require(c.in_begin <= c.in_end && c.in_end <= c.in.size());
  return parsed.end == IoEnd::kViolation ? parsed : r;
}

Outcome play(std::span<const std::byte> stream, std::span<const uint8_t> cuts, bool is_data) {
  Shared shared;
  shared.options.piece_bytes = kPiece;
  shared.options.eager_limit = kEagerLimit;
  shared.options.eager_budget = 2 * kMaxEager;
  Session session(shared, 1, "rank 1 (host b)");
  Outcome outcome;
  OnceSink sink;
  uint64_t cookie = 0;
  for (std::size_t i = 0; i < std::size(kCapacities); ++i) {
    outcome.memory.emplace_back(
        i == kSinkAt ? 0 : kCapacities[i]);  // each by itself: an overrun is seen
    Inbox inbox{outcome.memory[i].data(), nullptr, kCapacities[i]};
    if (i == kSinkAt) inbox = {nullptr, &sink, kCapacities[i]};
    session.receive(i, i % 2, inbox, ++cookie);
  }
  const std::vector<std::byte> mine(2000, std::byte{0x5A});
  session.send(8, 0, std::span(mine).first(100), ++cookie);
  session.send(9, 0, mine, ++cookie);
  std::vector<std::byte> before;
  while (session.pull_control(before)) {
  }

  int sockets[2];
  require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, sockets) == 0);
  Descriptor far(sockets[1]);
  Connection c;
  c.fd = Descriptor(sockets[0]);
  IoResult r;
  for (std::size_t at = 0, turn = 0; r.end != IoEnd::kViolation; ++turn) {
    const std::size_t cut = cuts[turn % cuts.size()];
    const std::size_t n = std::min(cut < 192 ? 1 + cut : (cut - 191) * 1021, stream.size() - at);
    if (n == 0) far = Descriptor();
    require(n == 0 || ::send(far.get(), stream.data() + at, n, 0) == static_cast<ssize_t>(n));
    at += n;
    do {
      r = read_some(c, session, shared, is_data);
    } while (r.end == IoEnd::kBudget);
    require(c.in.size() <= kMostInput && c.scratch.size() <= kMaxPiece);
    require(c.has_frame || c.scratch.capacity() == 0);
    if (n == 0) break;
    require(r.end == IoEnd::kViolation || r.end == IoEnd::kBlocked);
  }
  require(r.end == IoEnd::kViolation ? !r.violation.is_ok()
                                     : r.end == IoEnd::kBroken && r.error == 0);
  outcome.how = r.end;
  outcome.why = text(r.violation);
  std::size_t noted = 0;
  for (const Note& note : shared.events.notes) {
    noted += note.bytes.size();
    outcome.events.emplace_back(reinterpret_cast<const char*>(note.bytes.data()),
                                note.bytes.size());
  }
  require(noted <= stream.size());
  std::vector<bool> ended(cookie + 1);
  for (const Completion& done : shared.events.completions) {
    require(!ended.at(done.cookie));
    ended[done.cookie] = true;
    outcome.events.push_back(std::to_string(done.cookie) + " " + std::to_string(done.bytes) + " " +
                             text(done.status));
  }
  while (session.pull_control(outcome.answers)) {
  }
  outcome.memory.push_back(sink.bytes);
  return outcome;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  constexpr std::size_t kCuts = 8;
  if (size < 1 + kCuts) return 0;
  const bool is_data = data[0] % 2 == 1;
  FuzzInput in{{data + 1 + kCuts, size - 1 - kCuts}};
  const std::vector<std::byte> stream = stream_of(in, is_data);
  const uint8_t whole[] = {255};
  require(play(stream, {data + 1, kCuts}, is_data) == play(stream, whole, is_data));
  return 0;
}
