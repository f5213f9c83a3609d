// tensors.cu as C++: see emulation.h.
#include "device/cuda/tensors.cu"
