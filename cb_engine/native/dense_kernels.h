// What a decoder computes beside attention, written once and compiled per instruction set: linear layers with packed
// weights, RMS norms, rotary embeddings. Included by isa_*.cpp only.
//
// A linear layer goes by tiles of kTileRows rows and one panel of weights:
//
//          panel p                     W [panel, K / P, 32, P]: a panel is one stream, read front to back, once per
//          |<32>|                      group of rows; the first group finds it in the second-level cache, because
//   A  x   |    |   = acc [rows, 32]   the groups of panel p - 1 have fetched it, a slice each.
//  [rows,K]| K  |     in registers
//
// The same bits, however the work is cut: each output adds its K products in the same order and the same pieces, whatever rows share its
// tile and whatever thread has its panel. So a token's result does not depend on the batch it was computed in.
//
// Results are rounded where the modules of transformers round them: a product of bfloat16 layers is a bfloat16 before
// it is multiplied or added, as if each operation had gone through memory.
#pragma once

#include "elements.h"
#include "kernel_api.h"

namespace {

using cb_engine::Epilogue;
using cb_engine::kPanelColumns;
using cb_engine::LinearJob;
using cb_engine::NormJob;
using cb_engine::RotaryJob;

// Rows of a tile: two vectors of accumulators each, plus operands, fit the register file.
#if defined(__AVX512F__)
constexpr int kTileRows = 12;  // 24 of 32 registers
#elif defined(__AVX2__)
constexpr int kTileRows = 2;  // 8 of 16
#else
constexpr int kTileRows = 1;  // 8 of 16
#endif
constexpr int64_t kLine = 64;  // bytes that a prefetch brings
constexpr int64_t kStepsPerSum = 512;  // products that are added in one chain; longer ones would lose digits

template <class E>
CB_INLINE Vec load_lanes(const Storage<E>* p) {
  return E::widen(p);
}

// Rounds to the element type and back.
template <class E>
CB_INLINE Vec rounded(Vec x) {
  Storage<E> room[kLanes];
  E::store_output(room, x);
  return E::widen(room);
}

template <class E>
CB_INLINE void store_lanes(Storage<E>* p, Vec x, int64_t count) {
  if (count >= kLanes) {
    E::store_output(p, x);
  } else {
    Storage<E> room[kLanes];
    E::store_output(room, x);
    memcpy(p, room, static_cast<size_t>(count) * sizeof(Storage<E>));
  }
}

template <class E>
CB_INLINE Vec load_some(const Storage<E>* p, int64_t count) {
  if (count >= kLanes) return E::widen(p);
  Storage<E> room[kLanes] = {};
  memcpy(room, p, static_cast<size_t>(count) * sizeof(Storage<E>));
  return E::widen(room);
}

CB_INLINE Vec silu(Vec x) {
  const Vec e = exp2_lanes(vmin(mul(x, splat(-kLog2E)), splat(126.0f)));
  return div(x, add(splat(1.0f), e));
}

CB_INLINE Vec gelu_tanh(Vec x) {
  const Vec inner = mul(splat(0.7978845608028654f), mul(x, fma(mul(x, x), splat(0.044715f), splat(1.0f))));
  return mul(mul(splat(0.5f), x), add(splat(1.0f), tanh_lanes(inner)));
}

// ---------------------------------------------------------------------------------------------- linear layers

// What becomes of one row's two vectors of sums.
template <class E>
static void finish_row(const LinearJob& job, int64_t row, int64_t panel, const float* sums) {
  Vec first = load(sums), second = load(sums + kLanes);
  if (job.bias != nullptr) {
    first = add(first, load(job.bias + panel * kPanelColumns));
    second = add(second, load(job.bias + panel * kPanelColumns + kLanes));
  }
  Storage<E>* output = static_cast<Storage<E>*>(job.output) + row * job.output_stride;
  if (job.epilogue == Epilogue::kSiluMul || job.epilogue == Epilogue::kGeluTanhMul) {
    // A panel is sixteen columns of the gate and the same sixteen of the other factor.
    const Vec gate = rounded<E>(first);
    const Vec active = rounded<E>(job.epilogue == Epilogue::kSiluMul ? silu(gate) : gelu_tanh(gate));
    const int64_t column = panel * kLanes;
    store_lanes<E>(output + column, mul(active, rounded<E>(second)), job.columns / 2 - column);
    return;
  }
  const int64_t column = panel * kPanelColumns, left = job.columns - column;
  if (job.epilogue == Epilogue::kAdd) {
    const Storage<E>* other = static_cast<const Storage<E>*>(job.residual) + row * job.residual_stride + column;
    first = add(load_some<E>(other, left), rounded<E>(first));
    if (left > kLanes) second = add(load_some<E>(other + kLanes, left - kLanes), rounded<E>(second));
  }
  store_lanes<E>(output + column, first, left);
  if (left > kLanes) store_lanes<E>(output + column + kLanes, second, left - kLanes);
}

// sums += `steps` products of ROWS rows with a panel, or = with FIRST. Meanwhile fetches `lines` cache lines from
// `ahead` on.
template <class E, int ROWS, bool FIRST>
CB_INLINE void add_products(const Packed<E>* rows, int64_t stride, int64_t steps,
                            const Storage<E>* weight, const char* ahead, int64_t lines,
                            float (*sums)[kPanelColumns]) {
  constexpr int kSpread = 4;  // rows that one pointer serves: fewer pointers than rows fit the integer registers
  constexpr int kPointers = (ROWS + kSpread - 1) / kSpread;
  const Packed<E>* input[kPointers];
#pragma GCC unroll 8
  for (int i = 0; i < kPointers; ++i) input[i] = rows + i * kSpread * stride;
  Vec acc[ROWS][2];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) acc[r][0] = acc[r][1] = splat(0.0f);
  for (int64_t step = 0; step < steps; ++step) {
    const typename E::Operand first = E::operand(weight), second = E::operand(weight + kLanes * E::kPair);
    weight += kPanelColumns * E::kPair;
    if (lines > 0) {  // two a step: as fast as a lone group eats its panel
      fetch_ahead(ahead);
      fetch_ahead(ahead + kLine);
      ahead += 2 * kLine;
      lines -= 2;
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const Packed<E>* a = input[r / kSpread] + (r % kSpread) * stride;
      acc[r][0] = E::multiply_add(acc[r][0], a, first);
      acc[r][1] = E::multiply_add(acc[r][1], a, second);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kPointers; ++i) input[i] += E::kPair;
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
    store(sums[r], FIRST ? acc[r][0] : add(load(sums[r]), acc[r][0]));
    store(sums[r] + kLanes, FIRST ? acc[r][1] : add(load(sums[r] + kLanes), acc[r][1]));
  }
}

