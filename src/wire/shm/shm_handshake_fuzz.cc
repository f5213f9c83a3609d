// The packets of the handshake come from whoever can connect: any bytes must be refused or
// understood exactly.
#include <cstdlib>

#include "wire/shm/handshake.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace paceline::wire::shm;
  auto message = decode(std::as_bytes(std::span(data, size)));
  if (!message.is_ok()) return 0;
  // What was understood says the same when it is said again.
  auto again = decode(encode(*message));
  if (!again.is_ok() || again->index() != message->index()) std::abort();
  if (encode(*again) != encode(*message)) std::abort();
  return 0;
}
