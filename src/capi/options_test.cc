// What settings come to: the engine's options and each operation's codec.
#include "capi/options.h"

#include <gtest/gtest.h>

#include <string>

#include "base/testing/variables.h"

namespace paceline::capi {
namespace {

using paceline::testing::Variables;
using plan::Algorithm;
using plan::Codec;

Settings settings(const Variables& variables, Face face = Face::kPaceline) {
  auto loaded = paceline::testing::load_settings(variables, face);
  EXPECT_TRUE(loaded) << loaded.status().to_string();
  return std::move(loaded).value();
}

engine::EngineOptions options(const Variables& variables, Face face = Face::kPaceline) {
  return engine_options(settings(variables, face), 0);
}

/// An all-reduce of `count` floats that leaves the codec to the settings.
paceline_op_args floats(uint64_t count) {
  paceline_op_args args{};
  args.struct_size = sizeof args;
  args.codec = args.fp16_values = -1;
  args.count = count;
  return args;
}

plan::CodecSpec codec(const Variables& variables, Face face = Face::kPaceline) {
  return codec_for(settings(variables, face), floats(1 << 20));
}

TEST(EngineOptions, EachPlanCanBeAskedFor) {
  const auto asked = [](const char* name) {
    return options({{"PACELINE_ALGORITHM", name}}).algorithm;
  };
  EXPECT_EQ(options({}).algorithm, Algorithm::kAuto);
  EXPECT_EQ(asked("auto"), Algorithm::kAuto);
  EXPECT_EQ(asked("ring"), Algorithm::kRing);
  EXPECT_EQ(asked("doubling"), Algorithm::kDoubling);
  EXPECT_EQ(asked("tree"), Algorithm::kTree);
  EXPECT_EQ(asked("direct"), Algorithm::kDirect);
  EXPECT_EQ(asked("two_level"), Algorithm::kTwoLevel);
}

TEST(EngineOptions, PeersSwitchesAskForTheirPlans) {
  EXPECT_EQ(options({{"LIGHT_2D_ALLREDUCE", "1"}}).algorithm, Algorithm::kTwoLevel);
  EXPECT_EQ(options({{"PERSEUS_ALLREDUCE_MODE", "1"}}, Face::kPerseus).algorithm,
            Algorithm::kTwoLevel);
  EXPECT_EQ(options({{"PERSEUS_ALLREDUCE_MODE", "0"}}, Face::kPerseus).algorithm, Algorithm::kRing);
  EXPECT_EQ(options({{"PERSEUS_ALLREDUCE_MODE", "auto"}}, Face::kPerseus).algorithm,
            Algorithm::kAuto);
  EXPECT_EQ(options({{"HOROVOD_HIERARCHICAL_ALLREDUCE", "1"}}, Face::kHorovod).algorithm,
            Algorithm::kTwoLevel);
  EXPECT_EQ(options({{"HOROVOD_TORUS_ALLREDUCE", "1"}}, Face::kHorovod).algorithm,
            Algorithm::kTwoLevel);
  EXPECT_EQ(options({{"LIGHT_2D_ALLREDUCE", "0"}}).algorithm, Algorithm::kAuto);
}

TEST(EngineOptions, InnerGroupsPiecesLanesAndPatience) {
  EXPECT_EQ(options({}).inner_size, 0);
  EXPECT_EQ(options({{"PACELINE_INNER_SIZE", "3"}}).inner_size, 3);
  EXPECT_EQ(options({{"LIGHT_INTRA_SIZE", "4"}}).inner_size, 4);
  EXPECT_EQ(options({{"PACELINE_PIECE_BYTES", "65599"}}).piece_bytes, 65536U);  // whole lines
  EXPECT_EQ(options({{"PACELINE_LANES", "3"}}).lanes, 3);
  EXPECT_EQ(options({{"PACELINE_TIMEOUT", "7.5"}}).default_timeout, 7'500'000'000);
  EXPECT_EQ(engine_options(settings({{"PACELINE_TIMEOUT", "7.5"}}), 2).default_timeout,
            2'000'000'000)
      << "the caller's";
}

TEST(EngineOptions, TheLimitOfTwoLevelsHoldsWhereSomebodyAskedForThemOrForIt) {
  const auto otherwise = engine::EngineOptions{}.hierarchical_threshold;
  EXPECT_EQ(options({}).hierarchical_threshold, otherwise);
  EXPECT_EQ(options({{"PACELINE_ALGORITHM", "two_level"}}).hierarchical_threshold, 1U << 30);
  EXPECT_EQ(options({{"PACELINE_HIERARCHICAL_THRESHOLD", "1000"}}).hierarchical_threshold, 1000U);
  EXPECT_EQ(options({{"LIGHT_HIERARCHICAL_THRESHOLD", "2000"}}).hierarchical_threshold, 2000U);
}

TEST(CodecFor, SettingsChooseIt) {
  EXPECT_EQ(codec({}).codec, Codec::kNone);
  EXPECT_EQ(codec({{"PACELINE_CODEC", "fp16"}}).codec, Codec::kFp16);
  EXPECT_EQ(codec({{"PACELINE_CODEC", "bf16"}}).codec, Codec::kBf16);
  EXPECT_EQ(codec({{"PACELINE_CODEC", "topk"}}).codec, Codec::kTopK);
  EXPECT_EQ(codec({{"PERSEUS_ALLREDUCE_DTYPE", "1"}}, Face::kPerseus).codec, Codec::kNone);
}

TEST(CodecFor, Fp16sScale) {
  EXPECT_DOUBLE_EQ(codec({{"PACELINE_CODEC", "fp16"}}).scale, 1);
  EXPECT_DOUBLE_EQ(codec({{"PACELINE_CODEC", "fp16"}, {"PACELINE_GRADIENT_SCALE", "1024"}}).scale,
                   1024);
  EXPECT_DOUBLE_EQ(codec({}, Face::kPerseus).scale, 10) << "its documents' default";
  EXPECT_DOUBLE_EQ(codec({{"PERSEUS_ALLREDUCE_GRADIENT_SCALE", "32"}}, Face::kPerseus).scale, 32);
  // bf16 has fp32's range, and nothing else is cast.
  EXPECT_DOUBLE_EQ(codec({{"PACELINE_CODEC", "bf16"}, {"PACELINE_GRADIENT_SCALE", "1024"}}).scale,
                   1);
  EXPECT_DOUBLE_EQ(codec({{"PACELINE_CODEC", "none"}, {"PACELINE_GRADIENT_SCALE", "1024"}}).scale,
                   1);
}

TEST(CodecFor, WhereFp16Applies) {
  EXPECT_FALSE(codec({{"PACELINE_CODEC", "fp16"}}).inside_node);
  EXPECT_TRUE(
      codec({{"PACELINE_CODEC", "fp16"}, {"PACELINE_CODEC_SCOPE", "everywhere"}}).inside_node);
  EXPECT_TRUE(codec({{"PERSEUS_ALLREDUCE_DTYPE", "0"}}, Face::kPerseus).inside_node);
  EXPECT_FALSE(codec({{"PERSEUS_ALLREDUCE_DTYPE", "2"}}, Face::kPerseus).inside_node);
}

TEST(CodecFor, TopKsFractionValuesAndThreshold) {
  const Variables topk{{"PACELINE_CODEC", "topk"},
                       {"PACELINE_TOPK_RATIO", "0.25"},
                       {"PACELINE_TOPK_FP16", "1"},
                       {"PACELINE_TOPK_THRESHOLD", "4096"}};
  const auto with = settings(topk);
  auto args = floats(1024);
  EXPECT_EQ(codec_for(with, args).codec, Codec::kTopK);
  EXPECT_DOUBLE_EQ(codec_for(with, args).ratio, 0.25);
  EXPECT_TRUE(codec_for(with, args).fp16_values);
  args.ratio = 0.5;
  args.fp16_values = 0;
  EXPECT_DOUBLE_EQ(codec_for(with, args).ratio, 0.5) << "the operation's own";
  EXPECT_FALSE(codec_for(with, args).fp16_values);
  EXPECT_EQ(codec_for(with, floats(1023)).codec, Codec::kNone) << "a byte short of the threshold";
}

TEST(CodecFor, WhatCanNotBeCodedTravelsExactly) {
  const auto fp16 = settings({{"PACELINE_CODEC", "fp16"}});
  auto args = floats(1 << 20);
  args.dtype = 1;  // float64
  EXPECT_EQ(codec_for(fp16, args).codec, Codec::kNone);
  args = floats(1 << 20);
  args.reduce_op = 2;  // minimum
  EXPECT_EQ(codec_for(fp16, args).codec, Codec::kNone);
  args = floats(1 << 20);
  args.collective = 1;  // broadcast
  EXPECT_EQ(codec_for(fp16, args).codec, Codec::kNone);
}

TEST(LostOnTheCpu, NamesTheVariableAsItWasWritten) {
  using Sentences = std::vector<std::string>;
  EXPECT_EQ(lost_on_the_cpu(settings({})), Sentences{});
  EXPECT_EQ(lost_on_the_cpu(settings({{"PACELINE_CODEC", "topk"}, {"PACELINE_LANES", "1"}})),
            Sentences{});
  EXPECT_EQ(lost_on_the_cpu(settings({{"PERSEUS_ALLREDUCE_STREAMS", "4"}}, Face::kPerseus)).size(),
            1U);
  const auto one = lost_on_the_cpu(settings({{"PACELINE_CODEC", "INT8"}}));
  ASSERT_EQ(one.size(), 1U);
  EXPECT_EQ(one[0],
            "PACELINE_CODEC=int8 is built for CUDA tensors; those of the CPU travel exactly: use "
            "fp16 or topk for them");
  const auto two = lost_on_the_cpu(settings({{"LIGHT_TOPK_ALLREDUCE", "1"},
                                             {"PACELINE_TOPK_MOMENTUM", "0.9"},
                                             {"HOROVOD_NUM_NCCL_STREAMS", "2"}}));
  ASSERT_EQ(two.size(), 2U);
  EXPECT_EQ(two[0].find("PACELINE_TOPK_MOMENTUM=0.9 is built for CUDA tensors"), 0U) << two[0];
  EXPECT_EQ(two[1].find("HOROVOD_NUM_NCCL_STREAMS=2 is built for CUDA tensors"), 0U) << two[1];
}

}  // namespace
}  // namespace paceline::capi
