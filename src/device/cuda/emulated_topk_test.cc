// topk.cu as C++: see emulation.h.
#include "device/cuda/topk.cu"
