// int8.cu as C++: see emulation.h.
#include "device/cuda/int8.cu"
