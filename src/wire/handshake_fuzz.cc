// Bytes of a stranger into both ends of the handshake, in pieces of any size: no crash, no acceptance without the
// secret.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "wire/handshake.h"

using paceline::wire::Handshake;
using paceline::wire::Identity;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Identity self = [] {
    Identity i;
    i.secret.assign(16, std::byte{0x5C});
    i.job_id = "job";
    i.build = "0.1.0";
    i.piece_bytes = 262144;
    i.rank = 0;
    i.incarnation = 1;
    i.name = "rank 0 (host a)";
    return i;
  }();
  if (size < 2) return 0;
  bool is_connector = (data[0] & 1) != 0;
  std::size_t step = 1 + data[1];
  auto bytes = std::as_bytes(std::span(data + 2, size - 2));
  std::vector<std::byte> out;
  Handshake h = is_connector ? Handshake::connector(self, 1, 0, "rank 1", {}, out)
                             : Handshake::acceptor(self);
  while (!bytes.empty() && h.state() == Handshake::State::kRunning) {
    auto n = std::min(step, bytes.size());
    auto used = h.feed(bytes.first(n), out);
    if (used > n) std::abort();
    if (used < n && h.state() == Handshake::State::kRunning) std::abort();
    bytes = bytes.subspan(n);
  }
  if (h.state() == Handshake::State::kProven || h.state() == Handshake::State::kDone) std::abort();
  return 0;
}
