// The residual store against a plain model: a map from (key, element) to a float, and a copy of it
// from before the step.
#include "codec/residual_store.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <vector>

namespace paceline::codec {
namespace {

constexpr uint64_t kLength = 200;  ///< of every parameter

/// Writes random values over the runs as an encoder would: after from before, each element once.
struct Model {
  std::map<std::pair<uint64_t, uint64_t>, float> committed, latest;
  std::set<std::pair<uint64_t, uint64_t>> written;  ///< in this step

  static float get(const std::map<std::pair<uint64_t, uint64_t>, float>& values, uint64_t key,
                   uint64_t element) {
    const auto it = values.find({key, element});
    return it == values.end() ? 0.0f : it->second;
  }
};

void check_committed(const ResidualStore& store, const Model& model, uint64_t keys) {
  for (uint64_t key = 0; key < keys; ++key) {
    std::vector<float> data(kLength, -1.0f);
    RC_ASSERT(store.read(key, data).is_ok());
    for (uint64_t i = 0; i < kLength; ++i)
      RC_ASSERT(std::bit_cast<uint32_t>(data[i]) ==
                std::bit_cast<uint32_t>(Model::get(model.committed, key, i)));
  }
}

/// Ranges of several parameters that don't overlap.
std::vector<ResidualRange> random_bucket(std::mt19937_64& random, uint64_t keys) {
  std::vector<ResidualRange> bucket;
  std::set<uint64_t> used;
  const uint64_t count = 1 + random() % 4;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t key = random() % keys;
    if (!used.insert(key).second) continue;
    uint64_t begin = random() % kLength;
    const uint64_t end = begin + 1 + random() % (kLength - begin);
    const uint64_t middle = begin + random() % (end - begin);
    if (middle > begin) bucket.push_back({key, begin, middle - begin});
    bucket.push_back({key, middle, end - middle});
  }
  return bucket;
}

/// Encodes elements [first, first + elements) of the bucket: checks every `before`, writes every
/// `after`.
void encode(ResidualStore& store, Model& model, const std::vector<ResidualRange>& bucket,
            uint64_t first, uint64_t elements, std::mt19937_64& random) {
  std::vector<ResidualRun> runs;
  RC_ASSERT(store.runs(bucket, first, elements, runs).is_ok());
  std::vector<std::pair<uint64_t, uint64_t>> ids;
  uint64_t begin = 0;
  for (const auto& range : bucket)
    for (uint64_t i = 0; i < range.elements; ++i, ++begin)
      if (begin >= first && begin < first + elements) ids.emplace_back(range.key, range.offset + i);
  std::size_t at = 0;
  for (const auto& run : runs) {
    RC_ASSERT(run.before != run.after);
    for (uint64_t i = 0; i < run.elements; ++i, ++at) {
      const auto& [key, element] = ids.at(at);
      RC_ASSERT(std::bit_cast<uint32_t>(run.before[i]) ==
                std::bit_cast<uint32_t>(Model::get(model.latest, key, element)));
      run.after[i] = static_cast<float>(static_cast<int32_t>(random())) * 1e-9f;
      model.latest[ids[at]] = run.after[i];
      model.written.insert(ids[at]);
    }
  }
  RC_ASSERT(at == ids.size());
}

/// What a bucket holds beside [first, first + elements) goes to its gradient, but what this step has written.
void hand_over(ResidualStore& store, Model& model, const std::vector<ResidualRange>& bucket,
               uint64_t first, uint64_t elements) {
  std::vector<float> expected;
  for (const auto& range : bucket) {
    for (uint64_t i = 0; i < range.elements; ++i) {
      const std::pair id{range.key, range.offset + i};
      const uint64_t at = expected.size();
      expected.push_back(static_cast<float>(at));
      if ((at >= first && at < first + elements) || model.written.contains(id)) continue;
      expected.back() += Model::get(model.latest, id.first, id.second);
      model.latest[id] = 0;
    }
  }
  std::vector<float> gradient(expected.size());
  for (std::size_t i = 0; i < gradient.size(); ++i) gradient[i] = static_cast<float>(i);
  const std::pair<uint64_t, uint64_t> own[] = {{first, first + elements}};
  store.hand_over(bucket, own, gradient.data());
  RC_ASSERT(gradient == expected);
}

TEST(ResidualStore, StepsOfAnyCutsCommitAndRollBackExactly) {
  EXPECT_TRUE(rc::check([](uint64_t seed) {
    std::mt19937_64 random(seed);
    const uint64_t keys = 5;
    ResidualStore store;
    Model model;
    for (int step = 0; step < 12; ++step) {
      const uint64_t operations = random() % 5;  // the same key may come several times a step
      for (uint64_t i = 0; i < operations; ++i) {
        const auto bucket = random_bucket(random, keys);
        uint64_t total = 0;
        for (const auto& range : bucket) total += range.elements;
        const uint64_t first = random() % (total + 1);
        const uint64_t elements = random() % (total - first + 1);
        if (random() % 2 == 0) hand_over(store, model, bucket, first, elements);
        encode(store, model, bucket, first, elements, random);
      }
      model.written.clear();
      if (random() % 3 == 0) {
        store.rollback();
        model.latest = model.committed;
      } else {
        store.commit();
        model.committed = model.latest;
      }
      if (random() % 4 == 0) {
        RC_ASSERT(store.scale(0.5).is_ok());
        for (auto& [id, value] : model.committed) value *= 0.5f;
        model.latest = model.committed;
      }
      if (random() % 4 == 0) {  // a checkpoint goes out and comes back
        const uint64_t key = random() % keys;
        std::vector<float> data(kLength);
        RC_ASSERT(store.read(key, data).is_ok());
        for (uint64_t i = 0; i < kLength; i += 7) data[i] = static_cast<float>(i);
        RC_ASSERT(store.write(key, data).is_ok());
        for (uint64_t i = 0; i < kLength; ++i) model.committed[{key, i}] = data[i];
        model.latest = model.committed;
      }
      check_committed(store, model, keys);
    }
  }));
}

/// The step of these parameters ends.
void settle(Model& model, const std::vector<uint64_t>& keys, bool keep) {
  for (const uint64_t key : keys) {
    for (uint64_t i = 0; i < kLength; ++i) {
      const std::pair id{key, i};
      model.written.erase(id);
      (keep ? model.committed : model.latest)[id] =
          Model::get(keep ? model.latest : model.committed, key, i);
    }
  }
}

TEST(ResidualStore, StepsOfSomeParametersEndAmidThoseOfOthers) {
  EXPECT_TRUE(rc::check([](uint64_t seed) {
    std::mt19937_64 random(seed);
    const uint64_t keys = 4;
    ResidualStore store;
    Model model;
    for (int turn = 0; turn < 40; ++turn) {
      if (random() % 3 != 0) {
        const auto bucket = random_bucket(random, keys);
        uint64_t total = 0;
        for (const auto& range : bucket) total += range.elements;
        if (random() % 3 == 0) hand_over(store, model, bucket, 0, total / 2);
        encode(store, model, bucket, 0, total / 2, random);
        continue;
      }
      std::vector<uint64_t> chosen = {1000};  // nobody knows it
      for (uint64_t key = 0; key < keys; ++key)
        if (random() % 2 == 0) chosen.push_back(key);
      const bool keep = random() % 2 == 0;
      keep ? store.commit(chosen) : store.rollback(chosen);
      settle(model, chosen, keep);
      check_committed(store, model, keys);
    }
    store.commit();
    settle(model, {0, 1, 2, 3}, true);
    check_committed(store, model, keys);
  }));
}

TEST(ResidualStore, AThirdPlaneStaysWhileAnOperationMayWriteToIt) {
  ResidualStore store;
  std::vector<ResidualRun> runs;
  const std::vector<ResidualRange> first = {{1, 0, 100}}, second = {{2, 0, 100}};
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(store.runs(first, 0, 100, runs).is_ok());
  ASSERT_TRUE(store.runs(second, 0, 100, runs).is_ok());
  store.commit(std::vector<uint64_t>{2});
  EXPECT_EQ(store.statistics().bytes, (3U + 2U) * 100 * 4);
  std::fill_n(runs[1].after, 100, 7.0F);  // the operation on the other one ends now
  store.commit(std::vector<uint64_t>{1});
  std::vector<float> back(100);
  ASSERT_TRUE(store.read(1, back).is_ok());
  EXPECT_EQ(back, std::vector<float>(100, 7.0F));
}

TEST(ResidualStore, MemoryIsTwiceTheResidualOfTheRangesInUse) {
  ResidualStore store;
  const std::vector<ResidualRange> bucket = {{1, 0, 1000}, {2, 500, 3000}};
  std::vector<ResidualRun> runs;
  ASSERT_TRUE(store.runs(bucket, 1000, 2000, runs)
                  .is_ok());  // a shard: only parameter 2, elements 500 to 2500
  EXPECT_EQ(store.statistics().elements, 2000U);
  EXPECT_EQ(store.statistics().bytes, 2U * 2000 * 4);
  store.commit();
  for (int step = 0; step < 5; ++step) {
    runs.clear();
    ASSERT_TRUE(store.runs(bucket, 1000, 2000, runs).is_ok());
    store.commit();
  }
  EXPECT_EQ(store.statistics().bytes, 2U * 2000 * 4);
  // Twice in a step takes a third plane, and gives it back one step later at the latest.
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(store.runs(bucket, 1000, 2000, runs).is_ok());
  EXPECT_EQ(store.statistics().bytes, 3U * 2000 * 4);
  store.commit();
  ASSERT_TRUE(store.runs(bucket, 1000, 2000, runs).is_ok());
  store.commit();
  EXPECT_EQ(store.statistics().bytes, 2U * 2000 * 4);
}

TEST(ResidualStore, MemoryOfWhatWasHandedOverIsFree) {
  ResidualStore store;
  std::mt19937 random(3);
  const auto encode = [&](const std::vector<ResidualRange>& bucket, uint64_t first,
                          uint64_t elements) {
    std::vector<ResidualRun> runs;
    ASSERT_TRUE(store.runs(bucket, first, elements, runs).is_ok());
    for (const auto& run : runs)
      for (uint64_t i = 0; i < run.elements; ++i) run.after[i] = static_cast<float>(random());
  };
  const std::vector<ResidualRange> whole = {{1, 0, 4000}}, halves = {{1, 1000, 2000}};
  ASSERT_NO_FATAL_FAILURE(encode(whole, 0, 2000));
  store.commit();
  std::vector<float> before(4000), after(4000), gradient(2000);
  ASSERT_TRUE(store.read(1, before).is_ok());
  // The bucket of elements 1000 to 3000 has its first half here from now on; what lies outside of it stays.
  const std::pair<uint64_t, uint64_t> own[] = {{0, 500}};
  store.hand_over(halves, own, gradient.data());
  store.commit();
  EXPECT_EQ(store.statistics().elements, 1500U);
  EXPECT_EQ(store.statistics().bytes, 1500U * 4);  // the other plane comes with the next encoding
  EXPECT_EQ(store.statistics().pieces, 1U);
  ASSERT_TRUE(store.read(1, after).is_ok());
  std::fill(before.begin() + 1500, before.begin() + 2000, 0.0F);
  EXPECT_EQ(after, before);
  ASSERT_NO_FATAL_FAILURE(encode(whole, 0, 1500));
  EXPECT_EQ(store.statistics().bytes, 2U * 1500 * 4);
}

TEST(ResidualStore, NeighbouringPiecesComeAsOneRun) {
  ResidualStore store;
  std::vector<ResidualRun> runs;
  ASSERT_TRUE(store.runs(std::vector<ResidualRange>{{1, 0, 1000}}, 0, 1000, runs).is_ok());
  store.commit();
  for (const uint64_t cut : {300U, 700U}) {  // split it
    runs.clear();
    ASSERT_TRUE(store.runs(std::vector<ResidualRange>{{1, 0, cut}}, 0, cut, runs).is_ok());
    store.rollback();
  }
  runs.clear();
  ASSERT_TRUE(store.runs(std::vector<ResidualRange>{{1, 0, 1000}}, 0, 1000, runs).is_ok());
  ASSERT_EQ(runs.size(), 1U);
  EXPECT_EQ(runs[0].elements, 1000U);
  EXPECT_EQ(store.statistics().pieces, 3U);
}

TEST(ResidualStore, BadRequestsAreNamedAndChangeNothing) {
  ResidualStore store;
  std::vector<ResidualRun> runs;
  const Status shorter = store.runs(std::vector<ResidualRange>{{1, 0, 10}}, 5, 6, runs);
  EXPECT_EQ(shorter.code(), Code::kInvalidArgument);
  EXPECT_NE(shorter.message().find("must cover the buffer"), std::string::npos);
  const Status twice = store.runs(std::vector<ResidualRange>{{7, 0, 10}, {7, 5, 10}}, 0, 20, runs);
  EXPECT_EQ(twice.code(), Code::kInvalidArgument);
  EXPECT_NE(twice.message().find("parameter 7"), std::string::npos);
  EXPECT_TRUE(runs.empty());
  for (const double factor : {0.0, -1.0, std::nan(""), HUGE_VAL})
    EXPECT_FALSE(store.scale(factor).is_ok());
  ASSERT_TRUE(store.runs(std::vector<ResidualRange>{{7, 0, 10}}, 0, 10, runs).is_ok());
  std::vector<float> small(5), right(10, 1.0f);
  EXPECT_EQ(store.read(7, small).code(), Code::kInvalidArgument);
  EXPECT_EQ(store.write(7, small).code(), Code::kInvalidArgument);
  EXPECT_NE(store.write(7, right).message().find("middle of a step"), std::string::npos);
  store.rollback();
  EXPECT_TRUE(store.write(7, right).is_ok());
}

TEST(ResidualStore, ScalingReachesWhatTheStepHasWrittenAndWhatItReturnsTo) {
  for (const bool commits : {true, false}) {
    ResidualStore store;
    ASSERT_TRUE(store.write(1, std::vector<float>(10, 3.0F)).is_ok());
    std::vector<ResidualRun> runs;
    ASSERT_TRUE(store.runs(std::vector<ResidualRange>{{1, 0, 10}}, 0, 10, runs).is_ok());
    for (const auto& run : runs) std::fill_n(run.after, run.elements, 5.0F);
    ASSERT_TRUE(store.scale(2).is_ok());
    commits ? store.commit() : store.rollback();
    std::vector<float> back(10);
    ASSERT_TRUE(store.read(1, back).is_ok());
    EXPECT_EQ(back, std::vector<float>(10, commits ? 10.0F : 6.0F));
  }
}

// An Inf that stays would make every step to come one that is taken back.
TEST(ResidualStore, NothingInfiniteIsKept) {
  ResidualStore store;
  const float most = std::numeric_limits<float>::max();
  ASSERT_TRUE(store.write(1, std::vector<float>{most / 2, -most, 1, -0.0F}).is_ok());
  ASSERT_TRUE(store.scale(4).is_ok());
  std::vector<float> back(4);
  ASSERT_TRUE(store.read(1, back).is_ok());
  EXPECT_EQ(back, (std::vector<float>{most, -most, 4, 0}));
  ASSERT_TRUE(store.scale(0.5).is_ok());
  ASSERT_TRUE(store.read(1, back).is_ok());
  EXPECT_EQ(back, (std::vector<float>{most / 2, -most / 2, 2, 0}));
  for (const float bad : {HUGE_VALF, -HUGE_VALF, std::nanf("")}) {
    const Status refused = store.write(1, std::vector<float>{1, 2, bad, 4});
    EXPECT_EQ(refused.code(), Code::kInvalidArgument);
    EXPECT_NE(refused.message().find("element 2 of parameter 1"), std::string::npos)
        << refused.message();
    std::vector<float> same(4);
    ASSERT_TRUE(store.read(1, same).is_ok());
    EXPECT_EQ(same, back);
  }
}

TEST(ResidualStore, LoadingTakesMemoryOnlyForAShard) {
  ResidualStore store;
  std::vector<float> data(1'000'000, 0.0f);
  for (std::size_t i = 250'000; i < 500'000; ++i) data[i] = 1.0f;
  ASSERT_TRUE(store.write(3, data).is_ok());
  EXPECT_EQ(store.statistics().elements, 250'000U);
  std::vector<float> back(data.size());
  ASSERT_TRUE(store.read(3, back).is_ok());
  EXPECT_EQ(back, data);
}

}  // namespace
}  // namespace paceline::codec
