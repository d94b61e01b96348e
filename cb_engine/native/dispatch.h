// The kernels that the operators call.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include "kernel_api.h"

namespace cb_engine {

// Those of the best instruction set that this CPU has, unless set_isa has chosen another.
const KernelSet& current_kernels();

template <class T>
const T& kernels_for(const PerElement<T>& kernels, c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kFloat: return kernels.float32;
    case c10::kBFloat16: return kernels.bfloat16;
    case c10::kHalf: return kernels.float16;
    default: TORCH_CHECK_TYPE(false, "native kernels take float32, bfloat16 and float16, not ", dtype);
  }
}

}  // namespace cb_engine
