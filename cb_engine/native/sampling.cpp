// The operator `cb_engine::draw`: checks its tensors and shares the rows out to torch's thread pool.
//
// Owns: argument checks and work splitting. Does not know: arithmetic (sampling_kernels.h), seeds.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "dispatch.h"

namespace cb_engine {
namespace {

constexpr int64_t kTokensPerThread = 1 << 15;  // less is not worth waking a thread for

std::tuple<at::Tensor, at::Tensor, at::Tensor> draw(const at::Tensor& logits, const at::Tensor& temperature,
                                                    const at::Tensor& uniform) {
  TORCH_CHECK_VALUE(logits.dim() == 2 && logits.size(1) > 0 && logits.device().is_cpu() &&
                        (logits.size(1) == 1 || logits.stride(1) == 1),
                    "logits must be a CPU tensor [R, V], contiguous along V");
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  const auto check = [&](const at::Tensor& x, const char* name, at::ScalarType dtype) {
    TORCH_CHECK_VALUE(x.dim() == 1 && x.size(0) == rows && x.scalar_type() == dtype && x.is_contiguous() &&
                          x.device().is_cpu(),
                      name, " must be a contiguous CPU tensor [", rows, "] of ", dtype);
  };
  check(temperature, "temperature", at::kFloat);
  check(uniform, "uniform", at::kDouble);
  const SamplingKernels& kernels = kernels_for(current_kernels().sampling, logits.scalar_type());
  const at::Tensor token_ids = at::empty({rows}, logits.options().dtype(at::kLong));
  const at::Tensor failed = at::empty({rows}, logits.options().dtype(at::kBool));
  const at::Tensor sums = at::empty({rows}, logits.options().dtype(at::kFloat));
  DrawJob job{};
  job.logits = logits.const_data_ptr();
  job.row_stride = logits.stride(0);
  job.vocab = vocab;
  job.temperature = temperature.const_data_ptr<float>();
  job.uniform = uniform.const_data_ptr<double>();
  job.token_ids = token_ids.mutable_data_ptr<int64_t>();
  job.failed = failed.mutable_data_ptr<bool>();
  job.sums = sums.mutable_data_ptr<float>();
  at::parallel_for(0, rows, std::max<int64_t>(1, kTokensPerThread / vocab), [&](int64_t begin, int64_t end) {
    std::vector<double> block_sums((vocab + kernels.block - 1) / kernels.block);
    kernels.draw(job, begin, end, block_sums.data());
  });
  return {token_ids, failed, sums};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cb_engine, m) {
  m.def("draw(Tensor logits, Tensor temperature, Tensor uniform) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(cb_engine, CPU, m) { m.impl("draw", &draw); }

}  // namespace cb_engine
