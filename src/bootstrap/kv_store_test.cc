#include "bootstrap/kv_store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>

namespace paceline::bootstrap {
namespace {

/// A caller's store as the C ABI sees one.
struct Caller {
  std::map<std::string, std::string> entries;
  int put_result = 0;
  long get_result = 0;  ///< where not 0: what get() returns whatever is asked for
  int gets = 0;

  paceline_store callbacks() {
    paceline_store store{};
    store.struct_size = sizeof store;
    store.context = this;
    store.put = [](void* context, const char* key, const char* value, size_t bytes) {
      auto& self = *static_cast<Caller*>(context);
      if (self.put_result == 0) self.entries[key] = std::string(value, bytes);
      return self.put_result;
    };
    store.get = [](void* context, const char* key, char* value, size_t capacity) -> long {
      auto& self = *static_cast<Caller*>(context);
      ++self.gets;
      if (self.get_result != 0) return self.get_result;
      auto found = self.entries.find(key);
      if (found == self.entries.end()) return -1;
      std::memcpy(value, found->second.data(), std::min(capacity, found->second.size()));
      return static_cast<long>(found->second.size());
    };
    return store;
  }
};

std::string bytes_of(std::size_t size) {
  std::string text(size, '\0');
  for (std::size_t i = 0; i < size; ++i) text[i] = static_cast<char>(i * 131 + i / 251);
  return text;
}

TEST(StoreKeyValue, GivesWhatWasPutWhateverItsBytesAndNothingBefore) {
  Caller caller;
  StoreKeyValue space(caller.callbacks());
  auto before = space.get("job/r1");
  ASSERT_TRUE(before);
  EXPECT_FALSE(before->has_value());
  for (std::size_t size : {std::size_t{0}, std::size_t{1}, kValueLimit - 1, kValueLimit}) {
    auto key = "job/" + std::to_string(size);
    ASSERT_TRUE(space.put(key, bytes_of(size)));
    caller.gets = 0;
    auto back = space.get(key);
    ASSERT_TRUE(back);
    EXPECT_EQ(*back, bytes_of(size)) << size;
    EXPECT_EQ(caller.gets, 1) << size;
  }
}

TEST(StoreKeyValue, AValueBeyondTheUsualLimitIsAskedForAgainWithRoomForIt) {
  Caller caller;
  StoreKeyValue space(caller.callbacks());
  for (std::size_t size : {kValueLimit + 1, std::size_t{1} << 20}) {
    ASSERT_TRUE(space.put("long", bytes_of(size)));
    caller.gets = 0;
    auto back = space.get("long");
    ASSERT_TRUE(back);
    EXPECT_TRUE(*back == bytes_of(size)) << size;
    EXPECT_EQ(caller.gets, 2);
  }
}

TEST(StoreKeyValue, AFailureNamesTheKeyAndTheCallersCode) {
  Caller caller;
  StoreKeyValue space(caller.callbacks());
  caller.put_result = 7;
  auto put = space.put("job/secret", "x");
  EXPECT_EQ(put.code(), Code::kUnavailable);
  EXPECT_EQ(put.message(),
            "the store handed to paceline_comm_create failed to put 'job/secret' (7)");
  for (long answer : {-2L, -100L, (1L << 24) + 1}) {  // the last would be taken for a size
    caller.get_result = answer;
    auto got = space.get("job/r0");
    ASSERT_FALSE(got);
    EXPECT_EQ(got.status().code(), Code::kUnavailable);
    EXPECT_EQ(got.status().message(),
              "the store handed to paceline_comm_create failed to get 'job/r0' (" +
                  std::to_string(answer) + ")");
  }
}

}  // namespace
}  // namespace paceline::bootstrap
