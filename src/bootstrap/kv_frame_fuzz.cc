// Whatever comes to the key-value server's port: the parser neither reads beyond the bytes nor loops, and takes only
// what would be written.
#include <algorithm>
#include <cstdlib>

#include "bootstrap/kv_frame.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace paceline::bootstrap;
  std::span all(reinterpret_cast<const std::byte*>(data), size);
  std::vector<std::byte> in(all.begin(), all.end());
  while (true) {
    const auto before = all.last(in.size());
    auto frame = take_frame(in);
    if (!frame || !*frame) {
      // Only whole frames are taken, and only those.
      if (!std::ranges::equal(before, in)) std::abort();
      return 0;
    }
    std::vector<std::byte> again;
    append_frame(**frame, again);
    if (again.empty() || again.size() + in.size() != before.size()) std::abort();
    if (!std::ranges::equal(again, before.first(again.size()))) std::abort();
  }
}
