#include "base/settings.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>

#include "base/testing/variables.h"

namespace paceline {
namespace {

using paceline::testing::Variables;

Result<Settings> load(const Variables& variables, Face face = Face::kPaceline) {
  return testing::load_settings(variables, face);
}

std::string error_of(const Variables& variables, Face face = Face::kPaceline) {
  auto settings = load(variables, face);
  return settings.is_ok() ? "" : settings.status().message();
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Settings, DefaultsHoldWithoutVariables) {
  auto s = load({}).value();
  EXPECT_EQ(s.text("codec"), "none");
  EXPECT_DOUBLE_EQ(s.number("topk_ratio"), 0.01);
  EXPECT_EQ(s.integer("topk_threshold"), 1048576);
  EXPECT_FALSE(s.flag("disable"));
  EXPECT_FALSE(s.is_set("codec"));
  EXPECT_TRUE(s.warnings().empty());
}

TEST(Settings, BothLightSwitchesMeanSparseTwoLevel) {
  auto s = load({{"LIGHT_2D_ALLREDUCE", "1"},
                 {"LIGHT_TOPK_ALLREDUCE", "1"},
                 {"LIGHT_TOPK_RATIO", "0.001"},
                 {"LIGHT_INTRA_SIZE", "4"},
                 {"LIGHT_TOPK_FP16", "1"}})
               .value();
  EXPECT_EQ(s.text("algorithm"), "two_level");
  EXPECT_EQ(s.text("codec"), "topk");
  EXPECT_DOUBLE_EQ(s.number("topk_ratio"), 0.001);
  EXPECT_EQ(s.integer("inner_size"), 4);
  EXPECT_TRUE(s.flag("topk_fp16"));
  EXPECT_EQ(s.source("codec"), "LIGHT_TOPK_ALLREDUCE");
}

TEST(Settings, FacesDefaultsHoldOnlyUnderTheirFace) {
  EXPECT_EQ(load({}, Face::kPerseus).value().text("codec"), "fp16");
  EXPECT_EQ(load({}, Face::kPerseus).value().text("codec_scope"), "everywhere");
  EXPECT_DOUBLE_EQ(load({}, Face::kPerseus).value().number("gradient_scale"), 10);
  EXPECT_DOUBLE_EQ(load({}, Face::kPerseus).value().number("timeout"), 60);
  EXPECT_EQ(load({}, Face::kHorovod).value().text("codec"), "none");
  EXPECT_DOUBLE_EQ(load({}, Face::kHorovod).value().number("gradient_scale"), 1);
}

TEST(Settings, PerseusDtypeTranslates) {
  EXPECT_EQ(load({{"PERSEUS_ALLREDUCE_DTYPE", "1"}}, Face::kPerseus).value().text("codec"), "none");
  auto mixed = load({{"PERSEUS_ALLREDUCE_DTYPE", "2"}}, Face::kPerseus).value();
  EXPECT_EQ(mixed.text("codec"), "fp16");
  EXPECT_EQ(mixed.text("codec_scope"), "between_nodes");
  EXPECT_TRUE(
      contains(error_of({{"PERSEUS_ALLREDUCE_DTYPE", "3"}}), "PERSEUS_ALLREDUCE_DTYPE='3'"));
}

TEST(Settings, PrecedenceIsCanonicalThenFaceThenOthersThenHorovod) {
  Variables all{{"HOROVOD_NUM_NCCL_STREAMS", "2"}, {"PERSEUS_ALLREDUCE_STREAMS", "3"}};
  EXPECT_EQ(load(all).value().integer("lanes"), 3);
  EXPECT_EQ(load(all, Face::kHorovod).value().integer("lanes"), 2);
  all["PACELINE_LANES"] = "7";
  EXPECT_EQ(load(all, Face::kHorovod).value().integer("lanes"), 7);
}

TEST(Settings, ContradictionsNameBothVariables) {
  auto e = error_of({{"LIGHT_TOPK_ALLREDUCE", "1"}, {"PERSEUS_ALLREDUCE_DTYPE", "0"}});
  EXPECT_TRUE(contains(e, "LIGHT_TOPK_ALLREDUCE")) << e;
  EXPECT_TRUE(contains(e, "PERSEUS_ALLREDUCE_DTYPE")) << e;
  EXPECT_TRUE(contains(e, "contradict each other") && contains(e, "; unset one of them")) << e;
  for (const char* plan : {"ring", "doubling", "tree", "direct"}) {
    e = error_of({{"LIGHT_TOPK_ALLREDUCE", "1"}, {"PACELINE_ALGORITHM", plan}});
    EXPECT_TRUE(contains(e, "LIGHT_TOPK_ALLREDUCE") && contains(e, "PACELINE_ALGORITHM")) << e;
    EXPECT_TRUE(contains(e, fmt::format("the plan '{}'", plan))) << e;
    EXPECT_TRUE(contains(e, "unset the latter or use auto")) << e;
  }
  e = error_of({{"PACELINE_SECRET", "0123456789abcdef"}, {"PACELINE_SECRET_FILE", "/x"}});
  EXPECT_TRUE(contains(e, "PACELINE_SECRET_FILE")) << e;
  EXPECT_TRUE(contains(e, "; unset one of them")) << e;
  e = error_of({{"PACELINE_ALGORITHM", "sparse"}});
  EXPECT_TRUE(contains(e, "set PACELINE_CODEC=topk, or unset PACELINE_ALGORITHM")) << e;
}

// In a script they are two: NCCL's sockets carry the data, Gloo's what ranks tell each other beside it.
TEST(Settings, PerseusInterfacesAreTwoSettingsOfWhichTheDatasCounts) {
  for (Face face : {Face::kPaceline, Face::kPerseus}) {
    Variables both{{"PERSEUS_GLOO_NETWORK_INTERFACE", "eth0"},
                   {"PERSEUS_NCCL_NETWORK_INTERFACE", "eth1"}};
    ASSERT_EQ(error_of(both, face), "");
    EXPECT_EQ(load(both, face)->text("interface"), "eth1");
    EXPECT_EQ(load(both, face)->source("interface"), "PERSEUS_NCCL_NETWORK_INTERFACE");
    both.erase("PERSEUS_NCCL_NETWORK_INTERFACE");
    EXPECT_EQ(load(both, face)->text("interface"), "eth0");
  }
  const Variables misspelt{{"PERSEUS_ALLREDUCE_NANCHECK", "1"}, {"PERSEUS_ALLREDUCE_NANHECK", "0"}};
  EXPECT_TRUE(contains(error_of(misspelt), "contradict each other")) << "one setting of two names";
}

TEST(Settings, AModeOfAutoSaysNothing) {
  for (Face face : {Face::kPaceline, Face::kPerseus, Face::kLight}) {
    auto s = load({{"LIGHT_2D_ALLREDUCE", "1"}, {"PERSEUS_ALLREDUCE_MODE", "auto"}}, face);
    ASSERT_TRUE(s.is_ok()) << s.status().message();
    EXPECT_EQ(s->text("algorithm"), "two_level");
    EXPECT_EQ(s->source("algorithm"), "LIGHT_2D_ALLREDUCE");
  }
  EXPECT_EQ(load({{"PERSEUS_ALLREDUCE_MODE", "Auto"}}, Face::kPerseus)->text("algorithm"), "auto");
  EXPECT_TRUE(contains(error_of({{"LIGHT_2D_ALLREDUCE", "1"}, {"PERSEUS_ALLREDUCE_MODE", "0"}}),
                       "contradict each other"));
}

TEST(Settings, WordsAreReadWithoutCase) {
  for (const char* text : {"DEBUG", "debug", "Debug"}) {
    auto s = load({{"HOROVOD_LOG_LEVEL", text}}, Face::kHorovod);
    ASSERT_TRUE(s.is_ok()) << s.status().message();
    EXPECT_EQ(s->text("log_level"), "debug");
  }
  EXPECT_EQ(load({{"PACELINE_CODEC", "FP16"}})->text("codec"), "fp16");
  EXPECT_EQ(load({{"HOROVOD_HIERARCHICAL_ALLREDUCE", "True"}})->text("algorithm"), "two_level");
  EXPECT_EQ(load({{"HOROVOD_HIERARCHICAL_ALLREDUCE", "false"}})->text("algorithm"), "auto");
  for (const char* on : {"1", "true", "On", "YES"})
    EXPECT_EQ(load({{"PACELINE_TOPK_FP16", on}})->text("topk_fp16"), "1") << on;
  for (const char* off : {"0", "False", "no"})
    EXPECT_EQ(load({{"PACELINE_TOPK_FP16", off}})->text("topk_fp16"), "0") << off;
  EXPECT_NE(error_of({{"PERSEUS_ALLREDUCE_DTYPE", "true"}}, Face::kPerseus), "") << "no switch";
}

TEST(Settings, APlanThatCarriesNoCodecIsNamedBesideOne) {
  for (const char* plan : {"doubling", "tree"}) {
    for (const char* codec : {"fp16", "bf16"}) {
      auto text = error_of({{"PACELINE_ALGORITHM", plan}, {"PACELINE_CODEC", codec}});
      EXPECT_TRUE(contains(text, "PACELINE_ALGORITHM") && contains(text, "PACELINE_CODEC")) << text;
      EXPECT_TRUE(contains(text, "; unset one of them")) << text;
    }
    EXPECT_EQ(error_of({{"PACELINE_ALGORITHM", plan}}), "");
  }
}

TEST(Settings, UnknownNamesAreErrorsWithASuggestion) {
  auto e = error_of({{"PACELINE_TOPK_RATO", "0.1"}});
  EXPECT_TRUE(contains(e, "PACELINE_TOPK_RATO is not a setting; did you mean PACELINE_TOPK_RATIO?"))
      << e;
  for (const char* name : {"LIGHT_X", "PERSEUS_FROBNICATE_EVERYTHING", "TIACC_TRAINING_Q",
                           "HOROVOD_NO_SUCH_THING_AT_ALL"})
    EXPECT_TRUE(contains(error_of({{name, "1"}}), std::string(name) + " is not a setting")) << name;
  EXPECT_EQ(error_of({{"PATH", "/bin"}, {"NCCL_DEBUG", "INFO"}}), "");
}

TEST(Settings, OutOfRangeNamesVariableValueAndRange) {
  struct Case {
    const char *name, *value, *wanted;
  };
  for (auto [name, value, wanted] :
       {Case{"PACELINE_TOPK_RATIO", "0", "above 0 and at most 1"},
        Case{"LIGHT_TOPK_RATIO", "1.5", "above 0 and at most 1"},
        Case{"PERSEUS_ALLREDUCE_STREAMS", "13", "from 1 to 12"},
        Case{"PACELINE_LANES", "0", "from 1 to 64"}, Case{"PACELINE_LANES", "many", "an integer"},
        Case{"PACELINE_TIMEOUT", "nan", "a number"}, Case{"PACELINE_DISABLE", "maybe", "0 or 1"},
        Case{"PACELINE_CODEC", "fp8", "one of none, fp16, bf16"},
        Case{"PERSEUS_ALLREDUCE_FUSION", "129", "auto or from 0 to 128"},
        Case{"PACELINE_PORT", "65536", "from 1 to 65535"}}) {
    auto e = error_of({{name, value}});
    EXPECT_TRUE(contains(e, fmt::format("{}='{}' is not {}", name, value, wanted))) << e;
    EXPECT_TRUE(contains(e, "; set it so, or unset it")) << e;
  }
}

TEST(Settings, KnownButNotBuiltWarnsOnceEach) {
  auto s = load({{"HOROVOD_CYCLE_TIME", "0"},
                 {"PERSEUS_OFFLINE_NEG", "1"},
                 {"HOROVOD_MPI_THREADS_DISABLE", "1"},
                 {"PERSEUS_ALLREDUCE_NANHECK", "1"}})
               .value();
  ASSERT_EQ(s.warnings().size(), 3U);
  EXPECT_TRUE(contains(s.warnings()[0], "HOROVOD_CYCLE_TIME"));
}

using Pairs = std::vector<std::pair<std::string, std::string>>;

TEST(Settings, WhatAsksForNothingNewWarnsOfNothing) {
  for (auto [name, value] : Pairs{{"PERSEUS_OFFLINE_NEG", "0"},
                                  {"PERSEUS_OFFLINE_NEG", "False"},
                                  {"PACELINE_NAN_CHECK", ""},
                                  {"PACELINE_CYCLE_TIME", "1.0"},
                                  {"PERSEUS_ACCUMULATE_N_STEPS", "1"},
                                  {"HOROVOD_TIMELINE", ""},
                                  {"HOROVOD_ELASTIC", "0"},
                                  {"HOROVOD_ELASTIC", ""}})
    EXPECT_TRUE(load({{name, value}}).value().warnings().empty()) << name << "=" << value;
  for (auto [name, value] : Pairs{{"PERSEUS_OFFLINE_NEG", "yes"},
                                  {"PACELINE_CYCLE_TIME", "1.5"},
                                  {"HOROVOD_TIMELINE", "file"},
                                  {"HOROVOD_ELASTIC", "1"}})
    EXPECT_EQ(load({{name, value}}).value().warnings().size(), 1U) << name << "=" << value;
}

TEST(Settings, MomentumOfTopkWantsTopk) {
  for (const char* codec : {"none", "fp16", "bf16", "int8"}) {
    const auto e = error_of({{"PACELINE_TOPK_MOMENTUM", "0.9"}, {"PACELINE_CODEC", codec}});
    EXPECT_TRUE(contains(e, "PACELINE_TOPK_MOMENTUM=0.9")) << e;
    EXPECT_TRUE(contains(e, std::string("'") + codec + "'")) << e;
    EXPECT_TRUE(contains(e, "set PACELINE_CODEC=topk")) << e;
  }
  EXPECT_TRUE(contains(error_of({{"PACELINE_TOPK_MOMENTUM", "0.9"}}), "PACELINE_CODEC=topk"));
  EXPECT_EQ(error_of({{"PACELINE_TOPK_MOMENTUM", "0.9"}, {"LIGHT_TOPK_ALLREDUCE", "1"}}), "");
  EXPECT_EQ(error_of({{"PACELINE_TOPK_MOMENTUM", "0"}, {"PACELINE_CODEC", "fp16"}}), "");
}

// A misspelt setting that begins so would be taken for one of ours.
TEST(Settings, OnlyTheTestsOwnVariablesAreTheirs) {
  EXPECT_EQ(error_of({{"PACELINE_TEST_NEEDS_DESCRIPTORS", "1"}}), "");
  EXPECT_TRUE(contains(error_of({{"PACELINE_TEST_CODEC", "fp16"}}),
                       "PACELINE_TEST_CODEC is not a setting"));
}

TEST(Settings, EveryVariableOfThePeersDocumentsIsKnown) {
  for (const char* name : {"LIGHT_2D_ALLREDUCE",
                           "LIGHT_INTRA_SIZE",
                           "LIGHT_HIERARCHICAL_THRESHOLD",
                           "LIGHT_TOPK_ALLREDUCE",
                           "LIGHT_TOPK_RATIO",
                           "LIGHT_TOPK_THRESHOLD",
                           "LIGHT_TOPK_FP16",
                           "TIACC_TRAINING_FUSION_THRESHOLD",
                           "TIACC_TRAINING_NUM_NCCL_STREAMS",
                           "PERSEUS_ALLREDUCE_NANHECK",
                           "PERSEUS_ALLREDUCE_NANCHECK",
                           "PERSEUS_ALLREDUCE_DTYPE",
                           "PERSEUS_ALLREDUCE_MODE",
                           "PERSEUS_ALLREDUCE_STREAMS",
                           "PERSEUS_ALLREDUCE_FUSION",
                           "PERSEUS_ACCUMULATE_N_STEPS",
                           "PERSEUS_DOWNSAMPLE_N_ELEMENTS",
                           "PERSEUS_GRADIENT_MOMENTUM",
                           "PERSEUS_NCCL_ENABLE",
                           "PERSEUS_ALLREDUCE_GRADIENT_SCALE",
                           "PERSEUS_OFFLINE_NEG",
                           "PERSEUS_PERF_CHECK_N_STEPS",
                           "PERSEUS_MASTER_PORT",
                           "PERSEUS_CHANGE_HVD_ALLGATHER",
                           "PERSEUS_USE_DDP_LAUNCHER",
                           "GLOO_TIMEOUT_SECONDS",
                           "HOROVOD_FUSION_THRESHOLD",
                           "HOROVOD_CYCLE_TIME",
                           "HOROVOD_CACHE_CAPACITY",
                           "HOROVOD_HIERARCHICAL_ALLREDUCE",
                           "HOROVOD_TORUS_ALLREDUCE",
                           "HOROVOD_AUTOTUNE",
                           "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
                           "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
                           "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
                           "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
                           "HOROVOD_TIMELINE_MARK_CYCLES",
                           "HOROVOD_NUM_NCCL_STREAMS",
                           "HOROVOD_MPI_THREADS_DISABLE",
                           "HOROVOD_STALL_CHECK_DISABLE",
                           "HOROVOD_STALL_CHECK_TIME_SECONDS",
                           "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
                           "HOROVOD_GLOO_TIMEOUT_SECONDS",
                           "HOROVOD_ELASTIC_TIMEOUT",
                           "HOROVOD_START_TIMEOUT"})
    EXPECT_EQ(error_of({{name, "1"}}), "") << name;
  for (const char* name : {"PERSEUS_NCCL_NETWORK_INTERFACE", "PERSEUS_GLOO_NETWORK_INTERFACE",
                           "HOROVOD_TIMELINE", "HOROVOD_AUTOTUNE_LOG", "HOROVOD_THREAD_AFFINITY",
                           "HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME"})
    EXPECT_EQ(error_of({{name, "eth0"}}), "") << name;
  EXPECT_EQ(error_of({{"HOROVOD_LOG_LEVEL", "INFO"}}), "");
}

// Nobody calls a name outside of our families unknown: that it is known shows in what it does.
TEST(Settings, OthersVariablesHaveTheirEffect) {
  for (Face face : {Face::kPaceline, Face::kPerseus, Face::kHorovod}) {
    auto s = load({{"GLOO_TIMEOUT_SECONDS", "77"}, {"NCCL_SOCKET_IFNAME", "^docker"}}, face);
    EXPECT_DOUBLE_EQ(s->number("timeout"), 77);
    EXPECT_EQ(s->source("timeout"), "GLOO_TIMEOUT_SECONDS");
    EXPECT_EQ(s->text("interface"), "^docker");
    EXPECT_EQ(s->source("interface"), "NCCL_SOCKET_IFNAME");
  }
  EXPECT_TRUE(contains(error_of({{"GLOO_TIMEOUT_SECONDS", "0"}}), "GLOO_TIMEOUT_SECONDS='0'"));
  Variables all{{"NCCL_SOCKET_IFNAME", "eth1"}, {"HOROVOD_GLOO_IFACE", "eth2"}};
  EXPECT_EQ(load(all)->text("interface"), "eth1");
  EXPECT_EQ(load(all, Face::kHorovod)->text("interface"), "eth2");
  all["PERSEUS_GLOO_NETWORK_INTERFACE"] = "eth3";
  EXPECT_EQ(load(all)->text("interface"), "eth3");
  all["PACELINE_INTERFACE"] = "eth4";
  EXPECT_EQ(load(all, Face::kPerseus)->text("interface"), "eth4");
  EXPECT_EQ(load({{"GLOO_SOCKET_IFNAME", "eth5"}})->text("interface"), "eth5");
}

// They are read by NCCL itself.
TEST(Settings, NcclsOtherVariablesChangeNothing) {
  const auto plain = load({}).value().to_json();
  for (const char* name :
       {"NCCL_ALGO", "NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_IB_GID_INDEX", "NCCL_NET_GDR_LEVEL"}) {
    auto s = load({{name, "1"}});
    ASSERT_TRUE(s.is_ok()) << s.status().message();
    EXPECT_EQ(s->to_json(), plain) << name;
    EXPECT_TRUE(s->warnings().empty()) << name;
  }
}

TEST(Settings, JsonHidesTheSecret) {
  auto s = load({{"PACELINE_SECRET", "0123456789abcdef"}}).value();
  EXPECT_FALSE(contains(s.to_json(), "0123456789abcdef"));
  EXPECT_TRUE(contains(s.to_json(), "PACELINE_TOPK_RATIO"));
  EXPECT_TRUE(contains(error_of({{"PACELINE_SECRET", "short"}}), "16 characters"));
}

TEST(Settings, FaceNames) {
  EXPECT_EQ(parse_face("").value(), Face::kPaceline);
  EXPECT_EQ(parse_face("tiacc_training").value(), Face::kTiacc);
  EXPECT_FALSE(parse_face("nvidia").is_ok());
}

}  // namespace
}  // namespace paceline
