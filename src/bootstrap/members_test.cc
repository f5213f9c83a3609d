// What other ranks send while a job forms: whole, in order, within the job's size, or refused.
#include "bootstrap/members.h"

#include <gtest/gtest.h>

#include "bootstrap/kv.h"

namespace paceline::bootstrap {
namespace {

Member member(Rank rank) {
  Member m;
  m.rank = rank;
  m.pid = 100 + rank;
  m.host = "host-" + std::to_string(rank);
  m.node_id = "boot/net-" + std::to_string(rank / 2);
  m.address = "192.0.2." + std::to_string(rank + 1) + ":4000";
  return m;
}

TEST(Members, ComeBackAsTheyWere) {
  const std::vector<Member> table{member(0), member(2), member(5)};
  const auto back = decode_members(encode_members(table), 6);
  ASSERT_TRUE(back.is_ok());
  ASSERT_EQ(back->size(), 3U);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ((*back)[i].rank, table[i].rank);
    EXPECT_EQ((*back)[i].pid, table[i].pid);
    EXPECT_EQ((*back)[i].host, table[i].host);
    EXPECT_EQ((*back)[i].node_id, table[i].node_id);
    EXPECT_EQ((*back)[i].address, table[i].address);
  }
}

TEST(Members, TwiceTheSameOutOfOrderOrBeyondTheJobIsRefused) {
  for (const auto& ranks : std::vector<std::vector<Rank>>{{1, 1}, {2, 1}, {0, 4}, {-1, 0}}) {
    std::vector<Member> table;
    table.reserve(ranks.size());
    for (const Rank r : ranks) table.push_back(member(r));
    EXPECT_EQ(decode_members(encode_members(table), 4).status().code(), Code::kCorrupted)
        << ranks[0] << ", " << ranks[1];
  }
  const std::vector<Member> more{member(0), member(1), member(2)};
  EXPECT_EQ(decode_members(encode_members(more), 2).status().code(), Code::kCorrupted);
}

TEST(Members, CutOrLongerBytesAreRefused) {
  const std::vector<Member> table{member(0), member(1)};
  auto bytes = encode_members(table);
  for (std::size_t n = 0; n < bytes.size(); ++n)
    ASSERT_FALSE(decode_members(std::span(bytes).first(n), 2).is_ok()) << n;
  bytes.push_back(std::byte{0});
  EXPECT_FALSE(decode_members(bytes, 2).is_ok());
}

// Neighbours hear of a failure by a note, all others find the same note in the key-value space.
TEST(Members, ALongReasonFitsIntoTheSpaceInWholeCharacters) {
  std::string text;
  while (text.size() < 3 * kValueLimit) text += "…";
  for (std::size_t before = 0; before < 3; ++before) {
    const std::string reason = std::string(before, '.') + text;
    const auto bytes = encode_note({.kind = NoteKind::kFailed,
                                    .address = std::string(100 * before, 'a'),
                                    .code = Code::kMismatch,
                                    .text = reason,
                                    .is_hearsay = before == 1});
    EXPECT_LE(bytes.size(), kValueLimit);
    EXPECT_GT(bytes.size(), kValueLimit - 3) << "as much of it as there is room for";
    const auto back = decode_note(bytes);
    ASSERT_TRUE(back.is_ok());
    EXPECT_EQ(back->address.size(), 100 * before);
    EXPECT_EQ(back->is_hearsay, before == 1);
    EXPECT_EQ(back->code, Code::kMismatch);
    EXPECT_EQ((back->text.size() - before) % 3, 0U) << "half a character";
    EXPECT_TRUE(reason.starts_with(back->text));
  }
}

TEST(Members, NotesAndRecordsThatAreCutAreRefused) {
  JoinNote hello;
  hello.kind = NoteKind::kHello;
  hello.host = "a";
  hello.address = "192.0.2.1:1";
  hello.build = "0.1.0";
  hello.settings = {{"codec", "fp16"}, {"lanes", "2"}};
  const auto bytes = encode_note(hello);
  ASSERT_TRUE(decode_note(bytes).is_ok());
  EXPECT_EQ(decode_note(bytes)->settings, hello.settings);
  for (std::size_t n = 0; n < bytes.size(); ++n)
    ASSERT_FALSE(decode_note(std::span(bytes).first(n)).is_ok()) << n;
  const auto impatient = encode_note({.kind = NoteKind::kImpatient});
  ASSERT_TRUE(decode_note(impatient).is_ok());
  EXPECT_EQ(decode_note(impatient)->kind, NoteKind::kImpatient);
  Record record;
  record.wire = 1;
  record.size = 3;
  record.build = "0.1.0";
  record.host = "a";
  record.address = "192.0.2.1:1";
  const auto text = encode_record(record);
  ASSERT_TRUE(decode_record(text).is_ok());
  EXPECT_EQ(decode_record(text)->size, 3);
  for (std::size_t n = 0; n < text.size(); ++n)
    ASSERT_FALSE(decode_record(text.substr(0, n)).is_ok()) << n;
}

}  // namespace
}  // namespace paceline::bootstrap
