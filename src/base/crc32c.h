// CRC-32C (Castagnoli): polynomial 0x1EDC6F41, reflected, initial value and final xor 0xFFFFFFFF,
// as in RFC 3720 (iSCSI), appendix B.4. Guards frame headers, and payloads on links that may
// corrupt.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace paceline {

/// CRC-32C of `data`; `crc` is the result over the bytes before it (0: none). One instruction per 8
/// bytes where the CPU has it, else a table: the same value everywhere.
uint32_t crc32c(std::span<const std::byte> data, uint32_t crc = 0);

/// The table-driven form alone, so that a test can compare both.
uint32_t crc32c_portable(std::span<const std::byte> data, uint32_t crc = 0);

}  // namespace paceline
