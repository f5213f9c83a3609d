// The reference against float64, against the CPU's codecs, and against what codec.h promises.
#include "device/cuda/reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "codec/codec.h"
#include "device/cpu/casts.h"
#include "device/cuda/codec_test_util.h"

namespace paceline::device::cuda {
namespace {

using test::Buffer;
using test::normal;

constexpr DType kDtypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
const std::vector<uint64_t> kSizes = {1, 3, 511, 513, 4095, 4096, 4097, 8192, 8193, 100003};

/// All inputs and outputs of one encode.
struct Piece {
  Piece(const WireFormat& wire, Buffer input, uint64_t count)
      : format(wire),
        elements(count),
        gradient(std::move(input)),
        residual(std::vector<float>(count, 0.0F)),
        next(count * sizeof(float)),
        encoded(encoded_bytes(wire, count)),
        state(state_bytes(wire, count)) {}

  [[nodiscard]] EncodeArguments arguments() {
    EncodeArguments a;
    a.gradient = gradient.address();
    a.elements = elements;
    a.scale = scale;
    a.residual = residual.address();
    a.next_residual = next.address();
    a.encoded = encoded.address();
    a.state = state.bytes() != 0 ? state.address() : 0;
    a.state_capacity = state.bytes();
    a.report = reinterpret_cast<drivers::cuda::DevicePtr>(&report);
    return a;
  }
  Status encode() { return reference::encode(format, arguments()); }
  [[nodiscard]] std::vector<float> decode() const { return combine({this}, 1); }
  static std::vector<float> combine(const std::vector<const Piece*>& pieces, float scale) {
    WireFormat format = pieces[0]->format;
    std::vector<drivers::cuda::DevicePtr> sources;
    for (const Piece* piece : pieces) sources.push_back(piece->encoded.address());
    const uint64_t elements = pieces[0]->elements;
    const Buffer output(elements * dtype_size(format.dtype));
    CombineArguments a;
    a.encoded = sources;
    a.elements = elements;
    a.scale = scale;
    a.output = output.address();
    EXPECT_TRUE(reference::combine(format, a).is_ok());
    std::vector<float> wide(elements);
    for (uint64_t i = 0; i < elements; ++i)
      wide[i] = test::widen(format.dtype, output.as<void>(), i);
    return wide;
  }
  [[nodiscard]] float start(uint64_t i) const {
    return test::start_value(test::widen(format.dtype, gradient.as<void>(), i), scale,
                             residual.as<float>()[i]);
  }
  [[nodiscard]] uint32_t sent() const { return encoded.as<uint32_t>()[(elements + 4095) / 4096]; }

