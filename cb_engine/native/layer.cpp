// The operator `cb_engine::decoder_layer`: a layer of a transformer in one call.
//
// Owns: the order of the operators in a layer. It computes what `FusedDecoderLayer` does by calling them one by one
// (runner/fusion/modules.py; the two change together, and fuse.py checks this one against the model's own layer),
// without a way through Python and torch's dispatcher for each: some thirty layers of ten calls are several
// milliseconds, as much as a tenth of a decode step.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <optional>

#include "kernel_api.h"
#include "operators.h"

namespace cb_engine {
namespace {

using Optional = std::optional<at::Tensor>;

at::Tensor decoder_layer(
    const at::Tensor& hidden, const Optional& cos, const Optional& sin,
    const at::Tensor& k_cache, const at::Tensor& v_cache, const at::Tensor& slot_mapping,
    const at::Tensor& block_table, const at::Tensor& query_start_loc, const at::Tensor& seq_lens,
    const at::Tensor& input_norm, double input_eps, double input_offset, bool input_round_first,
    const at::Tensor& qkv_weight, const Optional& qkv_bias, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
    const Optional& q_norm, double q_eps, double q_offset, bool q_round_first,
    const Optional& k_norm, double k_eps, double k_offset, bool k_round_first,
    double scale, int64_t window, double softcap, const Optional& sinks,
    const at::Tensor& out_weight, const Optional& out_bias,
    const at::Tensor& post_norm, double post_eps, double post_offset, bool post_round_first,
    const at::Tensor& gate_up_weight, int64_t gate_up_columns, const Optional& gate_up_bias, int64_t activation,
    const at::Tensor& down_weight, const Optional& down_bias) {
  TORCH_CHECK_VALUE(hidden.dim() == 3 && hidden.size(0) == 1, "hidden must be [1, T, dim], got ", hidden.sizes());
  TORCH_CHECK_VALUE(cos.has_value() == sin.has_value(), "cos and sin come together");
  TORCH_CHECK_VALUE(q_norm.has_value() == k_norm.has_value(), "q_norm and k_norm come together");
  const int64_t num_tokens = hidden.size(1), dim = hidden.size(2);
  constexpr auto kNone = static_cast<int64_t>(Epilogue::kNone), kAdd = static_cast<int64_t>(Epilogue::kAdd);

  at::Tensor normed = rms_norm(hidden, input_norm, input_eps, input_offset, input_round_first);
  const int64_t all_heads = num_heads + 2 * num_kv_heads;
  const at::Tensor qkv = linear(normed, qkv_weight, all_heads * head_dim, qkv_bias, {}, kNone)
                             .view({num_tokens, all_heads, head_dim});
  at::Tensor query = qkv.narrow(1, 0, num_heads), key = qkv.narrow(1, num_heads, num_kv_heads);
  const at::Tensor value = qkv.narrow(1, num_heads + num_kv_heads, num_kv_heads);
  if (q_norm.has_value()) {
    query = rms_norm(query, *q_norm, q_eps, q_offset, q_round_first);
    key = rms_norm(key, *k_norm, k_eps, k_offset, k_round_first);
  }
  if (cos.has_value()) {
    if (q_norm.has_value()) {
      rotary_(query, *cos, *sin);
      rotary_(key, *cos, *sin);
    } else {
      rotary_(qkv.narrow(1, 0, num_heads + num_kv_heads), *cos, *sin);
    }
  }
  const at::Tensor attended =
      paged_attention(query, key, value, k_cache, v_cache, slot_mapping, block_table, query_start_loc, seq_lens, scale,
                      window, softcap, sinks)
          .view({1, num_tokens, num_heads * head_dim});
  const at::Tensor middle = linear(attended, out_weight, dim, out_bias, hidden, kAdd);
  normed = rms_norm(middle, post_norm, post_eps, post_offset, post_round_first);
  const at::Tensor gated = linear(normed, gate_up_weight, gate_up_columns, gate_up_bias, {}, activation);
  return linear(gated, down_weight, dim, down_bias, middle, kAdd);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cb_engine, m) {
  m.def(
      "decoder_layer(Tensor hidden, Tensor? cos, Tensor? sin, "
      "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, Tensor block_table, Tensor query_start_loc, "
      "Tensor seq_lens, "
      "Tensor input_norm, float input_eps, float input_offset, bool input_round_first, "
      "Tensor qkv_weight, Tensor? qkv_bias, int num_heads, int num_kv_heads, int head_dim, "
      "Tensor? q_norm, float q_eps, float q_offset, bool q_round_first, "
      "Tensor? k_norm, float k_eps, float k_offset, bool k_round_first, "
      "float scale, int window, float softcap, Tensor? sinks, "
      "Tensor out_weight, Tensor? out_bias, "
      "Tensor post_norm, float post_eps, float post_offset, bool post_round_first, "
      "Tensor gate_up_weight, int gate_up_columns, Tensor? gate_up_bias, int activation, "
      "Tensor down_weight, Tensor? down_bias) -> Tensor");
}

TORCH_LIBRARY_IMPL(cb_engine, CPU, m) { m.impl("decoder_layer", &decoder_layer); }

}  // namespace cb_engine
