// Every kernel against an element-by-element reference in double (or in wrapping integers), on
// every SIMD target of this processor, compared by bits.
#include "device/cpu/kernels.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "device/cpu/casts.h"
#include "device/cpu/each_target.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace paceline::cpu {
namespace {

constexpr DType kFloats[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};
constexpr DType kIntegers[] = {DType::kInt8,  DType::kInt16, DType::kInt32,
                               DType::kInt64, DType::kUInt8, DType::kBool};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax,
                             ReduceOp::kProduct};
/// Around every vector length and its multiples.
constexpr std::size_t kSizes[] = {0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 1000};

using Bytes = std::vector<std::byte>;

/// Random bit patterns (so: NaN, infinities, denormals, both zeros too), with operands that are
/// near each other often, starting at an address that has the element's alignment only.
struct Operands {
  Operands(DType dtype, std::size_t elements, std::mt19937_64& random)
      : size(dtype_size(dtype)), a(elements * size + size), b(elements * size + size) {
    for (auto& x : a) x = static_cast<std::byte>(random());
    for (auto& x : b) x = static_cast<std::byte>(random());
    for (std::size_t i = 0; i < elements; ++i) {
      const auto kind = random() % 8;
      std::byte* x = left() + i * size;
      std::byte* y = right() + i * size;
      if (kind == 0) std::memcpy(y, x, size);  // equal
      if (kind == 1) std::memset(x, 0, size);  // zero …
      if (kind == 1 && dtype_is_float(dtype)) x[size - 1] = static_cast<std::byte>(random() & 0x80);
      if (kind == 2 && dtype_is_float(dtype)) x[size - 1] = y[size - 1];  // similar exponents
      if (kind == 3 && dtype_is_float(dtype))
        for (std::byte* p : {x, y})
          store_rounded(
              dtype,
              std::ldexp(1.0 + (random() % 4096) / 4096.0, static_cast<int>(random() % 12) - 6), p);
      if (kind == 4 && dtype_is_float(dtype)) {  // both zeros of either sign
        std::memset(x, 0, size);
        std::memset(y, 0, size);
        x[size - 1] = static_cast<std::byte>(random() & 0x80);
        y[size - 1] = static_cast<std::byte>(random() & 0x80);
      }
    }
  }
  std::byte* left() { return a.data() + size; }
  std::byte* right() { return b.data() + size; }
  std::size_t size;
  Bytes a, b;
};

double reference(ReduceOp op, double x, double y) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return x + y;
    case ReduceOp::kProduct:
      return x * y;
    default:
      break;
  }
  if (std::isnan(x) || std::isnan(y)) return std::numeric_limits<double>::quiet_NaN();
  if (x == y) {
    const bool negative = op == ReduceOp::kMin ? std::signbit(x) || std::signbit(y)
                                               : std::signbit(x) && std::signbit(y);
    return std::copysign(x, negative ? -1.0 : 1.0);
  }
  return op == ReduceOp::kMin ? std::min(x, y) : std::max(x, y);
}

/// In the precision that the contract names: float32 for what is at most that wide, then one
/// rounding.
void reference_element(DType dtype, ReduceOp op, const void* a, const void* b, void* out) {
  double value = reference(op, load_wide(dtype, a), load_wide(dtype, b));
  // Sums and products of two floats are exact enough in double for one rounding to float to be
  // right.
  if (dtype != DType::kFloat64) value = static_cast<float>(value);
  store_rounded(dtype, value, out);
}

template <class T>
T integer_element(ReduceOp op, T x, T y) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return static_cast<T>(static_cast<uint64_t>(x) + static_cast<uint64_t>(y));
    case ReduceOp::kProduct:
      return static_cast<T>(static_cast<uint64_t>(x) * static_cast<uint64_t>(y));
    case ReduceOp::kMin:
      return std::min(x, y);
    case ReduceOp::kMax:
      return std::max(x, y);
  }
  return 0;
}

template <class T>
void integer_reference(ReduceOp op, const std::byte* a, const std::byte* b, std::byte* out) {
  T x{}, y{};
  std::memcpy(&x, a, sizeof(T));
  std::memcpy(&y, b, sizeof(T));
  const T z = integer_element(op, x, y);
  std::memcpy(out, &z, sizeof(T));
}

