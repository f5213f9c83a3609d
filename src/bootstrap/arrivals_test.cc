// What ranks say of others that have not come.
#include "bootstrap/arrivals.h"

#include <gtest/gtest.h>

#include <map>

namespace paceline::bootstrap {
namespace {

/// What is put, and announced where it can be, is in maps.
struct Place final : KeyValue {
  Status put(const std::string& key, const std::string& value) override {
    values[key] = value;
    return {};
  }
  Result<std::optional<std::string>> get(const std::string& key) override {
    ++gets;
    const auto found = values.find(key);
    return found == values.end() ? std::nullopt : std::optional(found->second);
  }
  std::optional<bool> announced(const std::string& name) override {
    return tells ? std::optional(values.contains("announced " + name)) : std::nullopt;
  }
  [[nodiscard]] Status trouble() const override { return why; }
  Status poll(Time) override { return {}; }
  [[nodiscard]] std::string describe() const override { return "a place"; }
  [[nodiscard]] bool is_private() const override { return true; }

  std::map<std::string, std::string> values;
  bool tells = false;
  Status why;
  int gets = 0;
};

TEST(Arrivals, WhatIsAnnouncedCountsElseWhatIsPut) {
  Place place;
  place.values = {{"announced job/here1", ""}, {"job/r2", "record"}};
  EXPECT_FALSE(is_here(place, "job/", 1, "job/r1"));
  EXPECT_TRUE(is_here(place, "job/", 2, "job/r2"));
  place.tells = true;
  place.gets = 0;
  EXPECT_TRUE(is_here(place, "job/", 1, "job/r1"));
  EXPECT_FALSE(is_here(place, "job/", 2, "job/r2"));
  EXPECT_EQ(place.gets, 0) << "what has told is not asked again, it may have to wait for that";
}

TEST(Arrivals, MissingRanksAreNamed) {
  const Place place;
  EXPECT_EQ(never_came(2 * kSecond, {3}, 4, place).message(),
            "after 2 s rank 3 of 4 never came (asked a place). Are all ranks started with the same "
            "size and rendezvous? PACELINE_START_TIMEOUT sets the patience");
  std::set<Rank> many;
  for (Rank r = 1; r < 40; r += 2) many.insert(r);
  const auto status = never_came(kSecond / 4, many, 40, place);
  EXPECT_EQ(status.code(), Code::kTimeout);
  EXPECT_TRUE(status.message().starts_with(
      "after 0.25 s ranks 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31 … (20 in all) "
      "of 40 never came"))
      << status.message();
}

// Whoever asks: rank 0, which is not among the missing then, too.
TEST(Arrivals, WhereNothingCanBeReadNobodyIsNamed) {
  Place place;
  place.why = {Code::kUnavailable, "it is gone"};
  for (const auto& ranks : {std::set<Rank>{1, 2, 3}, std::set<Rank>{0, 1, 2}}) {
    EXPECT_EQ(never_came(2 * kSecond, ranks, 4, place).message(),
              "after 2 s nobody can say which of 4 ranks have come: it is gone. "
              "PACELINE_START_TIMEOUT sets the patience");
  }
}

}  // namespace
}  // namespace paceline::bootstrap
