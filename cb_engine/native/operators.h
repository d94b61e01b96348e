// The operators as functions, for an operator that is made of others.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace cb_engine {

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, int64_t columns,
                  const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& residual, int64_t epilogue);

at::Tensor rms_norm(const at::Tensor& input, const at::Tensor& weight, double eps, double offset, bool round_first);

void rotary_(const at::Tensor& heads, const at::Tensor& cos, const at::Tensor& sin);

at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const at::Tensor& k_cache, const at::Tensor& v_cache, const at::Tensor& slot_mapping,
                           const at::Tensor& block_table, const at::Tensor& query_start_loc,
                           const at::Tensor& seq_lens, double scale, int64_t window, double softcap,
                           const std::optional<at::Tensor>& sinks);

}  // namespace cb_engine
