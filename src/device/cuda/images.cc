// The assembler takes the files in (.incbin): no table of a million numbers to compile.
#include "device/cuda/images.h"

#include <array>

#ifdef PACELINE_DEVICE_CODE_DIR

#define PACELINE_EMBED(name)                          \
  __asm__(                                            \
      ".pushsection .rodata\n"                        \
      ".balign 64\n"                                  \
      "paceline_image_" #name                         \
      ":\n"                                           \
      ".incbin \"" PACELINE_DEVICE_CODE_DIR "/" #name \
      ".fatbin\"\n"                                   \
      ".popsection\n");                               \
  extern "C" __attribute__((visibility("hidden"))) const unsigned char paceline_image_##name[];

PACELINE_EMBED(dense)
PACELINE_EMBED(int8)
PACELINE_EMBED(topk)
PACELINE_EMBED(tensors)

namespace paceline::device::cuda {

std::span<const Image> images() {
  static constexpr std::array kImages = {
      Image{paceline_image_dense, "dense"}, Image{paceline_image_int8, "int8"},
      Image{paceline_image_topk, "topk"}, Image{paceline_image_tensors, "tensors"}};
  return kImages;
}

}  // namespace paceline::device::cuda

#else

namespace paceline::device::cuda {

std::span<const Image> images() { return {}; }

}  // namespace paceline::device::cuda

#endif
