// dense.cu as C++: see emulation.h.
#include "device/cuda/dense.cu"
