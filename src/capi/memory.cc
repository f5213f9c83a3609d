#include <cstdlib>

#include "capi/handle.h"

namespace paceline::capi {

void* allocate_shared_memory(paceline_comm&, size_t bytes) {
  constexpr size_t kAlign = 4096;
  return std::aligned_alloc(kAlign, (std::max<size_t>(bytes, 1) + kAlign - 1) / kAlign * kAlign);
}

void free_shared_memory(paceline_comm&, void* memory) { std::free(memory); }

}  // namespace paceline::capi