// ROWS rows from `row` on against one panel, in chains of at most kStepsPerSum products.
template <class E, int ROWS>
static void linear_tile(const LinearJob& job, int64_t row, int64_t panel, const Storage<E>* weight,
                        const char* ahead, int64_t lines) {
  const Packed<E>* rows = static_cast<const Packed<E>*>(job.input) + row * job.input_stride;
  const int64_t steps = job.inner / E::kPair;
  float sums[ROWS][kPanelColumns];
  add_products<E, ROWS, true>(rows, job.input_stride, steps < kStepsPerSum ? steps : kStepsPerSum, weight, ahead,
                              lines, sums);
  for (int64_t step = kStepsPerSum; step < steps; step += kStepsPerSum) {
    const int64_t count = steps - step < kStepsPerSum ? steps - step : kStepsPerSum;
    add_products<E, ROWS, false>(rows + step * E::kPair, job.input_stride, count,
                                 weight + step * kPanelColumns * E::kPair, ahead + 2 * step * kLine,
                                 lines - 2 * step, sums);
  }
  for (int r = 0; r < ROWS; ++r) finish_row<E>(job, row + r, panel, sums[r]);
}

// From a number of rows to the code for exactly that many.
template <class E, int ROWS = kTileRows>
CB_INLINE void linear_rows(int64_t rows, const LinearJob& job, int64_t row, int64_t panel, const Storage<E>* weight,
                           const char* ahead, int64_t lines) {
  if (rows == ROWS) {
    linear_tile<E, ROWS>(job, row, panel, weight, ahead, lines);
  } else if constexpr (ROWS > 1) {
    linear_rows<E, ROWS - 1>(rows, job, row, panel, weight, ahead, lines);
  }
}

