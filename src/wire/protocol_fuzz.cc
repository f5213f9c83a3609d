// An authenticated but malicious peer: any frames in any order into a session that has sends and receives posted. No
// crash, no byte outside of a posted buffer, no request completed twice.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "base/testing/fuzz_input.h"
#include "wire/protocol.h"

using namespace paceline;        // NOLINT: a fuzzer has no headers to leak into
using namespace paceline::wire;  // NOLINT
using paceline::testing::FuzzInput;

namespace {

struct CountingSink : Sink {
  void consume(uint64_t offset, std::span<const std::byte> data) override {
    if (offset + data.size() > 4096) std::abort();
    std::byte sum{};
    for (auto b : data) sum ^= b;
    total ^= sum;
  }
  std::byte total{};
};

Frame frame_of(FuzzInput& in) {
  Frame f;
  f.type = static_cast<FrameType>(in.byte() % 24);
  f.length = static_cast<uint32_t>(in.number(0xFFFF));
  f.digest = in.byte() % 4;
  f.tag = in.number(0xFFFF);
  uint64_t message = in.byte();
  f.message = message < 128 ? message : (message - 128) << 32 | (1 + in.byte() % 4);
  f.total = in.number(0xFFFF) * (in.byte() % 2 == 0 ? 1 : 64);
  f.position = in.number(0xFFFF) * (in.byte() % 2 == 0 ? 1 : 64);
  f.acknowledged = in.number(0xFFFF);
  f.freed = static_cast<uint32_t>(in.number(0xFFFF));
  f.has_sum = in.byte() % 16 == 0;
  return f;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzInput in{{data, size}};
  Shared shared;
  shared.options.piece_bytes = 256;
  shared.options.eager_limit = 128;
  shared.options.eager_budget = 1024;
  shared.options.lossy = in.byte() % 2 == 1;
  auto session = std::make_unique<Session>(shared, 1, "rank 1 (host b)");
  CountingSink sink;
  std::vector<std::unique_ptr<std::byte[]>> buffers;  // each its own allocation: an overrun is seen
  uint64_t cookie = 0;
  std::vector<std::byte> out;
  std::vector<std::byte> scratch(4096);
  while (!in.rest.empty()) {
    switch (in.byte() % 8) {
      case 0: {
        std::size_t n = in.byte() * 8U;
        buffers.push_back(std::make_unique<std::byte[]>(n + 1));
        session->send(in.byte(), in.byte() % 4, {buffers.back().get(), n}, ++cookie);
        break;
      }
      case 1: {
        std::size_t n = in.byte() * 8U;
        buffers.push_back(std::make_unique<std::byte[]>(n));
        session->receive(in.byte(), in.byte() % 4, {buffers.back().get(), nullptr, n}, ++cookie);
        break;
      }
      case 2:
        session->receive(in.byte(), in.byte() % 4, {nullptr, &sink, 4096}, ++cookie);
        break;
      case 3: {
        out.clear();
        while (session->pull_control(out)) {
        }
        Piece piece;
        for (int i = 0; i < 4 && session->pull_piece(in.byte() % 2, piece); ++i)
          session->piece_written(piece);
        break;
      }
      case 4:
        if (in.byte() % 2 == 0) session->flow_broken(in.byte() % 2);
        session->rewind_control();
        break;
      case 5:
        shared.now += in.byte() * kMillisecond;
        if (!session->on_timer().is_ok()) session->lose({Code::kPeerLost, "silent"}, true);
        break;
      default: {
        Frame made = frame_of(in);
        std::byte header[kFrameHeader];
        encode_frame(made, header);
        auto frame = decode_frame(header);
        if (!frame.is_ok()) break;
        if (frame->type == FrameType::kPiece) {
          if (frame->length > scratch.size()) break;
          Placement to = session->place(*frame);
          if (to.kind == Placement::Kind::kBuffer) std::memset(to.at, 0x42, frame->length);
          if (to.kind != Placement::Kind::kViolation)
            (void)session->placed(*frame, {scratch.data(), frame->length});
        } else {
          std::vector<std::byte> payload(frame->length, std::byte{0x41});
          if (payload.size() > in.rest.size() + 200) payload.resize(in.rest.size() + 200);
          (void)session->take_control(*frame, payload);
        }
      }
    }
  }
  session->lose({Code::kPeerLost, "the end"}, true);
  std::set<uint64_t> seen;
  for (const auto& c : shared.events.completions) {
    if (!seen.insert(c.cookie).second) std::abort();
  }
  if (seen.size() != cookie) std::abort();
  return 0;
}