void reference_integer_element(DType dtype, ReduceOp op, const std::byte* a, const std::byte* b,
                               std::byte* out) {
  switch (dtype) {
    case DType::kInt8:
      return integer_reference<int8_t>(op, a, b, out);
    case DType::kUInt8:
      return integer_reference<uint8_t>(op, a, b, out);
    case DType::kInt16:
      return integer_reference<int16_t>(op, a, b, out);
    case DType::kInt32:
      return integer_reference<int32_t>(op, a, b, out);
    case DType::kInt64:
      return integer_reference<int64_t>(op, a, b, out);
    default: {
      const bool x = *a != std::byte{0}, y = *b != std::byte{0};
      const bool both = op == ReduceOp::kMin || op == ReduceOp::kProduct;
      *out = static_cast<std::byte>(both ? (x && y) : (x || y));
    }
  }
}

std::string hex(const std::byte* p, std::size_t size) {
  std::string text;
  for (std::size_t i = size; i-- > 0;) {
    char two[3];
    std::snprintf(two, sizeof(two), "%02x", static_cast<unsigned>(p[i]));
    text += two;
  }
  return text;
}

void expect_reduce(DType dtype, ReduceOp op, std::size_t elements, std::mt19937_64& random,
                   const char* target) {
  Operands in(dtype, elements, random);
  const std::size_t size = in.size;
  Bytes want(elements * size), into(elements * size + 2 * size, std::byte{0xAB}), inplace = in.a;
  for (std::size_t i = 0; i < elements; ++i) {
    if (dtype_is_float(dtype))
      reference_element(dtype, op, in.left() + i * size, in.right() + i * size,
                        want.data() + i * size);
    else
      reference_integer_element(dtype, op, in.left() + i * size, in.right() + i * size,
                                want.data() + i * size);
  }
  reduce_into(dtype, op, into.data() + size, in.left(), in.right(), elements);
  reduce(dtype, op, inplace.data() + size, in.right(), elements);
  for (std::size_t i = 0; i < elements; ++i) {
    const std::byte* got = into.data() + size + i * size;
    ASSERT_EQ(0, std::memcmp(got, want.data() + i * size, size))
        << target << ' ' << dtype_name(dtype) << ' ' << reduce_op_name(op) << " element " << i
        << " of " << elements << ": " << hex(in.left() + i * size, size) << " and "
        << hex(in.right() + i * size, size) << " gave " << hex(got, size) << ", want "
        << hex(want.data() + i * size, size);
    ASSERT_EQ(0, std::memcmp(inplace.data() + size + i * size, got, size))
        << "reduce differs from reduce_into";
  }
  for (std::size_t i = 0; i < size; ++i) {
    ASSERT_EQ(into[i], std::byte{0xAB}) << "wrote before the buffer";
    ASSERT_EQ(into[into.size() - 1 - i], std::byte{0xAB}) << "wrote behind the buffer";
  }
}

TEST(Kernels, ReduceMatchesTheReferenceOnEveryTarget) {
  on_each_target([](const char* target) {
    EXPECT_STREQ(simd_target(), target);
    std::mt19937_64 random(20261121);
    for (const DType dtype : kFloats)
      for (const ReduceOp op : kOps)
        for (const std::size_t elements : kSizes)
          expect_reduce(dtype, op, elements, random, target);
    for (const DType dtype : kIntegers)
      for (const ReduceOp op : kOps)
        for (const std::size_t elements : kSizes)
          expect_reduce(dtype, op, elements, random, target);
  });
}

TEST(Kernels, ThereIsMoreThanOneTargetToCompareOnX86) {
#if defined(__x86_64__)
  EXPECT_GE(runnable_targets().size(), 3U);
#endif
}

TEST(Casts, EveryHalfWidensAndComesBackOnEveryTarget) {
  std::vector<uint16_t> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  on_each_target([&](const char* target) {
    for (const DType half : {DType::kFloat16, DType::kBFloat16}) {
      std::vector<float> wide(all.size());
      std::vector<uint16_t> back(all.size());
      widen(half, wide.data(), all.data(), 1.0f, all.size());
      narrow(half, back.data(), wide.data(), 1.0f, all.size());
      for (std::size_t i = 0; i < all.size(); ++i) {
        float want = 0;
        store_rounded(DType::kFloat32, load_wide(half, &all[i]), &want);
        ASSERT_EQ(std::bit_cast<uint32_t>(wide[i]), std::bit_cast<uint32_t>(want))
            << target << " of " << i;
        const uint16_t nan = half == DType::kFloat16 ? 0x7E00 : 0x7FC0;
        ASSERT_EQ(back[i], std::isnan(want) ? nan : all[i]) << target;
      }
    }
  });
}

