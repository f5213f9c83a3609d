// Whose top-k the LIGHT_* switches mean, and that ranks which mean different ones don't agree.
#include "bootstrap/agreement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <string>

#include "base/testing/variables.h"

namespace paceline::bootstrap {
namespace {

using paceline::testing::Variables;

Settings load(const Variables& variables, Face face = Face::kPaceline) {
  auto settings = testing::load_settings(variables, face);
  EXPECT_TRUE(settings.is_ok()) << settings.status().message();
  return settings.value();
}

const Variables kTopK = {{"LIGHT_TOPK_ALLREDUCE", "1"}};
const Variables kBoth = {{"LIGHT_TOPK_ALLREDUCE", "1"}, {"LIGHT_2D_ALLREDUCE", "1"}};
const Variables kOwn = {{"PACELINE_CODEC", "topk"}};
const Variables kOwnSparse = {{"LIGHT_TOPK_ALLREDUCE", "1"}, {"PACELINE_ALGORITHM", "sparse"}};
const Variables kOwnBeside = {{"LIGHT_TOPK_ALLREDUCE", "1"}, {"PACELINE_CODEC", "topk"}};

TEST(EveryRankSelects, OnlyWhereLightsTopKStandsAlone) {
  for (auto face : {Face::kPaceline, Face::kLight}) {
    EXPECT_TRUE(every_rank_selects(load(kTopK, face)));
    EXPECT_TRUE(every_rank_selects(
        load({{"LIGHT_TOPK_ALLREDUCE", "1"}, {"LIGHT_2D_ALLREDUCE", "0"}}, face)));
    for (const auto& inside_nodes_exact : {kBoth, kOwn, kOwnSparse, kOwnBeside})
      EXPECT_FALSE(every_rank_selects(load(inside_nodes_exact, face)));
    EXPECT_FALSE(every_rank_selects(load({}, face)));
    EXPECT_FALSE(every_rank_selects(load({{"LIGHT_2D_ALLREDUCE", "1"}}, face)));
  }
}

std::string said_between(const Variables& one, const Variables& other) {
  return difference(agreed_settings(load(one)), "rank 0", agreed_settings(load(other)), "rank 1");
}

TEST(AgreedSettings, RanksThatSelectDifferentlyDoNotAgree) {
  for (const auto& other : {kBoth, kOwn, kOwnSparse}) {
    auto text = said_between(kTopK, other);
    EXPECT_NE(text.find("codec is 'topk of every rank' on rank 0 and 'topk' on rank 1"),
              std::string::npos)
        << text;
  }
}

TEST(AgreedSettings, TheSameByOtherVariablesIsTheSame) {
  EXPECT_EQ(said_between(kOwnBeside, kOwn), "");
  EXPECT_EQ(said_between(kBoth, {{"PACELINE_CODEC", "topk"}, {"PACELINE_ALGORITHM", "two_level"}}),
            "");
  EXPECT_EQ(said_between({{"LIGHT_TOPK_RATIO", "0.050"}}, {{"PACELINE_TOPK_RATIO", "0.05"}}), "");
  EXPECT_NE(said_between({{"LIGHT_TOPK_RATIO", "0.05"}}, {{"LIGHT_TOPK_RATIO", "0.01"}}), "");
}

// What they decide on every rank by itself has to come out the same everywhere.
TEST(AgreedSettings, EachThatRanksDecideByIsCompared) {
  const std::map<std::string, std::string> decided = {
      {"codec_scope", "everywhere"},
      {"algorithm", "two_level"},
      {"wire", "tcp"},
      {"wire_threads", "2"},
      {"sparse_rows", "off"},
      {"node_gather", "nccl"},
      {"node_reduce", "nccl"},
      {"fusion_buckets", "8"},
      {"inner_size", "2"},
      {"lanes", "3"},
      {"piece_bytes", "65536"},
      {"topk_threshold", "5"},
      {"flows", "3"},
      {"node_ctas", "4"},
      {"fusion_threshold", "8388608"},
      {"topk_ratio", "0.5"},
      {"topk_momentum", "0.9"},
      {"gradient_scale", "2"},
      {"topk_fp16", "1"},
      {"hierarchical_threshold", "4"},
  };
  for (const auto& [name, value] : decided) {
    std::string variable = "PACELINE_" + name;
    std::transform(variable.begin(), variable.end(), variable.begin(),
                   [](unsigned char c) { return std::toupper(c); });
    Variables other = kOwn;
    other[variable] = value;
    const auto text = said_between(kOwn, other);
    EXPECT_NE(text.find(name + " is '"), std::string::npos) << variable << ": " << text;
    EXPECT_NE(text.find("' on rank 1"), std::string::npos) << text;
  }
  EXPECT_NE(said_between({}, {{"PACELINE_FUSION_THRESHOLD", "4194304"}}), "") << "its default";
  auto compared = agreed_settings(load(kOwn));
  compared.erase("codec");
  EXPECT_EQ(compared.size(), decided.size());
}

}  // namespace
}  // namespace paceline::bootstrap
