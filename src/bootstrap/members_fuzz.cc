// Tables, notes and records of other ranks.
#include <cstdlib>

#include "bootstrap/members.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace paceline::bootstrap;
  std::span bytes(reinterpret_cast<const std::byte*>(data), size);
  if (auto members = decode_members(bytes, 64); members) {
    auto again = encode_members(*members);
    if (again.size() != size) std::abort();
  }
  if (auto note = decode_note(bytes); note) {
    if (!is_join_note(encode_note(*note))) std::abort();
  }
  if (auto record = decode_record({reinterpret_cast<const char*>(data), size}); record) {
    if (encode_record(*record).size() != size) std::abort();
  }
  return 0;
}
