// Vec: a register of kWidth floats, the same few operations for every instruction set.
//
// Everything here has internal linkage or lives in the instruction set's own namespace, and nothing from
// the standard library's headers is instantiated: a shared inline function could be linked in its AVX-512
// build for all.
#pragma once

#include "half.h"

#if defined(PS_ISA_AVX2) || defined(PS_ISA_AVX512)
#include <immintrin.h>
#elif defined(PS_ISA_NEON)
#include <arm_neon.h>
#endif

#define PS_INLINE static inline __attribute__((always_inline))

namespace ps {
namespace PS_ISA {

#if defined(PS_ISA_AVX512)

struct Vec {
  __m512 v;
};
static constexpr int kWidth = 16;
static constexpr int kRegisters = 32;

PS_INLINE Vec set1(float x) { return {_mm512_set1_ps(x)}; }
PS_INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
PS_INLINE Vec widen(__m256i x, bf16) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))};
}
PS_INLINE Vec widen(__m256i x, f16) { return {_mm512_cvtph_ps(x)}; }
template <class T>
PS_INLINE Vec load(const T* p) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), T());
}
PS_INLINE Vec load(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
PS_INLINE Vec load_partial(const float* p, int n) {
  return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p)};
}
template <class T>
PS_INLINE Vec load_partial(const T* p, int n) {
  return widen(_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), p), T());
}
PS_INLINE Vec load_partial(const int8_t* p, int n) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(static_cast<__mmask16>((1u << n) - 1), p)))};
}
PS_INLINE void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
PS_INLINE void store(f16* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
PS_INLINE void store_partial(float* p, Vec a, int n) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), a.v);
}
PS_INLINE Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
PS_INLINE Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
PS_INLINE Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
PS_INLINE Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
PS_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
PS_INLINE Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where either is NaN
PS_INLINE Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
PS_INLINE Vec abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
PS_INLINE Vec copy_sign(Vec magnitude, Vec sign) {
  return {_mm512_or_ps(magnitude.v, _mm512_and_ps(sign.v, _mm512_set1_ps(-0.f)))};
}
PS_INLINE Vec round(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
PS_INLINE Vec pow2(Vec n) {  // n whole, -126 .. 127
  return {_mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}
PS_INLINE Vec zero_where_less(Vec x, Vec limit, Vec a) {  // 0 where x < limit, else a
  return {_mm512_mask_mov_ps(a.v, _mm512_cmp_ps_mask(x.v, limit.v, _CMP_LT_OQ), _mm512_setzero_ps())};
}
PS_INLINE Vec keep_lanes(Vec a, int begin, int end, float other) {  // lanes outside [begin, end) become other
  const uint32_t mask = ((1u << end) - 1) & ~((1u << begin) - 1);
  return {_mm512_mask_mov_ps(_mm512_set1_ps(other), static_cast<__mmask16>(mask), a.v)};
}
PS_INLINE float reduce_add(Vec a) {
  const __m256 x = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
PS_INLINE float reduce_max(Vec a) { return _mm512_reduce_max_ps(a.v); }

#elif defined(PS_ISA_AVX2)

struct Vec {
  __m256 v;
};
static constexpr int kWidth = 8;
static constexpr int kRegisters = 16;

PS_INLINE __m256i lane_mask(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
PS_INLINE Vec set1(float x) { return {_mm256_set1_ps(x)}; }
PS_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
PS_INLINE Vec widen(__m128i x, bf16) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16))};
}
PS_INLINE Vec widen(__m128i x, f16) { return {_mm256_cvtph_ps(x)}; }
template <class T>
PS_INLINE Vec load(const T* p) {
  return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), T());
}
PS_INLINE Vec load(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
PS_INLINE Vec load_partial(const float* p, int n) { return {_mm256_maskload_ps(p, lane_mask(n))}; }
template <class T>
PS_INLINE Vec load_partial(const T* p, int n) {
  alignas(16) T full[8] = {};
  for (int i = 0; i < n; ++i) full[i] = p[i];
  return load(full);
}
PS_INLINE void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
PS_INLINE void store(f16* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
PS_INLINE void store_partial(float* p, Vec a, int n) { _mm256_maskstore_ps(p, lane_mask(n), a.v); }
PS_INLINE Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
PS_INLINE Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
PS_INLINE Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
PS_INLINE Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
PS_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
PS_INLINE Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }  // b where either is NaN
PS_INLINE Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
PS_INLINE Vec abs(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.f), a.v)}; }
PS_INLINE Vec copy_sign(Vec magnitude, Vec sign) {
  return {_mm256_or_ps(magnitude.v, _mm256_and_ps(sign.v, _mm256_set1_ps(-0.f)))};
}
PS_INLINE Vec round(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
PS_INLINE Vec pow2(Vec n) {  // n whole, -126 .. 127
  return {_mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23))};
}
PS_INLINE Vec zero_where_less(Vec x, Vec limit, Vec a) {  // 0 where x < limit, else a
  return {_mm256_andnot_ps(_mm256_cmp_ps(x.v, limit.v, _CMP_LT_OQ), a.v)};
}
PS_INLINE Vec keep_lanes(Vec a, int begin, int end, float other) {  // lanes outside [begin, end) become other
  const __m256i mask = _mm256_andnot_si256(lane_mask(begin), lane_mask(end));
  return {_mm256_blendv_ps(_mm256_set1_ps(other), a.v, _mm256_castsi256_ps(mask))};
}
PS_INLINE float reduce_add(Vec a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
PS_INLINE float reduce_max(Vec a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

#elif defined(PS_ISA_NEON)

struct Vec {
  float32x4_t v;
};
static constexpr int kWidth = 4;
static constexpr int kRegisters = 32;

PS_INLINE Vec set1(float x) { return {vdupq_n_f32(x)}; }
PS_INLINE Vec load(const float* p) { return {vld1q_f32(p)}; }
PS_INLINE Vec load(const bf16* p) {
  return {vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p)), 16))};
}
PS_INLINE Vec load(const f16* p) {
  return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p))))};
}
PS_INLINE Vec load(const int8_t* p) {
  uint32_t four;
  std::memcpy(&four, p, 4);
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four))))))};
}
template <class T>
PS_INLINE Vec load_partial(const T* p, int n) {
  T full[4] = {};
  for (int i = 0; i < n; ++i) full[i] = p[i];
  return load(full);
}
PS_INLINE void store(float* p, Vec a) { vst1q_f32(p, a.v); }
PS_INLINE void store(f16* p, Vec a) {
  vst1_u16(reinterpret_cast<uint16_t*>(p), vreinterpret_u16_f16(vcvt_f16_f32(a.v)));
}
PS_INLINE void store_partial(float* p, Vec a, int n) {
  float full[4];
  store(full, a);
  for (int i = 0; i < n; ++i) p[i] = full[i];
}
PS_INLINE Vec operator+(Vec a, Vec b) { return {vaddq_f32(a.v, b.v)}; }
PS_INLINE Vec operator-(Vec a, Vec b) { return {vsubq_f32(a.v, b.v)}; }
PS_INLINE Vec operator*(Vec a, Vec b) { return {vmulq_f32(a.v, b.v)}; }
PS_INLINE Vec operator/(Vec a, Vec b) { return {vdivq_f32(a.v, b.v)}; }
PS_INLINE Vec fma(Vec a, Vec b, Vec c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
PS_INLINE Vec max(Vec a, Vec b) { return {vbslq_f32(vcgtq_f32(a.v, b.v), a.v, b.v)}; }  // b where either is NaN
PS_INLINE Vec min(Vec a, Vec b) { return {vbslq_f32(vcltq_f32(a.v, b.v), a.v, b.v)}; }
PS_INLINE Vec abs(Vec a) { return {vabsq_f32(a.v)}; }
PS_INLINE Vec copy_sign(Vec magnitude, Vec sign) {
  return {vbslq_f32(vdupq_n_u32(0x80000000u), sign.v, magnitude.v)};
}
PS_INLINE Vec round(Vec a) { return {vrndnq_f32(a.v)}; }
PS_INLINE Vec pow2(Vec n) {  // n whole, -126 .. 127
  return {vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.v), vdupq_n_s32(127)), 23))};
}
PS_INLINE Vec zero_where_less(Vec x, Vec limit, Vec a) {  // 0 where x < limit, else a
  return {vbslq_f32(vcltq_f32(x.v, limit.v), vdupq_n_f32(0.f), a.v)};
}
PS_INLINE Vec keep_lanes(Vec a, int begin, int end, float other) {  // lanes outside [begin, end) become other
  float full[4];
  store(full, a);
  for (int i = 0; i < 4; ++i) {
    if (i < begin || i >= end) full[i] = other;
  }
  return load(full);
}
PS_INLINE float reduce_add(Vec a) { return vaddvq_f32(a.v); }
PS_INLINE float reduce_max(Vec a) { return vmaxvq_f32(a.v); }

