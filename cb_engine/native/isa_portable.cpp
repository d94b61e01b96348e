// The kernels for: baseline instructions of the target (SSE2 on x86-64, NEON on 64-bit ARM).
// build.py gives this file its compiler flags.
#include "kernel_set.h"

namespace cb_engine {
extern "C" __attribute__((visibility("default"))) const KernelSet* cb_engine_kernels_portable() {
  return &kKernelSet;
}
}  // namespace cb_engine
