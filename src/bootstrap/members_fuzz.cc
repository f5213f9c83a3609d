// Tables, notes and records of other ranks: what is accepted is what would be written, byte for byte.
#include <algorithm>
#include <cstdlib>

#include "bootstrap/members.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace paceline::bootstrap;
  constexpr paceline::Rank kRanks = 64;
  std::span bytes(reinterpret_cast<const std::byte*>(data), size);
  if (auto members = decode_members(bytes, kRanks); members) {
    require(members->size() <= kRanks);
    paceline::Rank before = -1;
    for (const auto& member : *members) {
      require(member.rank > before && member.rank < kRanks && member.host.size() <= kMaxHost);
      before = member.rank;
    }
    require(std::ranges::equal(encode_members(*members), bytes));
  }
  if (auto note = decode_note(bytes); note) {
    require(is_join_note(bytes));
    // Settings may come in any order, and twice: what was understood says the same when it is said again.
    const auto said = encode_note(*note);
    auto again = decode_note(said);
    require(again.is_ok() && again->kind == note->kind && again->settings == note->settings &&
            again->text == note->text && again->bytes == note->bytes);
    require(said.size() <= size && encode_note(*again) == said);
  }
  std::string text(reinterpret_cast<const char*>(data), size);
  if (auto record = decode_record(text); record) require(encode_record(*record) == text);
  return 0;
}
