#include "base/hmac.h"

#include <sodium.h>

#include <cstdint>
#include <cstdlib>

namespace paceline {
namespace {

const unsigned char* raw(std::span<const std::byte> s) {
  // Empty spans may hold a null pointer, which libsodium's functions must not be given.
  static constexpr unsigned char kNothing = 0;
  return s.empty() ? &kNothing : reinterpret_cast<const unsigned char*>(s.data());
}

void ensure_ready() {
  static const bool ready = sodium_init() >= 0;
  if (!ready) std::abort();  // no source of random bytes: nothing can be authenticated
}

}  // namespace

Mac hmac_sha256(std::span<const std::byte> key,
                std::initializer_list<std::span<const std::byte>> parts) {
  ensure_ready();
  crypto_auth_hmacsha256_state state;
  crypto_auth_hmacsha256_init(&state, raw(key), key.size());
  for (auto part : parts) {
    uint64_t length = part.size();
    crypto_auth_hmacsha256_update(&state, reinterpret_cast<const unsigned char*>(&length),
                                  sizeof length);
    crypto_auth_hmacsha256_update(&state, raw(part), part.size());
  }
  Mac mac;
  crypto_auth_hmacsha256_final(&state, reinterpret_cast<unsigned char*>(mac.data()));
  return mac;
}

Mac hmac_sha256_plain(std::span<const std::byte> key, std::span<const std::byte> message) {
  ensure_ready();
  crypto_auth_hmacsha256_state state;
  crypto_auth_hmacsha256_init(&state, raw(key), key.size());
  crypto_auth_hmacsha256_update(&state, raw(message), message.size());
  Mac mac;
  crypto_auth_hmacsha256_final(&state, reinterpret_cast<unsigned char*>(mac.data()));
  return mac;
}

bool equal_secret(std::span<const std::byte> a, std::span<const std::byte> b) {
  return a.size() == b.size() && (a.empty() || sodium_memcmp(a.data(), b.data(), a.size()) == 0);
}

void random_bytes(std::span<std::byte> out) {
  ensure_ready();
  randombytes_buf(out.data(), out.size());
}

}  // namespace paceline
