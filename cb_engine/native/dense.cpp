// The operators `cb_engine::linear`, `rms_norm` and `rotary_`: check their tensors and share the work out to torch's
// thread pool.
//
// Owns: argument checks and work splitting. Does not know: arithmetic (dense_kernels.h).

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "dispatch.h"
#include "operators.h"

namespace cb_engine {
namespace {

constexpr int64_t kFlopsPerThread = 1 << 17;  // less is not worth waking a thread for
constexpr int64_t kElementsPerThread = 1 << 14;
constexpr int64_t kRowsPerChunk = 48;  // rows are shared out as well as panels only if both shares have so many

const DenseKernels& dense_kernels(const at::Tensor& like) {
  return kernels_for(current_kernels().dense, like.scalar_type());
}

void check_like(const at::Tensor& x, const char* name, const at::Tensor& like) {
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.device().is_cpu() && x.scalar_type() == like.scalar_type(), name,
                    " must be a CPU tensor of the input's dtype");
}

// The distance between rows of a tensor whose leading axes, all but the last ones, can be seen as one; -1 if they
// cannot. An expanded axis, whose rows are all the same one, is none of those.
int64_t row_stride(const at::Tensor& x, int64_t last_axes = 1) {
  int64_t stride = 0, expected = 0;
  for (int64_t axis = x.dim() - 1 - last_axes; axis >= 0; --axis) {
    if (x.size(axis) == 1) continue;
    if (expected == 0) stride = expected = x.stride(axis);
    if (x.stride(axis) == 0 || x.stride(axis) != expected) return -1;
    expected *= x.size(axis);
  }
  return stride;
}

// The tensor itself, or a copy where its rows do not lie as the kernels read them.
at::Tensor with_even_rows(const at::Tensor& x) {
  const bool whole = x.size(-1) <= 1 || x.stride(-1) == 1;
  return whole && row_stride(x) >= 0 ? x : x.contiguous();
}

// Whether all axes before the last two can be seen as one; the one before the last may have any stride: the heads of
// a fused projection.
bool has_even_heads(const at::Tensor& x) {
  const bool whole = x.size(-1) <= 1 || x.stride(-1) == 1;
  return whole && row_stride(x, 2) >= 0;
}

// Threads take runs of (chunk of rows, panel), chunk by chunk, so that each reads its weights front to back. Rows are
// cut where the panels alone would leave threads idle.
void run_linear(const LinearJob& job, const DenseKernels& kernels, int64_t rows) {
  const int64_t panels = (job.columns + kPanelColumns - 1) / kPanelColumns;
  const int64_t flops = 2 * rows * job.inner * job.columns;
  const int64_t threads = std::clamp<int64_t>(flops / kFlopsPerThread, 1, at::get_num_threads());
  int64_t chunks = 1;
  const auto idle = [&](int64_t n) {  // share of the threads' time that is left over
    const int64_t turns = (panels * n + threads - 1) / threads;
    return 1.0 - static_cast<double>(panels * n) / static_cast<double>(turns * threads);
  };
  while (idle(chunks) > 0.05 && rows / (chunks + 1) >= kRowsPerChunk) ++chunks;
  const int64_t units = panels * chunks;
  at::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
    for (int64_t unit = units * first / threads, end = units * last / threads; unit < end;) {
      const int64_t chunk = unit / panels, panel = unit % panels;
      const int64_t count = std::min(panels - panel, end - unit);
      kernels.linear(job, panel, panel + count, rows * chunk / chunks, rows * (chunk + 1) / chunks);
      unit += count;
    }
  });
}

}  // namespace

at::Tensor linear(const at::Tensor& any_input, const at::Tensor& weight, int64_t columns,
                  const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& residual,
                  int64_t epilogue) {
  RECORD_FUNCTION("cb_engine::linear", {});  // in a profiler's trace also where an operator calls this
  const DenseKernels& kernels = dense_kernels(any_input);
  check_like(any_input, "input", any_input);
  const at::Tensor input = with_even_rows(any_input);
  const int64_t inner = input.size(-1), rows = inner == 0 ? 0 : input.numel() / inner;
  const int64_t panels = (columns + kPanelColumns - 1) / kPanelColumns;
  TORCH_CHECK_VALUE(weight.dim() == 4 && weight.size(0) == panels && weight.size(1) * kernels.pair == inner &&
                        weight.size(2) == kPanelColumns && weight.size(3) == kernels.pair && weight.is_contiguous() &&
                        weight.scalar_type() == input.scalar_type() && weight.device().is_cpu(),
                    "a packed weight ", weight.sizes(), " of ", weight.scalar_type(), " does not fit an input ",
                    input.sizes(), " of ", input.scalar_type(), "; has the model changed its dtype or device?");
  TORCH_CHECK_VALUE(epilogue >= 0 && epilogue <= 3, "unknown epilogue ", epilogue);
  const auto kind = static_cast<Epilogue>(epilogue);
  const bool gated = kind == Epilogue::kSiluMul || kind == Epilogue::kGeluTanhMul;

  std::vector<int64_t> sizes = input.sizes().vec();
  sizes.back() = gated ? columns / 2 : columns;
  const at::Tensor output = at::empty(sizes, input.options().memory_format(at::MemoryFormat::Contiguous));
  LinearJob job{};
  if (bias.has_value()) {
    TORCH_CHECK_VALUE(bias->device().is_cpu() && bias->scalar_type() == at::kFloat && bias->is_contiguous() &&
                          bias->numel() == panels * kPanelColumns,
                      "bias must be float32 on the CPU, padded to whole panels");
    job.bias = bias->const_data_ptr<float>();
  }
  TORCH_CHECK_VALUE(residual.has_value() == (kind == Epilogue::kAdd), "a residual is for the epilogue that adds it");
  at::Tensor other;
  if (residual.has_value()) {
    check_like(*residual, "residual", input);
    TORCH_CHECK_VALUE(residual->sizes() == output.sizes(), "residual must have the output's shape");
    other = with_even_rows(*residual);
    job.residual = other.const_data_ptr();
    job.residual_stride = row_stride(other);
  }
  if (output.numel() == 0) return output;
  job.input = input.const_data_ptr();
  job.input_stride = row_stride(input);
  job.weight = weight.const_data_ptr();
  job.output = output.mutable_data_ptr();
  job.output_stride = sizes.back();
  job.inner = inner;
  job.columns = columns;
  job.epilogue = kind;
  at::Tensor packed;
  if (kernels.packs_rows) {
    packed = at::empty({rows * inner * kernels.packed_bytes}, input.options().dtype(at::kByte));
    at::parallel_for(0, rows, std::max<int64_t>(1, kElementsPerThread / inner), [&](int64_t begin, int64_t end) {
      kernels.pack_rows(input.const_data_ptr(), job.input_stride, inner, packed.mutable_data_ptr(), begin, end);
    });
    job.input = packed.const_data_ptr();
    job.input_stride = inner;
  }
  run_linear(job, kernels, rows);
  return output;
}