/// Floats around every boundary between two halves, and random ones.
std::vector<float> interesting_floats() {
  std::vector<float> values;
  for (const DType half : {DType::kFloat16, DType::kBFloat16}) {
    for (uint32_t h = 0; h < 0x7F80; ++h) {
      const auto low = static_cast<uint16_t>(h), high = static_cast<uint16_t>(h + 1);
      const double x = load_wide(half, &low), y = load_wide(half, &high);
      if (!std::isfinite(y)) continue;
      const auto middle = static_cast<float>((x + y) / 2);
      for (float v : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1e38f)}) {
        values.push_back(v);
        values.push_back(-v);
      }
    }
  }
  const float inf = std::numeric_limits<float>::infinity();
  for (float v : {65504.0f, 65519.99f, 65520.0f, 65536.0f, 1e30f, 3.4028235e38f, inf, std::nanf(""),
                  1e-45f, 1e-40f, 5.9604645e-8f, 2.9802322e-8f, 2.9802326e-8f, 0.0f}) {
    values.push_back(v);
    values.push_back(-v);
  }
  std::mt19937_64 random(7);
  for (int i = 0; i < 100000; ++i)
    values.push_back(std::bit_cast<float>(static_cast<uint32_t>(random())));
  return values;
}

TEST(Casts, NarrowRoundsToNearestEvenOnEveryTarget) {
  const auto values = interesting_floats();
  on_each_target([&](const char* target) {
    for (const DType half : {DType::kFloat16, DType::kBFloat16}) {
      std::vector<uint16_t> got(values.size());
      narrow(half, got.data(), values.data(), 1.0f, values.size());
      for (std::size_t i = 0; i < values.size(); ++i) {
        uint16_t want = 0;
        store_rounded(half, values[i], &want);
        ASSERT_EQ(got[i], want) << target << ' ' << dtype_name(half) << " of " << values[i];
      }
    }
  });
}

TEST(Casts, ScaleMultipliesBeforeAndDividesAfter) {
  const auto values = interesting_floats();
  on_each_target([&](const char* target) {
    for (const float scale : {10.0f, 1024.0f, 0.1f, 3.0f}) {
      for (const DType half : {DType::kFloat16, DType::kBFloat16}) {
        std::vector<uint16_t> got(values.size());
        std::vector<float> back(values.size());
        narrow(half, got.data(), values.data(), scale, values.size());
        widen(half, back.data(), got.data(), scale, got.size());
        for (std::size_t i = 0; i < values.size(); ++i) {
          uint16_t want = 0;
          store_rounded(half, static_cast<float>(static_cast<double>(values[i]) * scale), &want);
          ASSERT_EQ(got[i], want) << target << ' ' << values[i] << " * " << scale;
          float wide = 0;
          store_rounded(DType::kFloat32, load_wide(half, &got[i]) / scale, &wide);
          ASSERT_EQ(std::bit_cast<uint32_t>(back[i]), std::bit_cast<uint32_t>(wide)) << target;
        }
      }
    }
  });
}

TEST(Casts, WidenReduceEqualsWidenThenReduce) {
  std::mt19937_64 random(99);
  on_each_target([&](const char* target) {
    for (const std::size_t elements : kSizes)
      for (const ReduceOp op : kOps)
        for (const float scale : {1.0f, 10.0f})
          for (const DType half : {DType::kFloat16, DType::kBFloat16}) {
            std::vector<uint16_t> in(elements);
            std::vector<float> dst(elements), wide(elements);
            for (auto& x : in) x = static_cast<uint16_t>(random());
            for (auto& x : dst) x = std::bit_cast<float>(static_cast<uint32_t>(random()));
            auto want = dst;
            widen(half, wide.data(), in.data(), scale, elements);
            reduce(DType::kFloat32, op, want.data(), wide.data(), elements);
            widen_reduce(half, op, dst.data(), in.data(), scale, elements);
            ASSERT_TRUE(elements == 0 || std::memcmp(dst.data(), want.data(), elements * 4) == 0)
                << target << ' ' << dtype_name(half) << ' ' << reduce_op_name(op);
          }
  });
}

