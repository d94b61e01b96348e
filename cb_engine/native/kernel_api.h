// The seam between the torch-facing operators (paged_attention.cpp, dense.cpp, sampling.cpp) and the numeric kernels
// (attention_kernels.h, dense_kernels.h, sampling_kernels.h).
//
// Plain data only: the kernels are compiled once per instruction set, with different compiler flags, so nothing
// that could be emitted as a shared inline function (std::, torch headers) may be seen from their side. Otherwise
// the linker might keep an AVX-512 copy of, say, std::max for the whole library.
#pragma once

#include <cstdint>

namespace cb_engine {

// Cache layouts. P is 2 for bfloat16 (two neighbours make the 32-bit lane that VDPBF16PS eats) and 1 otherwise.
//
//   K  [block, kv_head, block_size / G, ceil(D / P), G, P]      G tokens side by side, so that one vector load is
//                                                               one pair of dimensions of 16 tokens: no horizontal
//                                                               sums. G = 16, or block_size if 16 does not divide it.
//   V  [block, kv_head, ceil(block_size / P), D16, P]           D16: D rounded up to 16. One vector load is one
//                                                               pair of tokens of 16 dimensions.
constexpr int kLanes = 16;    // floats in a vector, whatever the instruction set calls one
constexpr int kTile = 64;     // keys per softmax step
constexpr int kPiece = 256;   // keys whose partial softmax is one unit of accumulation and of work splitting

// One call of paged attention. Strides count elements.
struct AttentionJob {
  const void* query;
  const void* key;
  const void* value;
  void* output;  // contiguous [T, num_heads, head_dim]
  void* k_cache;
  void* v_cache;
  const int64_t* slot_mapping;
  const int32_t* block_table;
  const float* sinks;  // [num_heads] or null

  int64_t query_stride[2];  // token, head
  int64_t key_stride[2];
  int64_t value_stride[2];
  int64_t k_block_stride, k_head_stride;
  int64_t v_block_stride, v_head_stride;
  int64_t table_stride;

  int64_t num_blocks;
  int64_t block_size;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t max_unit_tokens;  // most query tokens that one Unit of this call holds
  bool units_write;         // whether a Unit writes its keys and values itself: no other one reads them
  int64_t window;           // 0: unlimited
  float scale;
  float softcap;  // 0: none
};

// A piece of work: some consecutive query tokens of one request, all query heads of one kv head.
struct Unit {
  int32_t request;  // row of the block table
  int32_t kv_head;
  int64_t first_token;     // row of the packed query
  int32_t num_tokens;
  int64_t first_position;  // position of first_token in its sequence; may be negative for malformed input
  int64_t key_begin, key_end;
  float* partial;  // null: write the output; else: leave the softmax state here for `merge`
};

// What one instruction set offers for one element type.
struct AttentionKernels {
  int32_t pair;  // P above
  int64_t (*scratch_bytes)(const AttentionJob&);
  int64_t (*partial_floats)(const AttentionJob&, int64_t num_tokens);
  // Slots have been checked before.
  void (*write)(const AttentionJob&, int64_t token_begin, int64_t token_end, int64_t head_begin, int64_t head_end);
  // Returns false if it met a block id outside the cache; such an id is replaced, never followed.
  bool (*attend)(const AttentionJob&, const Unit&, const Unit* next, void* scratch);
  void (*merge)(const AttentionJob&, const Unit&, float* partials, int64_t count);
};

// Weights of a linear layer: W [ceil(N / 32), K / P, 32, P]. Columns beyond N are zero.
constexpr int kPanelColumns = 32;

// What becomes of the sums of a linear layer before they are written. With the last two, the columns of a gate and of
// its partner take turns, sixteen each, and the output is half as wide.
enum class Epilogue : int32_t { kNone = 0, kAdd = 1, kSiluMul = 2, kGeluTanhMul = 3 };

struct LinearJob {
  const void* input;     // [M, K]
  const void* weight;
  const float* bias;     // [32 * panels] or null
  const void* residual;  // [M, N], for kAdd
  void* output;          // [M, N] or [M, N / 2]
  int64_t input_stride, residual_stride, output_stride;
  int64_t inner;         // K
  int64_t columns;       // N
  Epilogue epilogue;
};

struct NormJob {
  const void* input;
  const void* weight;  // [columns]
  void* output;        // contiguous
  int64_t outer_stride, inner_stride;  // row r starts at r / inner_rows * outer_stride + r % inner_rows * inner_stride
  int64_t inner_rows;
  int64_t columns;
  float eps;
  float offset;      // added to the weight
  bool round_first;  // whether the normed row is rounded to its type before the weight comes
};

struct RotaryJob {
  void* heads;  // [T, num_heads, head_dim], changed in place
  const void* cos;  // contiguous [T, rotary_dim]
  const void* sin;
  int64_t token_stride, head_stride;
  int64_t num_heads, rotary_dim;
};

struct DenseKernels {
  int32_t pair;         // P above
  bool packs_rows;      // whether the input of `linear` has to go through `pack_rows`
  int64_t packed_bytes;  // of one element after that
  void (*linear)(const LinearJob&, int64_t panel_begin, int64_t panel_end, int64_t row_begin, int64_t row_end);
  void (*pack_rows)(const void* input, int64_t input_stride, int64_t inner, void* output, int64_t row_begin,
                    int64_t row_end);
  void (*rms_norm)(const NormJob&, int64_t row_begin, int64_t row_end);
  void (*rotary)(const RotaryJob&, int64_t token_begin, int64_t token_end);
};

struct DrawJob {
  const void* logits;  // [R, V]
  int64_t row_stride;
  int64_t vocab;             // V
  const float* temperature;  // [R]; 0: the best token
  const double* uniform;     // [R], in [0, 1)
  int64_t* token_ids;        // [R]
  bool* failed;              // [R]: NaN or infinity among the logits, or nothing but -infinity
  float* sums;               // [R]: of exp((x - best) / temperature); 1 where there was no draw
};

struct SamplingKernels {
  int64_t block;  // tokens that one entry of `block_sums` stands for
  void (*draw)(const DrawJob&, int64_t row_begin, int64_t row_end, double* block_sums);
};

template <class T>
struct PerElement {
  T float32, bfloat16, float16;
};

struct KernelSet {
  PerElement<AttentionKernels> attention;
  PerElement<DenseKernels> dense;
  PerElement<SamplingKernels> sampling;
};

}  // namespace cb_engine
