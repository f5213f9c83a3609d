// Notes of other ranks' engines: what is accepted says the same when it is said again, and can be put into words.
#include <cstdlib>

#include "base/testing/fuzz_input.h"
#include "engine/control.h"

namespace {

using paceline::testing::require;

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  using namespace paceline::engine;
  const std::span bytes(reinterpret_cast<const std::byte*>(data), size);
  const auto note = decode_note(bytes);
  if (!note) return 0;
  // A flag may be any number but 0: it comes back as 1.
  const auto said = encode_note(*note);
  require(said.size() == size);
  const auto again = decode_note(said);
  require(again.has_value() && encode_note(*again) == said);
  require(digest_of(again->description) == digest_of(note->description));
  const Description other;
  require(!note->description.title().empty() && !note->description.contents().empty());
  require(!disagreement(note->description, "a", other, "b").empty());
  return 0;
}