/// x / d rounded once, from the exact comparison of integers: long double has 64 bits of mantissa,
/// which tells a 24-bit quotient of a 24-bit by a 53-bit number from the middle between two only
/// after a check of the remainder.
void expect_divided(DType dtype, const std::byte* x, double divisor, const std::byte* got,
                    const char* target) {
  const double value = load_wide(dtype, x), result = load_wide(dtype, got);
  if (!std::isfinite(value) || !std::isfinite(result) || value == 0) return;
  // Correct rounding: no neighbour of the result is nearer. |x - r·d| <= |x - r'·d| for both
  // neighbours r'.
  Bytes up(dtype_size(dtype)), down(dtype_size(dtype));
  uint64_t bits = 0;
  std::memcpy(&bits, got, dtype_size(dtype));
  const uint64_t plus = bits + 1, minus = bits - 1;
  std::memcpy(up.data(), &plus, up.size());
  std::memcpy(down.data(), &minus, down.size());
  const auto miss = [&](double r) { return std::abs(std::fma(-r, divisor, value)); };
  for (const auto& other : {up, down}) {
    const double neighbour = load_wide(dtype, other.data());
    if (!std::isfinite(neighbour) || (result == 0 && (bits & 0x7FFF) == 0)) continue;
    ASSERT_LE(miss(result), miss(neighbour))
        << target << ' ' << dtype_name(dtype) << ' ' << value << " / " << divisor;
    if (miss(result) == miss(neighbour)) {
      ASSERT_EQ(bits & 1, 0U) << "a tie must go to even";
    }
  }
}

TEST(Kernels, DivideIsCorrectlyRounded) {
  std::mt19937_64 random(5);
  on_each_target([&](const char* target) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      for (const double divisor :
           {2.0, 3.0, 4.0, 7.0, 255.0, 257.0, 1023.0, 2049.0, 100003.0, 0.1, 1.0 / 3, 12345.678}) {
        Operands in(dtype, 3000, random);
        Bytes got(in.left(), in.left() + 3000 * in.size);
        divide(dtype, got.data(), divisor, 3000);
        for (std::size_t i = 0; i < 3000; ++i) {
          const std::byte* x = in.left() + i * in.size;
          expect_divided(dtype, x, divisor, got.data() + i * in.size, target);
          if (std::isnan(load_wide(dtype, x))) {
            Bytes nan(in.size);
            store_rounded(dtype, std::nan(""), nan.data());
            ASSERT_EQ(0, std::memcmp(nan.data(), got.data() + i * in.size, in.size));
          }
        }
      }
    }
    for (const double divisor : {2.0, 3.0, 7.0, 1023.0, 0.1, 12345.678}) {
      Operands in(DType::kFloat64, 1003, random);
      Bytes got(in.left(), in.left() + 1003 * in.size);
      divide(DType::kFloat64, got.data(), divisor, 1003);
      for (std::size_t i = 0; i < 1003; ++i) {
        double x = 0, quotient = 0;
        std::memcpy(&x, in.left() + i * in.size, sizeof x);
        std::memcpy(&quotient, got.data() + i * in.size, sizeof quotient);
        const double wanted = x / divisor;
        if (std::isnan(wanted)) {
          ASSERT_TRUE(std::isnan(quotient)) << target << ' ' << x << " / " << divisor;
        } else {
          ASSERT_EQ(std::bit_cast<uint64_t>(quotient), std::bit_cast<uint64_t>(wanted))
              << target << ' ' << x << " / " << divisor;
        }
      }
    }
  });
}

TEST(Kernels, ResultsDoNotDependOnTheCallersFloatingPointMode) {
#if defined(__SSE2__)
  const float tiny = 1e-40f;
  float kept = tiny;
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040 | 0x6000);  // flush to zero, denormals are zero, truncate
  float dst = tiny, third = 1.0f;
  reduce(DType::kFloat32, ReduceOp::kSum, &dst, &kept, 1);
  divide(DType::kFloat32, &third, 3.0, 1);
  const unsigned after = _mm_getcsr();
  _mm_setcsr(saved);
  EXPECT_EQ(dst, tiny + tiny);
  EXPECT_EQ(third, 1.0f / 3.0f);
  EXPECT_EQ(after & 0xE040, 0xE040U) << "the caller's mode must come back";
#endif
}

TEST(Kernels, CopyMovesEveryByteAtEveryAlignment) {
  std::mt19937_64 random(11);
  for (const std::size_t bytes :
       {std::size_t{0}, std::size_t{1}, std::size_t{4096}, (std::size_t{8} << 20) + 77}) {
    for (const std::size_t shift : {0U, 1U, 63U}) {
      Bytes from(bytes + 64), to(bytes + 128, std::byte{0xCD});
      for (std::size_t i = 0; i < from.size(); i += 8) {
        const uint64_t r = random();
        std::memcpy(from.data() + i, &r, std::min<std::size_t>(8, from.size() - i));
      }
      cpu::copy(to.data() + shift, from.data() + 3, bytes);
      ASSERT_TRUE(bytes == 0 || std::memcmp(to.data() + shift, from.data() + 3, bytes) == 0);
      for (std::size_t i = 0; i < to.size(); ++i)
        if (i < shift || i >= shift + bytes) {
          ASSERT_EQ(to[i], std::byte{0xCD});
        }
    }
  }
}

}  // namespace
}  // namespace paceline::cpu
