// The binary interface of libpmix.so.2 (PMIx standard 3.1 to 5), as far as it is used.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paceline::drivers::pmix {

struct Proc {
  char nspace[256];
  uint32_t rank;
};
struct Value {
  uint16_t type;
  union {
    char* string;
    struct {
      void* a;
      void* b;
      char c;
    } largest;  // pmix_envar_t
  } data;
};
struct Info {
  char key[512];
  uint32_t flags;
  Value value;
};
struct PublishedData {  // pmix_pdata_t
  Proc publisher;
  char key[512];
  Value value;
};
static_assert(sizeof(Info) == 552 && sizeof(PublishedData) == 808);
static_assert(sizeof(Proc) == 260 && sizeof(Value) == 32 && offsetof(Value, data) == 8);
inline constexpr uint16_t kString = 3;
inline constexpr uint8_t kGlobal = 3;
inline constexpr int kNotFound = -46;

}  // namespace paceline::drivers::pmix
