// The kernels for: AVX-512 F, BW, DQ and VL. build.py gives this file its compiler flags.
#include "kernel_set.h"

namespace cb_engine {
extern "C" __attribute__((visibility("default"))) const KernelSet* cb_engine_kernels_avx512() {
  return &kKernelSet;
}
}  // namespace cb_engine