template <class E>
static void linear(const LinearJob& job, int64_t panel_begin, int64_t panel_end, int64_t row_begin, int64_t row_end) {
  const int64_t rows = row_end - row_begin, groups = (rows + kTileRows - 1) / kTileRows;
  const int64_t panel_size = job.inner * kPanelColumns;
  const int64_t panel_lines = panel_size * static_cast<int64_t>(sizeof(Storage<E>)) / kLine;
  const Storage<E>* weight = static_cast<const Storage<E>*>(job.weight) + panel_begin * panel_size;
  for (int64_t panel = panel_begin; panel < panel_end; ++panel, weight += panel_size) {
    const char* next = reinterpret_cast<const char*>(weight + panel_size);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t row = row_begin + rows * g / groups, end = row_begin + rows * (g + 1) / groups;
      const int64_t from = panel_lines * g / groups, to = panel_lines * (g + 1) / groups;
      linear_rows<E>(end - row, job, row, panel, weight, next + from * kLine, panel + 1 < panel_end ? to - from : 0);
    }
  }
}

// Rows in the form in which the left side of a product is read, for types whose stored form is another.
template <class E>
static void pack_rows(const void* input, int64_t input_stride, int64_t inner, void* output, int64_t row_begin,
                      int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const Storage<E>* from = static_cast<const Storage<E>*>(input) + row * input_stride;
    Packed<E>* to = static_cast<Packed<E>*>(output) + row * inner;
    for (int64_t k = 0; k < inner; ++k) to[k] = E::pack(from[k]);
  }
}

// ---------------------------------------------------------------------------------------------- norms, rotation

// y = x / sqrt(mean(x^2) + eps) * (weight + offset), row by row.
template <class E>
static void rms_norm(const NormJob& job, int64_t row_begin, int64_t row_end) {
  const Storage<E>* weight = static_cast<const Storage<E>*>(job.weight);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const Storage<E>* x = static_cast<const Storage<E>*>(job.input) + row / job.inner_rows * job.outer_stride +
                          row % job.inner_rows * job.inner_stride;
    Storage<E>* y = static_cast<Storage<E>*>(job.output) + row * job.columns;
    Vec sum = splat(0.0f);
    for (int64_t d = 0; d < job.columns; d += kLanes) {
      const Vec v = load_some<E>(x + d, job.columns - d);
      sum = fma(v, v, sum);
    }
    const Vec scale = splat(1.0f / __builtin_sqrtf(sum_lanes(sum) / static_cast<float>(job.columns) + job.eps));
    for (int64_t d = 0; d < job.columns; d += kLanes) {
      const int64_t left = job.columns - d;
      const Vec normed = mul(load_some<E>(x + d, left), scale);
      const Vec factor = add(load_some<E>(weight + d, left), splat(job.offset));
      store_lanes<E>(y + d, mul(job.round_first ? rounded<E>(normed) : normed, factor), left);
    }
  }
}

// In place, the halves of the first `rotary_dim` dimensions of a head against each other:
//     x1, x2 = x1 cos1 - x2 sin1, x2 cos2 + x1 sin2
template <class E>
static void rotary(const RotaryJob& job, int64_t token_begin, int64_t token_end) {
  const int64_t half = job.rotary_dim / 2;
  for (int64_t token = token_begin; token < token_end; ++token) {
    const Storage<E>* cos = static_cast<const Storage<E>*>(job.cos) + token * job.rotary_dim;
    const Storage<E>* sin = static_cast<const Storage<E>*>(job.sin) + token * job.rotary_dim;
    Storage<E>* head = static_cast<Storage<E>*>(job.heads) + token * job.token_stride;
    for (int64_t h = 0; h < job.num_heads; ++h, head += job.head_stride) {
      for (int64_t d = 0; d < half; d += kLanes) {
        const int64_t left = half - d;
        const Vec a = load_some<E>(head + d, left), b = load_some<E>(head + half + d, left);
        const Vec cos_a = load_some<E>(cos + d, left), cos_b = load_some<E>(cos + half + d, left);
        const Vec sin_a = load_some<E>(sin + d, left), sin_b = load_some<E>(sin + half + d, left);
        store_lanes<E>(head + d, sub(rounded<E>(mul(a, cos_a)), rounded<E>(mul(b, sin_a))), left);
        store_lanes<E>(head + half + d, add(rounded<E>(mul(b, cos_b)), rounded<E>(mul(a, sin_b))), left);
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------- what is exported

template <class E>
constexpr cb_engine::DenseKernels dense_kernels_of() {
  return {E::kPair, sizeof(Packed<E>) != sizeof(Storage<E>), sizeof(Packed<E>), linear<E>, pack_rows<E>, rms_norm<E>,
          rotary<E>};
}

}  // namespace
