// Tables, notes and records of other ranks: what is accepted is what would be written, byte for byte.
#include <algorithm>
#include <cstdlib>

#include "base/testing/fuzz_input.h"
#include "bootstrap/members.h"
#include "wire/address.h"
#include "wire/tcp/socket.h"

namespace {

using paceline::testing::require;

/// What is taken from an address that another rank gave.
void look_up(const std::string& address) {
  using namespace paceline::wire;
  for (const char* key : {"tcp", "machine", "shm", "ns"}) {
    const auto field = address_field(address, key);
    if (!field) continue;
    require(field->find(';') == std::string::npos);
    // Another way to the rank beside it hides nothing.
    require(address_field(join_addresses("way=0", address), key) == field);
  }
  const auto at = parse_endpoint(address_field(address, "tcp").value_or(address));
  if (!at) return;
  const auto again = parse_endpoint(at->text());
  require(again.is_ok() && again->text() == at->text() && again->port() == at->port());
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
      look_up(member.address);
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
    look_up(note->address);
  }
  std::string text(reinterpret_cast<const char*>(data), size);
  if (auto record = decode_record(text); record) {
    require(encode_record(*record) == text);
    look_up(record->address);
  }
  look_up(text);
  return 0;
}