at::Tensor rms_norm(const at::Tensor& any_input, const at::Tensor& weight, double eps, double offset,
                    bool round_first) {
  RECORD_FUNCTION("cb_engine::rms_norm", {});
  const DenseKernels& kernels = dense_kernels(any_input);
  check_like(any_input, "input", any_input);
  check_like(weight, "weight", any_input);
  const int64_t columns = any_input.size(-1);
  TORCH_CHECK_VALUE(weight.dim() == 1 && weight.size(0) == columns && weight.is_contiguous(), "weight must be [",
                    columns, "], got ", weight.sizes());
  if (any_input.numel() == 0) return at::empty(any_input.sizes(), any_input.options());
  const at::Tensor input = has_even_heads(any_input) ? any_input : any_input.contiguous();
  const at::Tensor output = at::empty(input.sizes(), input.options().memory_format(at::MemoryFormat::Contiguous));
  NormJob job{};
  job.input = input.const_data_ptr();
  job.weight = weight.const_data_ptr();
  job.output = output.mutable_data_ptr();
  job.inner_rows = input.dim() >= 2 ? input.size(-2) : 1;
  job.inner_stride = input.dim() >= 2 ? input.stride(-2) : 0;
  job.outer_stride = row_stride(input, 2);
  job.columns = columns;
  job.eps = static_cast<float>(eps);
  job.offset = static_cast<float>(offset);
  job.round_first = round_first;
  const int64_t rows = input.numel() / columns;
  at::parallel_for(0, rows, std::max<int64_t>(1, kElementsPerThread / columns),
                   [&](int64_t begin, int64_t end) { kernels.rms_norm(job, begin, end); });
  return output;
}

void rotary_(const at::Tensor& heads, const at::Tensor& cos, const at::Tensor& sin) {
  RECORD_FUNCTION("cb_engine::rotary_", {});
  const DenseKernels& kernels = dense_kernels(heads);
  check_like(heads, "heads", heads);
  check_like(cos, "cos", heads);
  const int64_t rotary_dim = cos.size(-1);
  TORCH_CHECK_VALUE(heads.dim() == 3 && cos.numel() == heads.size(0) * rotary_dim && cos.is_contiguous() &&
                        rotary_dim % 2 == 0 && rotary_dim <= heads.size(2) && heads.stride(2) == 1,
                    "heads must be [T, H, D], contiguous along D, and cos a contiguous [T, R], R even and at most D");
  TORCH_CHECK_VALUE(sin.sizes() == cos.sizes() && sin.is_contiguous() && sin.scalar_type() == cos.scalar_type() &&
                        sin.device().is_cpu(),
                    "sin must be like cos");
  if (heads.numel() == 0 || cos.numel() == 0) return;
  RotaryJob job{};
  job.heads = heads.mutable_data_ptr();
  job.cos = cos.const_data_ptr();
  job.sin = sin.const_data_ptr();
  job.token_stride = heads.stride(0);
  job.head_stride = heads.stride(1);
  job.num_heads = heads.size(1);
  job.rotary_dim = rotary_dim;
  const int64_t per_token = job.num_heads * job.rotary_dim;
  at::parallel_for(0, heads.size(0), std::max<int64_t>(1, kElementsPerThread / per_token),
                   [&](int64_t begin, int64_t end) { kernels.rotary(job, begin, end); });
}

TORCH_LIBRARY_FRAGMENT(cb_engine, m) {
  m.def(
      "linear(Tensor input, Tensor weight, int columns, Tensor? bias, Tensor? residual, int epilogue) -> Tensor");
  m.def("rms_norm(Tensor input, Tensor weight, float eps, float offset, bool round_first) -> Tensor");
  m.def("rotary_(Tensor(a!) heads, Tensor cos, Tensor sin) -> ()");
}

TORCH_LIBRARY_IMPL(cb_engine, CPU, m) {
  m.impl("linear", &linear);
  m.impl("rms_norm", &rms_norm);
  m.impl("rotary_", &rotary_);
}

}  // namespace cb_engine
