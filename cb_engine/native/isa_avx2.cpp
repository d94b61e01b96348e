// The kernels for: AVX2, FMA and F16C. build.py gives this file its compiler flags.
#include "kernel_set.h"

namespace cb_engine {
extern "C" __attribute__((visibility("default"))) const KernelSet* cb_engine_kernels_avx2() {
  return &kKernelSet;
}
}  // namespace cb_engine
