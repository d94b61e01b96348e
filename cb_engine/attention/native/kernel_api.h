// The seam between the torch-facing operator (paged_attention.cpp) and the numeric kernels (kernels.h).
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

// One call of the operator. Strides count elements.
struct Job {
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
struct Kernels {
  int32_t pair;  // P above
  int64_t (*scratch_bytes)(const Job&);
  int64_t (*partial_floats)(const Job&, int64_t num_tokens);
  // Each returns false if it met a block id or slot outside the cache; such an id is replaced, never followed.
  bool (*write)(const Job&, int64_t token_begin, int64_t token_end);
  bool (*attend)(const Job&, const Unit&, const Unit* next, void* scratch);
  void (*merge)(const Job&, const Unit&, float* partials, int64_t count);
};

struct KernelSet {
  Kernels float32, bfloat16, float16;
};

}  // namespace cb_engine
