// `Vec`: sixteen floats, in one AVX-512 register, two AVX2 registers or four registers of whatever the portable
// path finds. The kernels are written once on top of it. All here is in an unnamed namespace and forced inline,
// because this header is compiled several times with different flags.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define CB_INLINE static inline __attribute__((always_inline))

namespace {

#if defined(__AVX512F__)

struct Vec {
  __m512 v;
};

CB_INLINE Vec splat(float x) { return {_mm512_set1_ps(x)}; }
CB_INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
CB_INLINE void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
CB_INLINE Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
CB_INLINE Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
CB_INLINE Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
CB_INLINE Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
CB_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Both return b when either side is NaN, as the x86 instructions do; exp2_lanes and the softmax rely on it.
CB_INLINE Vec vmax(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
CB_INLINE Vec vmin(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
CB_INLINE Vec if_less(Vec a, Vec b, Vec yes, Vec no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
// Lanes [lo, hi) of a, `other` elsewhere. A selection, not arithmetic: NaN in a dropped lane is gone.
CB_INLINE Vec keep_lanes(Vec a, int lo, int hi, float other) {
  const uint32_t below_hi = hi >= 16 ? 0xFFFFu : (1u << (hi < 0 ? 0 : hi)) - 1u;
  const uint32_t below_lo = lo >= 16 ? 0xFFFFu : (1u << (lo < 0 ? 0 : lo)) - 1u;
  return {_mm512_mask_blend_ps(static_cast<__mmask16>(below_hi & ~below_lo), _mm512_set1_ps(other), a.v)};
}
CB_INLINE float sum_lanes(Vec a) { return _mm512_reduce_add_ps(a.v); }
CB_INLINE float max_lanes(Vec a) { return _mm512_reduce_max_ps(a.v); }

// 2^n and the fraction in [-0.5, 0.5] that is left of x.
CB_INLINE Vec split_exponent(Vec x, Vec* fraction) {
  const __m512 n = _mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  fraction->v = _mm512_sub_ps(x.v, n);
  const __m512i bits = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
  return {_mm512_castsi512_ps(bits)};
}

// Sixteen 32-bit lanes that hold two bfloat16 each, as floats: the low halves and the high halves.
CB_INLINE void split_bf16_pairs(const uint16_t* p, Vec* low, Vec* high) {
  const __m512i x = _mm512_loadu_si512(p);
  low->v = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
  high->v = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
}
CB_INLINE Vec load_bf16(const uint16_t* p) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))};
}
CB_INLINE Vec load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
CB_INLINE void store_f16(uint16_t* p, Vec a) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, kNearest));
}

#elif defined(__AVX2__)

struct Vec {
  __m256 a, b;
};

