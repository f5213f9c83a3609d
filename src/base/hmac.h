// HMAC-SHA256 (RFC 2104, FIPS 180-4), random bytes and constant-time comparison, by libsodium.
// Nothing else includes that library.
#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <span>

namespace paceline {

inline constexpr std::size_t kMacBytes = 32;
using Mac = std::array<std::byte, kMacBytes>;

/// The code over all `parts`, one after the other, each preceded by its length as 8 bytes (little
/// endian), so that no two different lists of parts have the same input. The key may have any
/// length.
Mac hmac_sha256(std::span<const std::byte> key,
                std::initializer_list<std::span<const std::byte>> parts);
/// The plain function of RFC 4231 over one message.
Mac hmac_sha256_plain(std::span<const std::byte> key, std::span<const std::byte> message);
/// In a time that tells nothing about where they differ.
bool equal_secret(std::span<const std::byte> a, std::span<const std::byte> b);
/// From the system's generator.
void random_bytes(std::span<std::byte> out);

}  // namespace paceline