  WireFormat format;
  uint64_t elements;
  Buffer gradient, residual, next, encoded, state;
  float scale = 1;
  uint32_t report = 0;
};

WireFormat top_k(double ratio, bool fp16_values = true, DType dtype = DType::kFloat32) {
  return {WireCodec::kTopK, dtype, ratio, fp16_values};
}

/// decoded + next residual == gradient · scale + residual, in float64. Decoding to a 16-bit dtype rounds, so only
/// float32 is asked.
void expect_identity(const Piece& piece) {
  const auto decoded = piece.decode();
  for (uint64_t i = 0; i < piece.elements; ++i)
    ASSERT_EQ(double{decoded[i]} + double{piece.next.as<float>()[i]}, double{piece.start(i)})
        << "element " << i << " of " << piece.elements;
}

TEST(Numbers, AgreeWithTheCpusCasts) {
  std::mt19937 random(1);
  for (const DType half : {DType::kFloat16, DType::kBFloat16}) {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const auto word = static_cast<uint16_t>(bits);
      const double wide = cpu::load_wide(half, &word);
      if (std::isnan(wide)) continue;
      ASSERT_EQ(test::widen(half, &word, 0), wide) << bits;
    }
    for (int i = 0; i < 2000000; ++i) {
      const float value = float_of(random());
      if (std::isnan(value)) continue;
      uint16_t want = 0, got = 0;
      cpu::store_rounded(half, value, &want);
      test::narrow(half, value, &got, 0);
      ASSERT_EQ(got, want) << value;
    }
  }
}

TEST(Dense, RoundsOnceAndSaysWhatItMet) {
  for (const DType dtype : kDtypes) {
    for (const WireCodec codec : {WireCodec::kExact, WireCodec::kFp16, WireCodec::kBf16}) {
      for (const uint64_t elements : kSizes) {
        const WireFormat format{codec, dtype};
        Piece piece(format, normal(dtype, elements, 3, 7), elements);
        piece.scale = 0.25F;
        ASSERT_TRUE(piece.encode().is_ok());
        const DType wire = dense_wire_dtype(format);
        for (uint64_t i = 0; i < elements; ++i) {
          const double exact = 0.25 * test::widen(dtype, piece.gradient.as<void>(), i);
          uint32_t want = 0, got = 0;
          cpu::store_rounded(wire, exact, &want);
          std::memcpy(&got, piece.encoded.as<std::byte>() + i * dtype_size(wire), dtype_size(wire));
          ASSERT_EQ(got, want) << dtype_name(dtype) << " to " << dtype_name(wire);
        }
        EXPECT_EQ(piece.report, 0U);
      }
    }
  }
}

TEST(Dense, SameBytesAsTheCpusCodec) {
  const uint64_t elements = 5000;
  for (const auto& [mine, theirs] : {std::pair{WireCodec::kFp16, plan::Codec::kFp16},
                                     std::pair{WireCodec::kBf16, plan::Codec::kBf16}}) {
    Piece piece({mine}, normal(DType::kFloat32, elements, 1, 3), elements);
    ASSERT_TRUE(piece.encode().is_ok());
    plan::CodecSpec spec;
    spec.codec = theirs;
    std::vector<std::byte> want(codec::encoded_bytes(spec, DType::kFloat32, elements));
    codec::encode_dense(spec, {piece.gradient.as<float>(), elements}, want.data());
    EXPECT_EQ(0, std::memcmp(want.data(), piece.encoded.as<void>(), elements * 2));
  }
}

TEST(Dense, SaturatesWhatIsFiniteAndPassesOnTheRest) {
  const float inf = INFINITY;
  const std::vector<float> values = {65503, 65519.9F, 65520, -1e30F, 3.4e38F, 1e-8F, 3e-8F, -0.0F};
  const std::vector<float> want = {65504, 65504, 65504, -65504, 65504, 0, 0x1p-24F, -0.0F};
  Piece piece({WireCodec::kFp16}, Buffer(values), values.size());
  ASSERT_TRUE(piece.encode().is_ok());
  EXPECT_EQ(piece.report, kReportSaturated);
  EXPECT_EQ(piece.decode(), want);
  EXPECT_TRUE(std::signbit(piece.decode()[7]));

  Piece infinite({WireCodec::kBf16}, Buffer(std::vector<float>{1, inf, -inf, NAN, 3.4028e38F}), 5);
  ASSERT_TRUE(infinite.encode().is_ok());
  EXPECT_EQ(infinite.report, kReportNonFinite | kReportSaturated);
  const auto decoded = infinite.decode();
  EXPECT_EQ(decoded[1], inf);
  EXPECT_EQ(decoded[2], -inf);
  EXPECT_TRUE(std::isnan(decoded[3]));
  EXPECT_TRUE(std::isfinite(decoded[4]));
}

TEST(Dense, CombineAddsInOrderInFloat32) {
  for (const DType dtype : kDtypes) {
    for (const WireCodec codec : {WireCodec::kExact, WireCodec::kFp16, WireCodec::kBf16}) {
      const uint64_t elements = 4097;
      std::vector<std::unique_ptr<Piece>> pieces;
      std::vector<const Piece*> views;
      for (uint32_t node = 0; node < 5; ++node) {
        pieces.push_back(std::make_unique<Piece>(WireFormat{codec, dtype},
                                                 normal(dtype, elements, 1, node), elements));
        ASSERT_TRUE(pieces.back()->encode().is_ok());
        views.push_back(pieces.back().get());
      }
      const auto got = Piece::combine(views, 0.2F);
      const DType wire = dense_wire_dtype({codec, dtype});
      for (uint64_t i = 0; i < elements; ++i) {
        float sum = test::widen(wire, pieces[0]->encoded.as<void>(), i);
        for (uint32_t node = 1; node < 5; ++node)
          sum += test::widen(wire, pieces[node]->encoded.as<void>(), i);
        uint32_t bits = 0;
        cpu::store_rounded(dtype, static_cast<float>(double{sum} * 0.2F), &bits);
        ASSERT_EQ(got[i], test::widen(dtype, &bits, 0));
      }
    }
  }
}

TEST(TopK, IdentityIsExactForAnyInput) {
  std::mt19937 random(5);
  for (const bool fp16 : {true, false}) {
    for (const uint64_t elements : kSizes) {
      for (int kind = 0; kind < 4; ++kind) {
        Piece piece(top_k(0.02, fp16), normal(DType::kFloat32, elements, 1e-3F, 11), elements);
        for (uint64_t i = 0; i < elements; ++i) {
          float& g = piece.gradient.as<float>()[i];
          if (kind == 1) g = float_of(random() & 0xFEFFFFFFU);  // any exponent, finite
          if (kind == 2) g = float_of(random() & 0x807FFFFFU);  // denormals
          if (kind == 3) g = random() % 50 == 0 ? g : 0;
          if (kind != 1) piece.residual.as<float>()[i] = g * 0.37F;
        }
        ASSERT_TRUE(piece.encode().is_ok());
        ASSERT_EQ(piece.report, 0U);
        ASSERT_LE(piece.sent(), top_k_entries(piece.format, elements));
        expect_identity(piece);
      }
    }
  }
}

TEST(TopK, LargestFloatsDoNotOverflow) {
  std::vector<float> values(9000, 1e30F);
  values[17] = 3.4028234e38F;
  values[8500] = -3.4028234e38F;
  Piece piece(top_k(0.0003), Buffer(values), values.size());
  ASSERT_TRUE(piece.encode().is_ok());
  EXPECT_EQ(piece.sent(), 2U);
  expect_identity(piece);
}

TEST(TopK, CountFollowsTheRatioWhenTheScaleJumps) {
  const uint64_t elements = 6000000;  // more than are sampled
  Piece piece(top_k(0.01), normal(DType::kFloat32, elements, 1, 21), elements);
  const uint64_t k = top_k_entries(piece.format, elements);
  for (const float scale : {1.0F, 10.0F, 0.1F, 100.0F}) {
    piece.scale = scale;
    ASSERT_TRUE(piece.encode().is_ok());
    EXPECT_LE(piece.sent(), k);
    EXPECT_GE(piece.sent(), k * 95 / 100) << scale;
    std::swap(piece.residual, piece.next);
  }
}

TEST(TopK, SendsWhatTheCpusCodecSends) {
  const uint64_t elements = 300007;
  Piece piece(top_k(0.01, false), normal(DType::kFloat32, elements, 1, 31), elements);
  ASSERT_TRUE(piece.encode().is_ok());
  const uint64_t k = top_k_entries(piece.format, elements);
  EXPECT_EQ(piece.sent(), k);

  plan::CodecSpec spec;
  spec.codec = plan::Codec::kTopK;
  spec.ratio = 0.01;
  spec.fp16_values = false;
  std::vector<std::byte> bytes(codec::encoded_bytes(spec, DType::kFloat32, elements));
  std::vector<float> before(elements), after(elements), decoded(elements);
  const codec::ResidualRun run{before.data(), after.data(), elements};
  const auto sent =
      codec::encode_topk(spec, {piece.gradient.as<float>(), elements}, {&run, 1}, bytes.data());
  const std::span<const std::byte> encoding(bytes.data(), sent.bytes);
  ASSERT_TRUE(codec::decode_sum_topk({&encoding, 1}, decoded).is_ok());
  const auto mine = piece.decode();
  uint64_t differ = 0;
  for (uint64_t i = 0; i < elements; ++i) differ += mine[i] != decoded[i] ? 1 : 0;
  EXPECT_LE(differ, 4U);  // the threshold has 16 bits: entries next to it may be exchanged
}

TEST(TopK, TiesAndZerosNeitherStarveNorOverflow) {
  std::vector<float> equal(50000, -2.5F);
  Piece ties(top_k(0.01), Buffer(equal), equal.size());
  ASSERT_TRUE(ties.encode().is_ok());
  EXPECT_EQ(ties.sent(), 500U);
  expect_identity(ties);
  Piece zeros(top_k(0.01), Buffer(std::vector<float>(50000, 0.0F)), 50000);
  ASSERT_TRUE(zeros.encode().is_ok());
  EXPECT_EQ(zeros.sent(), 0U);
  expect_identity(zeros);
}

TEST(TopK, AddsGradientsUpAsCombineDoes) {
  for (const DType dtype : kDtypes) {
    for (const uint64_t elements : kSizes) {
      std::vector<Buffer> gradients;
      std::vector<drivers::cuda::DevicePtr> sources;
      for (uint32_t i = 0; i < 1 + elements % 5; ++i) {
        gradients.push_back(normal(dtype, elements, i == 2 ? 100 : 1, 40 + i));
        sources.push_back(gradients.back().address());
      }
      Piece summed(top_k(0.01, elements % 2 == 0, dtype), Buffer(elements * dtype_size(dtype)),
                   elements);
      CombineArguments sum;
      sum.encoded = sources;
      sum.elements = elements;
      sum.output = summed.gradient.address();
      ASSERT_TRUE(reference::combine({WireCodec::kExact, dtype}, sum).is_ok());
      ASSERT_TRUE(summed.encode().is_ok());
      Piece together(summed.format, Buffer(gradients[0].copy<std::byte>()), elements);
      EncodeArguments a = together.arguments();
      a.addends = std::span(sources).subspan(1);
      ASSERT_TRUE(reference::encode(together.format, a).is_ok());
      EXPECT_EQ(together.encoded.copy<uint16_t>(), summed.encoded.copy<uint16_t>());
      EXPECT_EQ(together.next.copy<uint32_t>(), summed.next.copy<uint32_t>());
    }
  }
}

TEST(TopK, MomentumIsCorrectedAndMasked) {
  const uint64_t elements = 20000;
  Piece piece(top_k(0.05), normal(DType::kFloat32, elements, 1, 41), elements);
  const Buffer velocity = normal(DType::kFloat32, elements, 1, 42);
  const Buffer next_velocity(elements * sizeof(float));
  piece.residual = normal(DType::kFloat32, elements, 1, 43);
  EncodeArguments a = piece.arguments();
  a.scale = 0.5F;
  a.momentum = 0.9F;
  a.velocity = velocity.address();
  a.next_velocity = next_velocity.address();
  ASSERT_TRUE(reference::encode(piece.format, a).is_ok());
  const auto decoded = piece.decode();
  for (uint64_t i = 0; i < elements; ++i) {
    const double u = 0.9 * velocity.as<float>()[i] + 0.5 * piece.gradient.as<float>()[i];
    const double v = u + piece.residual.as<float>()[i];
    ASSERT_NEAR(decoded[i] + double{piece.next.as<float>()[i]}, v, 1e-6 * (1 + std::abs(v)));
    if (decoded[i] != 0) {
      ASSERT_EQ(next_velocity.as<float>()[i], 0);
    } else {
      ASSERT_NEAR(next_velocity.as<float>()[i], u, 1e-6 * (1 + std::abs(u)));
    }
  }
}

TEST(TopK, InfinityReachesAllAndTheTileKeepsItsResidual) {
  for (const float bad : {INFINITY, -INFINITY, NAN}) {
    const uint64_t elements = 20000;
    Piece piece(top_k(0.01), normal(DType::kFloat32, elements, 1, 51), elements);
    piece.residual = normal(DType::kFloat32, elements, 1, 52);
    piece.gradient.as<float>()[10000] = bad;
    ASSERT_TRUE(piece.encode().is_ok());
    EXPECT_EQ(piece.report, kReportNonFinite);
    const auto decoded = piece.decode();
    for (uint64_t i = 8192; i < 12288; ++i) {
      ASSERT_TRUE(std::isnan(decoded[i]));
      ASSERT_EQ(piece.next.as<float>()[i], piece.residual.as<float>()[i]);
    }
    EXPECT_TRUE(std::isfinite(decoded[8191]) && std::isfinite(decoded[12288]));
  }
}

TEST(TopK, CorruptedEncodingsStayInsideTheOutput) {
  std::mt19937 random(61);
  const uint64_t elements = 20000;
  Piece piece(top_k(0.01), normal(DType::kFloat32, elements, 1, 62), elements);
  ASSERT_TRUE(piece.encode().is_ok());
  const auto good = piece.encoded.copy<uint32_t>();
  uint32_t reports = 0;
  for (int round = 0; round < 300; ++round) {
    for (size_t i = 0; i < good.size(); ++i)
      piece.encoded.as<uint32_t>()[i] = random() % 20 == 0 ? random() : good[i];
    const Buffer output(elements * sizeof(float));  // the sanitizer watches its ends
    const drivers::cuda::DevicePtr source = piece.encoded.address();
    uint32_t report = 0;
    CombineArguments a{{&source, 1},
                       elements,
                       1,
                       output.address(),
                       reinterpret_cast<drivers::cuda::DevicePtr>(&report)};
    ASSERT_TRUE(reference::combine(piece.format, a).is_ok());
    reports |= report;
  }
  EXPECT_EQ(reports, kReportCorrupted);
}

TEST(Int8, ErrorIsHalfAStepAndStaysInTheResidual) {
  for (const uint64_t elements : kSizes) {
    Piece piece({WireCodec::kInt8}, normal(DType::kFloat32, elements, 1e-4F, 71), elements);
    piece.residual = normal(DType::kFloat32, elements, 1e-5F, 72);
    piece.scale = 0.5F;
    ASSERT_TRUE(piece.encode().is_ok());
    expect_identity(piece);
    const auto decoded = piece.decode();
    for (uint64_t begin = 0; begin < elements; begin += 512) {
      float largest = 0;
      const uint64_t end = std::min<uint64_t>(begin + 512, elements);
      for (uint64_t i = begin; i < end; ++i) largest = std::max(largest, std::abs(piece.start(i)));
      for (uint64_t i = begin; i < end; ++i)
        ASSERT_NEAR(decoded[i], piece.start(i), largest / 253.9);
    }
  }
}

TEST(Int8, AnyExponentAndNonFiniteBlocks) {
  std::mt19937 random(81);
  const uint64_t elements = 3000;
  Piece piece({WireCodec::kInt8}, Buffer(std::vector<float>(elements)), elements);
  for (uint64_t block = 0; block < elements; block += 512) {
    const uint32_t exponent = random() % 254;
    for (uint64_t i = block; i < std::min<uint64_t>(block + 512, elements); ++i)
      piece.gradient.as<float>()[i] = float_of((random() & 0x807FFFFFU) | exponent << 23);
  }
  ASSERT_TRUE(piece.encode().is_ok());
  expect_identity(piece);
  piece.gradient.as<float>()[600] = NAN;
  ASSERT_TRUE(piece.encode().is_ok());
  EXPECT_EQ(piece.report, kReportNonFinite);
  const auto decoded = piece.decode();
  for (uint64_t i = 512; i < 1024; ++i) {
    ASSERT_TRUE(std::isnan(decoded[i]));
    ASSERT_EQ(piece.next.as<float>()[i], piece.residual.as<float>()[i]);
  }
  EXPECT_TRUE(std::isfinite(decoded[511]) && std::isfinite(decoded[1024]));
}

TEST(Codecs, EveryByteOfAnEncodingIsWritten) {
  for (const WireCodec codec :
       {WireCodec::kExact, WireCodec::kFp16, WireCodec::kTopK, WireCodec::kInt8}) {
    for (const DType dtype : kDtypes) {
      for (const uint64_t elements : kSizes) {
        WireFormat format{codec, dtype, 0.013};
        Piece one(format, normal(dtype, elements, 1, 5), elements);
        Piece two(format, normal(dtype, elements, 1, 5), elements);
        std::memset(two.encoded.as<void>(), 0x5A, two.encoded.bytes());
        ASSERT_TRUE(one.encode().is_ok());
        ASSERT_TRUE(two.encode().is_ok());
        ASSERT_EQ(0,
                  std::memcmp(one.encoded.as<void>(), two.encoded.as<void>(), one.encoded.bytes()));
        ASSERT_EQ(one.encoded.bytes() % 16, 0U);
      }
    }
  }
}

TEST(Codecs, BadArgumentsAreNamed) {
  Piece piece(top_k(0.01), normal(DType::kFloat32, 64, 1, 1), 64);
  const auto message = [&](auto change) {
    WireFormat format = piece.format;
    EncodeArguments a = piece.arguments();
    change(format, a);
    const Status status = reference::encode(format, a);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return status.message();
  };
  using F = WireFormat;
  using A = EncodeArguments;
  const auto has = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  has(message([](F& f, A&) { f.dtype = DType::kInt32; }), "int32");
  has(message([](F& f, A&) { f.ratio = 0; }), "ratio 0");
  has(message([](F& f, A&) { f.ratio = NAN; }), "ratio nan");
  has(message([](F&, A& a) { a.gradient += 4; }), "gradient");
  has(message([](F&, A& a) { a.encoded = 0; }), "encoded is missing");
  has(message([](F&, A& a) { a.next_residual = 0; }), "next_residual is missing");
  has(message([](F&, A& a) { a.momentum = 0.9F; }), "velocity is missing");
  has(message([](F&, A& a) { a.state = 0; }), "state is missing");
  has(message([](F&, A& a) { --a.state_capacity; }), "state of");
  has(message([](F&, A& a) { a.elements = kMaxElements + 1; }), "cut it");
  const std::vector<drivers::cuda::DevicePtr> many(kMaxAddends + 1, piece.gradient.address());
  const std::vector<drivers::cuda::DevicePtr> odd(1, piece.gradient.address() + 2);
  has(message([&](F&, A& a) { a.addends = many; }), "16 gradients to add");
  has(message([&](F&, A& a) { a.addends = odd; }), "an addend");
  has(message([&](F& f, A& a) {
        f.codec = WireCodec::kFp16;
        a.addends = std::span(many).first(1);
      }),
      "only top-k adds");
  CombineArguments none;
  EXPECT_EQ(reference::combine(piece.format, none).code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace paceline::device::cuda
