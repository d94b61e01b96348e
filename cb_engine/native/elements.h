// Element types of the cache: how to turn stored values into operands of a multiply-accumulate.
//
// Both matrix products of attention have the same inner step, one scalar (or pair) of the left side against a
// vector of sixteen columns of the right side:
//
//     scores[row][token] += query[row][dim pair]    * K[dim pair][token]
//     output[row][dim]   += weight[row][token pair] * V[token pair][dim]
//
// and so has a linear layer. `widen` loads sixteen stored values as floats.
// `Packed` is the left side's type in scratch memory; `Operand` a loaded vector of the right side.
#pragma once

#include "kernel_api.h"
#include "vec.h"

namespace {

using cb_engine::kLanes;

struct Float32 {
  using Storage = float;
  using Packed = float;
  using Operand = Vec;
  static constexpr int kPair = 1;

  CB_INLINE Operand operand(const Storage* p) { return load(p); }
  CB_INLINE Vec widen(const Storage* p) { return load(p); }
  CB_INLINE Vec multiply_add(Vec acc, const Packed* a, Operand b) { return fma(splat(*a), b, acc); }
  CB_INLINE void store_packed(Packed* p, Vec a) { store(p, a); }
  CB_INLINE void store_output(Storage* p, Vec a) { store(p, a); }
  CB_INLINE Packed pack(Storage x) { return x; }
};

struct Float16 {
  using Storage = uint16_t;
  using Packed = float;
  using Operand = Vec;
  static constexpr int kPair = 1;

  CB_INLINE Operand operand(const Storage* p) { return load_f16(p); }
  CB_INLINE Vec widen(const Storage* p) { return load_f16(p); }
  CB_INLINE Vec multiply_add(Vec acc, const Packed* a, Operand b) { return fma(splat(*a), b, acc); }
  CB_INLINE void store_packed(Packed* p, Vec a) { store(p, a); }
  CB_INLINE void store_output(Storage* p, Vec a) { store_f16(p, a); }
  CB_INLINE Packed pack(Storage x) {
#if defined(__AVX2__)
    return _cvtsh_ss(x);
#else
    return f16_to_float(x);
#endif
  }
};

CB_INLINE float bf16_to_float(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

CB_INLINE uint16_t float_to_bf16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

#if defined(__AVX512BF16__)

// One instruction multiplies sixteen pairs and adds both products; weights are rounded to bfloat16 for it.
struct BFloat16 {
  using Storage = uint16_t;
  using Packed = uint16_t;
  using Operand = __m512bh;
  static constexpr int kPair = 2;

  CB_INLINE Operand operand(const Storage* p) { return (__m512bh)_mm512_loadu_si512(p); }
  CB_INLINE Vec widen(const Storage* p) { return load_bf16(p); }
  CB_INLINE Vec multiply_add(Vec acc, const Packed* a, Operand b) {
    int32_t pair;
    memcpy(&pair, a, 4);
    return {_mm512_dpbf16_ps(acc.v, b, (__m512bh)_mm512_set1_epi32(pair))};
  }
  CB_INLINE void store_packed(Packed* p, Vec a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a.v));
  }
  CB_INLINE void store_output(Storage* p, Vec a) { store_packed(p, a); }
  CB_INLINE Packed pack(Storage x) { return x; }
};

#else

// A bfloat16 is the upper half of a float, so a 32-bit lane with a pair is two floats for two cheap operations.
struct BFloat16 {
  using Storage = uint16_t;
  using Packed = float;
  struct Operand {
    Vec low, high;
  };
  static constexpr int kPair = 2;

  CB_INLINE Operand operand(const Storage* p) {
    Operand r;
    split_bf16_pairs(p, &r.low, &r.high);
    return r;
  }
  CB_INLINE Vec widen(const Storage* p) { return load_bf16(p); }
  CB_INLINE Vec multiply_add(Vec acc, const Packed* a, Operand b) {
    return fma(splat(a[1]), b.high, fma(splat(a[0]), b.low, acc));
  }
  CB_INLINE void store_packed(Packed* p, Vec a) { store(p, a); }
  CB_INLINE void store_output(Storage* p, Vec a) {
    float f[16];
    store(f, a);
    for (int i = 0; i < 16; ++i) p[i] = float_to_bf16(f[i]);
  }
  CB_INLINE Packed pack(Storage x) { return bf16_to_float(x); }
};

#endif

template <class E>
using Storage = typename E::Storage;
template <class E>
using Packed = typename E::Packed;

}  // namespace
