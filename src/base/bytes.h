// Reading and writing fixed-size little-endian fields with every bound checked: all bytes that come
// from a wire, a file or another process pass through here.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace paceline {

static_assert(std::endian::native == std::endian::little, "big-endian machines are not supported");

/// The beginning of `text`, at most `limit` bytes; a UTF-8 character is left out rather than cut.
inline std::string_view shortened(std::string_view text, std::size_t limit) {
  if (text.size() <= limit) return text;
  while (limit > 0 && (static_cast<unsigned char>(text[limit]) & 0xC0U) == 0x80U) --limit;
  return text.substr(0, limit);
}

/// Appends fields to a growing buffer.
class ByteWriter {
 public:
  template <class T>
  requires std::is_arithmetic_v<T>
  void put(T value) {
    auto at = bytes_.size();
    bytes_.resize(at + sizeof(T));
    std::memcpy(bytes_.data() + at, &value, sizeof(T));
  }
  /// A 32-bit length, then the text.
  void put_string(std::string_view text) {
    put(static_cast<uint32_t>(text.size()));
    put_bytes(std::as_bytes(std::span(text.data(), text.size())));
  }
  void put_bytes(std::span<const std::byte> data) {
    bytes_.insert(bytes_.end(), data.begin(), data.end());
  }
  [[nodiscard]] const std::vector<std::byte>& bytes() const { return bytes_; }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

/// Takes fields from a buffer. After the first failure every read fails and returns zero: check
/// ok() once.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <class T>
  requires std::is_arithmetic_v<T> T get() {
    T value{};
    if (!take(sizeof(T))) return value;
    std::memcpy(&value, bytes_.data() + at_ - sizeof(T), sizeof(T));
    return value;
  }
  std::string get_string(std::size_t limit) {
    auto length = get<uint32_t>();
    if (length > limit) ok_ = false;
    if (!ok_ || !take(length)) return {};
    return {reinterpret_cast<const char*>(bytes_.data()) + at_ - length, length};
  }
  std::span<const std::byte> get_bytes(std::size_t length) {
    if (!take(length)) return {};
    return bytes_.subspan(at_ - length, length);
  }
  [[nodiscard]] bool ok() const { return ok_; }
  [[nodiscard]] std::size_t remaining() const { return ok_ ? bytes_.size() - at_ : 0; }

 private:
  bool take(std::size_t length) {
    if (!ok_ || bytes_.size() - at_ < length) {
      ok_ = false;
      return false;
    }
    at_ += length;
    return true;
  }
  std::span<const std::byte> bytes_;
  std::size_t at_ = 0;
  bool ok_ = true;
};

}  // namespace paceline