#else  // scalar: plain loops over four floats

struct Vec {
  float v[4];
};
static constexpr int kWidth = 4;
static constexpr int kRegisters = 16;

#define PS_EACH(expression)          \
  Vec r;                             \
  for (int i = 0; i < 4; ++i) r.v[i] = (expression); \
  return r

PS_INLINE Vec set1(float x) { PS_EACH(x); }
template <class T>
PS_INLINE Vec load(const T* p) { PS_EACH(to_float(p[i])); }
template <class T>
PS_INLINE Vec load_partial(const T* p, int n) { PS_EACH(i < n ? to_float(p[i]) : 0.f); }
PS_INLINE void store(float* p, Vec a) {
  for (int i = 0; i < 4; ++i) p[i] = a.v[i];
}
PS_INLINE void store(f16* p, Vec a) {
  for (int i = 0; i < 4; ++i) from_float(a.v[i], &p[i]);
}
PS_INLINE void store_partial(float* p, Vec a, int n) {
  for (int i = 0; i < n; ++i) p[i] = a.v[i];
}
PS_INLINE Vec operator+(Vec a, Vec b) { PS_EACH(a.v[i] + b.v[i]); }
PS_INLINE Vec operator-(Vec a, Vec b) { PS_EACH(a.v[i] - b.v[i]); }
PS_INLINE Vec operator*(Vec a, Vec b) { PS_EACH(a.v[i] * b.v[i]); }
PS_INLINE Vec operator/(Vec a, Vec b) { PS_EACH(a.v[i] / b.v[i]); }
PS_INLINE Vec fma(Vec a, Vec b, Vec c) { PS_EACH(a.v[i] * b.v[i] + c.v[i]); }
PS_INLINE Vec max(Vec a, Vec b) { PS_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }  // b where either is NaN
PS_INLINE Vec min(Vec a, Vec b) { PS_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
PS_INLINE Vec abs(Vec a) { PS_EACH(__builtin_fabsf(a.v[i])); }
PS_INLINE Vec copy_sign(Vec magnitude, Vec sign) { PS_EACH(__builtin_copysignf(magnitude.v[i], sign.v[i])); }
PS_INLINE Vec round(Vec a) { PS_EACH((a.v[i] + 12582912.f) - 12582912.f); }  // |a| < 2^22
PS_INLINE Vec pow2(Vec n) {  // n whole, -126 .. 127
  PS_EACH(float_of(static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23));
}
PS_INLINE Vec zero_where_less(Vec x, Vec limit, Vec a) { PS_EACH(x.v[i] < limit.v[i] ? 0.f : a.v[i]); }
PS_INLINE Vec keep_lanes(Vec a, int begin, int end, float other) {  // lanes outside [begin, end) become other
  PS_EACH(i >= begin && i < end ? a.v[i] : other);
}
PS_INLINE float reduce_add(Vec a) { return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]); }
PS_INLINE float reduce_max(Vec a) {
  float r = a.v[0];
  for (int i = 1; i < 4; ++i) r = a.v[i] > r ? a.v[i] : r;
  return r;
}

#undef PS_EACH

#endif

PS_INLINE Vec zero() { return set1(0.f); }

// e^x to 1 ulp or so (Cephes expf). 0 below -87.3, where the result would be subnormal; inf above 88.7; NaN stays.
PS_INLINE Vec exp(Vec x) {
  const Vec lowest = set1(-87.336540f);
  const Vec y = max(lowest, min(set1(88.722839f), x));
  const Vec n = min(set1(127.f), round(y * set1(1.44269504088896341f)));
  Vec r = fma(n, set1(-0.693359375f), y);
  r = fma(n, set1(2.12194440e-4f), r);
  Vec p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r + set1(1.f));
  return zero_where_less(x, lowest, p * pow2(n));
}

}  // namespace PS_ISA
}  // namespace ps
