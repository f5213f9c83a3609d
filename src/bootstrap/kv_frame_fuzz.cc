// Whatever comes to the key-value server's port: the parser neither reads beyond the bytes nor loops.
#include <cstdlib>

#include "bootstrap/kv_frame.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace paceline::bootstrap;
  std::vector<std::byte> in(reinterpret_cast<const std::byte*>(data),
                            reinterpret_cast<const std::byte*>(data) + size);
  while (true) {
    auto before = in.size();
    auto frame = take_frame(in);
    if (!frame || !*frame) return 0;
    if (in.size() >= before) std::abort();
    // What was taken is what would be written.
    std::vector<std::byte> again;
    append_frame(**frame, again);
    if (again.size() != before - in.size()) std::abort();
  }
}