CB_INLINE Vec splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
CB_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
CB_INLINE void store(float* p, Vec x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
CB_INLINE Vec add(Vec x, Vec y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
CB_INLINE Vec sub(Vec x, Vec y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
CB_INLINE Vec mul(Vec x, Vec y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
CB_INLINE Vec div(Vec x, Vec y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
CB_INLINE Vec fma(Vec x, Vec y, Vec z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
CB_INLINE Vec vmax(Vec x, Vec y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
CB_INLINE Vec vmin(Vec x, Vec y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
CB_INLINE Vec if_less(Vec x, Vec y, Vec yes, Vec no) {
  return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
CB_INLINE __m256 keep_half(__m256 x, int first_lane, int lo, int hi, float other) {
  const __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(first_lane));
  const __m256i in = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(lo), lane),
                                         _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), lane));
  return _mm256_blendv_ps(_mm256_set1_ps(other), x, _mm256_castsi256_ps(in));
}
CB_INLINE Vec keep_lanes(Vec x, int lo, int hi, float other) {
  return {keep_half(x.a, 0, lo, hi, other), keep_half(x.b, 8, lo, hi, other)};
}
CB_INLINE float sum_lanes(Vec x) {
  const __m256 h = _mm256_add_ps(x.a, x.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
CB_INLINE float max_lanes(Vec x) {
  const __m256 h = _mm256_max_ps(x.a, x.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
CB_INLINE __m256 split_half(__m256 x, __m256* fraction) {
  const __m256 n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  *fraction = _mm256_sub_ps(x, n);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
CB_INLINE Vec split_exponent(Vec x, Vec* fraction) {
  return {split_half(x.a, &fraction->a), split_half(x.b, &fraction->b)};
}
CB_INLINE void split_bf16_pairs(const uint16_t* p, Vec* low, Vec* high) {
  const __m256i high_half = _mm256_set1_epi32(static_cast<int>(0xFFFF0000u));
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
  *low = {_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(y, 16))};
  *high = {_mm256_castsi256_ps(_mm256_and_si256(x, high_half)), _mm256_castsi256_ps(_mm256_and_si256(y, high_half))};
}
CB_INLINE __m256 load_bf16_half(const uint16_t* p) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
CB_INLINE Vec load_bf16(const uint16_t* p) { return {load_bf16_half(p), load_bf16_half(p + 8)}; }
CB_INLINE Vec load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
CB_INLINE void store_f16(uint16_t* p, Vec x) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, kNearest));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, kNearest));
}

#else  // Vectors of four by the compiler's own extension: SSE2 on x86, NEON on ARM, scalars where there is nothing.

typedef float Quad __attribute__((vector_size(16)));
typedef int32_t QuadInt __attribute__((vector_size(16)));

struct Vec {
  Quad q[4];
};

#define CB_EACH_QUAD(expression) \
  Vec r;                         \
  for (int i = 0; i < 4; ++i) {  \
    r.q[i] = (expression);       \
  }                              \
  return r

CB_INLINE Quad choose(QuadInt mask, Quad yes, Quad no) { return (Quad)((mask & (QuadInt)yes) | (~mask & (QuadInt)no)); }
CB_INLINE Quad splat4(float x) { return Quad{x, x, x, x}; }

CB_INLINE Vec splat(float x) { CB_EACH_QUAD(splat4(x)); }
CB_INLINE Vec load(const float* p) {
  Vec r;
  memcpy(&r, p, sizeof r);
  return r;
}
CB_INLINE void store(float* p, Vec a) { memcpy(p, &a, sizeof a); }
CB_INLINE Vec add(Vec a, Vec b) { CB_EACH_QUAD(a.q[i] + b.q[i]); }
CB_INLINE Vec sub(Vec a, Vec b) { CB_EACH_QUAD(a.q[i] - b.q[i]); }
CB_INLINE Vec mul(Vec a, Vec b) { CB_EACH_QUAD(a.q[i] * b.q[i]); }
CB_INLINE Vec div(Vec a, Vec b) { CB_EACH_QUAD(a.q[i] / b.q[i]); }
CB_INLINE Vec fma(Vec a, Vec b, Vec c) { CB_EACH_QUAD(a.q[i] * b.q[i] + c.q[i]); }
CB_INLINE Vec vmax(Vec a, Vec b) { CB_EACH_QUAD(choose(a.q[i] > b.q[i], a.q[i], b.q[i])); }
CB_INLINE Vec vmin(Vec a, Vec b) { CB_EACH_QUAD(choose(a.q[i] < b.q[i], a.q[i], b.q[i])); }
CB_INLINE Vec if_less(Vec a, Vec b, Vec yes, Vec no) { CB_EACH_QUAD(choose(a.q[i] < b.q[i], yes.q[i], no.q[i])); }
CB_INLINE Vec keep_lanes(Vec a, int lo, int hi, float other) {
  Vec r;
  for (int i = 0; i < 4; ++i) {
    const QuadInt lane = {4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3};
    const QuadInt first = {lo, lo, lo, lo};
    const QuadInt last = {hi, hi, hi, hi};
    r.q[i] = choose((lane >= first) & (lane < last), a.q[i], splat4(other));
  }
  return r;
}
CB_INLINE float sum_lanes(Vec a) {
  const Quad s = (a.q[0] + a.q[1]) + (a.q[2] + a.q[3]);
  return (s[0] + s[1]) + (s[2] + s[3]);
}
CB_INLINE float max_lanes(Vec a) {
  float best = a.q[0][0];
  for (int i = 1; i < 16; ++i) {
    const float x = a.q[i / 4][i % 4];
    best = best > x ? best : x;
  }
  return best;
}
CB_INLINE Vec split_exponent(Vec x, Vec* fraction) {
  const Quad magic = splat4(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Vec r;
  for (int i = 0; i < 4; ++i) {
    const Quad n = (x.q[i] + magic) - magic;
    fraction->q[i] = x.q[i] - n;
    r.q[i] = (Quad)((__builtin_convertvector(n, QuadInt) + 127) << 23);
  }
  return r;
}
CB_INLINE void split_bf16_pairs(const uint16_t* p, Vec* low, Vec* high) {
  uint32_t lo[16], hi[16];
  for (int i = 0; i < 16; ++i) {
    lo[i] = static_cast<uint32_t>(p[2 * i]) << 16;
    hi[i] = static_cast<uint32_t>(p[2 * i + 1]) << 16;
  }
  memcpy(low, lo, sizeof lo);
  memcpy(high, hi, sizeof hi);
}
CB_INLINE Vec load_bf16(const uint16_t* p) {
  uint32_t bits[16];
  for (int i = 0; i < 16; ++i) bits[i] = static_cast<uint32_t>(p[i]) << 16;
  Vec r;
  memcpy(&r, bits, sizeof r);
  return r;
}
CB_INLINE float f16_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t rest = h & 0x7FFFu;
  uint32_t bits;
  float f;
  if (rest >= 0x7C00u) {
    bits = sign | 0x7F800000u | (rest & 0x3FFu) << 13;
  } else if (rest >= 0x400u) {
    bits = sign | ((rest << 13) + (112u << 23));
  } else {  // subnormal: an exact small multiple of 2^-24
    f = static_cast<float>(rest) * 5.9604644775390625e-8f;
    memcpy(&bits, &f, 4);
    bits |= sign;
  }
  memcpy(&f, &bits, 4);
  return f;
}
CB_INLINE uint16_t float_to_f16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  bits &= 0x7FFFFFFFu;
  if (bits > 0x7F800000u) return sign | 0x7E00u;
  if (bits >= 0x477FF000u) return sign | 0x7C00u;  // 65520 and more round to infinity
  if (bits < 0x38800000u) {                        // subnormal or zero: let a float addition do the rounding
    float x;
    memcpy(&x, &bits, 4);
    x += 0.5f;
    memcpy(&bits, &x, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3F000000u));
  }
  bits += 0xFFFu + (bits >> 13 & 1u);
  return static_cast<uint16_t>(sign | ((bits >> 13) - (112u << 10)));
}
CB_INLINE Vec load_f16(const uint16_t* p) {
  Vec r;
  for (int i = 0; i < 16; ++i) r.q[i / 4][i % 4] = f16_to_float(p[i]);
  return r;
}
CB_INLINE void store_f16(uint16_t* p, Vec a) {
  for (int i = 0; i < 16; ++i) p[i] = float_to_f16(a.q[i / 4][i % 4]);
}
#undef CB_EACH_QUAD

#endif

constexpr float kLog2E = 1.4426950408889634f;

// Into the second-level cache: what comes next would push out of the first level what is worked on, and on Zen 4 this
// reads memory at 20 GB/s a core where prefetching to the first level, or leaving it to the hardware, stops at 11.
CB_INLINE void fetch_ahead(const void* p) { __builtin_prefetch(p, 0, 2); }

// 2^x for x <= 126, relative error 1e-7; exactly 1 at 0 and exactly 0 below -126.5 (so at -inf); NaN stays NaN.
// The constant term is exactly 1 because rescaling by 2^0 must change nothing (see "the same bits" in attention_kernels.h).
CB_INLINE Vec exp2_lanes(Vec x) {
  x = vmax(splat(-127.0f), x);  // 2^-127 comes out of split_exponent as a clean zero
  Vec f;
  const Vec power = split_exponent(x, &f);
  Vec p = fma(splat(1.326472731307149e-3f), f, splat(9.671512991189957e-3f));
  p = fma(p, f, splat(5.550733581185341e-2f));
  p = fma(p, f, splat(2.4022242426872253e-1f));
  p = fma(p, f, splat(6.931470036506653e-1f));
  p = fma(p, f, splat(1.0f));
  return mul(p, power);
}

CB_INLINE Vec tanh_lanes(Vec x) {
  // 1 - 2 / (e^2x + 1) loses digits near zero; a short series takes over there.
  const Vec two_over_ln2 = splat(2.8853900817779268f);
  const Vec e = exp2_lanes(mul(vmax(splat(-20.0f), vmin(splat(20.0f), x)), two_over_ln2));
  const Vec far = sub(splat(1.0f), div(splat(2.0f), add(e, splat(1.0f))));
  const Vec x2 = mul(x, x);
  Vec series = fma(x2, splat(-17.0f / 315.0f), splat(2.0f / 15.0f));
  series = fma(series, x2, splat(-1.0f / 3.0f));
  series = fma(mul(series, x2), x, x);
  return if_less(x2, splat(0.04f), series, far);
}

}  // namespace
