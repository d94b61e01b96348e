// The kernels for: AVX-512 with the bfloat16 dot product. build.py gives this file its compiler flags.
#include "kernel_set.h"

namespace cb_engine {
extern "C" __attribute__((visibility("default"))) const KernelSet* cb_engine_kernels_avx512_bf16() {
  return &kKernelSet;
}
}  // namespace cb_engine
