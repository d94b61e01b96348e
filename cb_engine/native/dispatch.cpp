// Which instruction set this CPU gets its kernels from.
//
// Owns: the choice, and the operators that show and change it. Does not know: what the kernels do.
#include "dispatch.h"

#include <torch/library.h>

#include <atomic>
#include <vector>

namespace cb_engine {

// Weak: a compiler too old for an instruction set leaves its file out, and the entry is null.
extern "C" {
__attribute__((weak)) const KernelSet* cb_engine_kernels_portable();
__attribute__((weak)) const KernelSet* cb_engine_kernels_avx2();
__attribute__((weak)) const KernelSet* cb_engine_kernels_avx512();
__attribute__((weak)) const KernelSet* cb_engine_kernels_avx512_bf16();
}

namespace {

enum Isa : int64_t { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3, kNumIsas = 4 };

bool cpu_supports(int64_t isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  switch (isa) {
    case kAvx2: return avx2;
    case kAvx512: return avx512;
    case kAvx512Bf16: return avx512 && __builtin_cpu_supports("avx512bf16");
    default: return isa == kPortable;
  }
#else
  return isa == kPortable;
#endif
}

const KernelSet* kernel_set(int64_t isa) {
  if (!cpu_supports(isa)) return nullptr;
  switch (isa) {
    case kPortable: return cb_engine_kernels_portable ? cb_engine_kernels_portable() : nullptr;
    case kAvx2: return cb_engine_kernels_avx2 ? cb_engine_kernels_avx2() : nullptr;
    case kAvx512: return cb_engine_kernels_avx512 ? cb_engine_kernels_avx512() : nullptr;
    case kAvx512Bf16: return cb_engine_kernels_avx512_bf16 ? cb_engine_kernels_avx512_bf16() : nullptr;
    default: return nullptr;
  }
}

int64_t best_isa() {
  for (int64_t isa = kNumIsas - 1; isa > kPortable; --isa) {
    if (kernel_set(isa) != nullptr) return isa;
  }
  return kPortable;
}

std::atomic<int64_t>& current_isa() {
  static std::atomic<int64_t> isa{best_isa()};
  return isa;
}

std::vector<int64_t> supported_isas() {
  std::vector<int64_t> isas;
  for (int64_t isa = kPortable; isa < kNumIsas; ++isa) {
    if (kernel_set(isa) != nullptr) isas.push_back(isa);
  }
  return isas;
}

// For the parity tests: all sets share one cache layout, so they may be switched at any time between calls.
int64_t set_isa(int64_t isa) {
  TORCH_CHECK_VALUE(kernel_set(isa) != nullptr, "instruction set ", isa,
                    " is not available here; see supported_isas()");
  return current_isa().exchange(isa);
}

}  // namespace

const KernelSet& current_kernels() {
  const KernelSet* set = kernel_set(current_isa().load());
  TORCH_CHECK(set != nullptr, "cb_engine was built without kernels for this CPU");
  return *set;
}

TORCH_LIBRARY_FRAGMENT(cb_engine, m) {
  m.def("supported_isas() -> int[]", &supported_isas);
  m.def("set_isa(int isa) -> int", &set_isa);
}

}  // namespace cb_engine
