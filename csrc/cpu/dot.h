// Operations of the packed-weight kernels that Vec lacks: 8-bit dot products, and bf16 in pairs.
//
// Nibbles and Bytes multiply the codes of kWidth columns with one row's activations: a Step holds the unpacked
// codes of 64 / 16 bytes a column, an Acc the running integer sums of one group of at most 32 numbers, which are
// exact. Codes are unsigned, activations within -127 .. 127: four at `a`, and for Nibbles the next four at `b`.
// An activation has two such planes, 256 * high + low: the sums of the high one first, then `next_plane`, then those
// of the low one; kWide codes take it as one 16-bit number instead. `offset` is added once to the total.
#pragma once

#include "vec.h"

namespace ps {
namespace PS_ISA {

#if defined(PS_ISA_AVX512)

struct IntVec {
  __m512i v;
};
PS_INLINE Vec to_float(IntVec a) { return {_mm512_cvtepi32_ps(a.v)}; }

PS_INLINE void add_product(Vec* sum, Vec a, Vec b) { *sum = fma(a, b, *sum); }

PS_INLINE Vec load_bf16_even(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
}
PS_INLINE Vec load_bf16_odd(const uint16_t* p) {
  const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), mask))};
}

PS_INLINE __m512i broadcast4(const int8_t* p) {
  int four;
  std::memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}

struct Nibbles {
  static constexpr int kDepth = 8;      // numbers of k a step holds
  static constexpr bool kWide = false;  // whether activations come as 16-bit numbers, not as two planes
  struct Step {
    __m512i low, high;
  };
  struct Acc {
    __m512i v;
  };
  PS_INLINE Step load(const uint8_t* p) {
    const __m512i x = _mm512_loadu_si512(p);
    const __m512i mask = _mm512_set1_epi8(15);
    return {_mm512_and_si512(x, mask), _mm512_and_si512(_mm512_srli_epi16(x, 4), mask)};
  }
  PS_INLINE Acc start() { return {_mm512_setzero_si512()}; }
  PS_INLINE void next_plane(Acc* acc) { acc->v = _mm512_slli_epi32(acc->v, 8); }
  PS_INLINE void dot(Acc* acc, const Step& step, const int8_t* a, const int8_t* b) {
    acc->v = _mm512_dpbusd_epi32(acc->v, step.low, broadcast4(a));
    acc->v = _mm512_dpbusd_epi32(acc->v, step.high, broadcast4(b));
  }
  PS_INLINE IntVec total(const Acc& acc, int offset) { return {_mm512_add_epi32(acc.v, _mm512_set1_epi32(offset))}; }
};

struct Bytes {
  static constexpr int kDepth = 4;
  static constexpr bool kWide = false;
  struct Step {
    __m512i v;
  };
  using Acc = Nibbles::Acc;
  PS_INLINE Step load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
  PS_INLINE Acc start() { return Nibbles::start(); }
  PS_INLINE void next_plane(Acc* acc) { Nibbles::next_plane(acc); }
  PS_INLINE void dot(Acc* acc, const Step& step, const int8_t* a, const int8_t*) {
    acc->v = _mm512_dpbusd_epi32(acc->v, step.v, broadcast4(a));
  }
  PS_INLINE IntVec total(const Acc& acc, int offset) { return Nibbles::total(acc, offset); }
};

#elif defined(PS_ISA_AVX2)

struct IntVec {
  __m256i v;
};
PS_INLINE Vec to_float(IntVec a) { return {_mm256_cvtepi32_ps(a.v)}; }

PS_INLINE void add_product(Vec* sum, Vec a, Vec b) {
  // Written out so that the sum stays in its register: GCC picks forms that move it, and puts one on the stack.
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum->v) : "x"(a.v), "x"(b.v));
}

PS_INLINE Vec load_bf16_even(const uint16_t* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), 16))};
}
alignas(32) static const uint32_t kHighHalves[8] = {0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
                                                   0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};
PS_INLINE Vec load_bf16_odd(const uint16_t* p) {
  // The mask is read from memory each time: a register for it would push a sum out of another.
  const uint32_t* mask = kHighHalves;
  asm("" : "+r"(mask) : "r"(p));
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
                                               *reinterpret_cast<const __m256i*>(mask)))};
}

PS_INLINE __m256i broadcast4(const int8_t* p) {
  return _mm256_castps_si256(_mm256_broadcast_ss(reinterpret_cast<const float*>(p)));
}

#ifdef __AVXVNNI__

struct Nibbles {
  static constexpr int kDepth = 8;
  static constexpr bool kWide = false;
  struct Step {
    __m256i low, high;
  };
  struct Acc {
    __m256i v;
  };
  PS_INLINE Step load(const uint8_t* p) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(x, mask), _mm256_and_si256(_mm256_srli_epi16(x, 4), mask)};
  }
  PS_INLINE Acc start() { return {_mm256_setzero_si256()}; }
  PS_INLINE void next_plane(Acc* acc) { acc->v = _mm256_slli_epi32(acc->v, 8); }
  PS_INLINE void dot(Acc* acc, const Step& step, const int8_t* a, const int8_t* b) {
    acc->v = _mm256_dpbusd_avx_epi32(acc->v, step.low, broadcast4(a));
    acc->v = _mm256_dpbusd_avx_epi32(acc->v, step.high, broadcast4(b));
  }
  PS_INLINE IntVec total(const Acc& acc, int offset) { return {_mm256_add_epi32(acc.v, _mm256_set1_epi32(offset))}; }
};

struct Bytes {
  static constexpr int kDepth = 4;
  static constexpr bool kWide = false;
  struct Step {
    __m256i v;
  };
  using Acc = Nibbles::Acc;
  PS_INLINE Step load(const uint8_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
  PS_INLINE Acc start() { return Nibbles::start(); }
  PS_INLINE void next_plane(Acc* acc) { Nibbles::next_plane(acc); }
  PS_INLINE void dot(Acc* acc, const Step& step, const int8_t* a, const int8_t*) {
    acc->v = _mm256_dpbusd_avx_epi32(acc->v, step.v, broadcast4(a));
  }
  PS_INLINE IntVec total(const Acc& acc, int offset) { return Nibbles::total(acc, offset); }
};

#else

// A nibble times an activation is at most 15 * 127, so maddubs sums of eight stages (two products each) keep
// within 16 bits: 16 * 15 * 127 = 30480.
struct Nibbles {
  static constexpr int kDepth = 8;
  static constexpr bool kWide = false;
  struct Step {
    __m256i low, high;
  };
  struct Acc {
    __m256i v, carry;
  };
  PS_INLINE Step load(const uint8_t* p) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(x, mask), _mm256_and_si256(_mm256_srli_epi16(x, 4), mask)};
  }
  PS_INLINE Acc start() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  PS_INLINE __m256i pairs(const Acc& acc) { return _mm256_madd_epi16(acc.v, _mm256_set1_epi16(1)); }
  PS_INLINE void next_plane(Acc* acc) {
    acc->carry = _mm256_slli_epi32(pairs(*acc), 8);
    acc->v = _mm256_setzero_si256();
  }
  PS_INLINE void add(__m256i* sum, __m256i x) {
    *sum = _mm256_add_epi16(*sum, x);
    asm("" : "+x"(*sum));  // GCC would make a tree of these additions, and run out of registers
  }
  PS_INLINE void dot(Acc* acc, const Step& step, const int8_t* a, const int8_t* b) {
    add(&acc->v, _mm256_maddubs_epi16(step.low, broadcast4(a)));
    add(&acc->v, _mm256_maddubs_epi16(step.high, broadcast4(b)));
  }
  PS_INLINE IntVec total(const Acc& acc, int offset) {
    return {_mm256_add_epi32(_mm256_add_epi32(acc.carry, pairs(acc)), _mm256_set1_epi32(offset))};
  }
};

// Whole bytes would overflow maddubs: they are widened, and multiplied with whole 16-bit activations. A step's two
// registers hold four columns each, of which a sum of four products takes two lanes until the end of the group.
struct Bytes {
  static constexpr int kDepth = 4;
  static constexpr bool kWide = true;
  struct Step {
    __m256i first, second;
  };
  struct Acc {
    __m256i first, second;
  };
  PS_INLINE Step load(const uint8_t* p) {
    const __m128i* columns = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtepu8_epi16(_mm_loadu_si128(columns)), _mm256_cvtepu8_epi16(_mm_loadu_si128(columns + 1))};
  }
  PS_INLINE Acc start() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  PS_INLINE void next_plane(Acc*) {}
  PS_INLINE void add(__m256i* sum, __m256i x) {
    *sum = _mm256_add_epi32(*sum, x);
    asm("" : "+x"(*sum));  // as in Nibbles::add
  }
  PS_INLINE void dot(Acc* acc, const Step& step, const int8_t* a, const int8_t*) {
    const __m256i x = _mm256_castpd_si256(_mm256_broadcast_sd(reinterpret_cast<const double*>(a)));
    add(&acc->first, _mm256_madd_epi16(step.first, x));
    add(&acc->second, _mm256_madd_epi16(step.second, x));
  }
  PS_INLINE IntVec total(const Acc& acc, int offset) {
    const __m256i columns = _mm256_hadd_epi32(acc.first, acc.second);  // 0 1 4 5 2 3 6 7
    return {_mm256_add_epi32(_mm256_permute4x64_epi64(columns, 0xd8), _mm256_set1_epi32(offset))};
  }
};

#endif

#elif defined(PS_ISA_NEON)

struct IntVec {
  int32x4_t v;
};
PS_INLINE Vec to_float(IntVec a) { return {vcvtq_f32_s32(a.v)}; }

PS_INLINE void add_product(Vec* sum, Vec a, Vec b) { *sum = fma(a, b, *sum); }

PS_INLINE Vec load_bf16_even(const uint16_t* p) {
  return {vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u16(vld1q_u16(p)), 16))};
}
PS_INLINE Vec load_bf16_odd(const uint16_t* p) {
  return {vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u16(vld1q_u16(p)), vdupq_n_u32(0xffff0000)))};
}

PS_INLINE int8x16_t broadcast4(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(four));
}

// Signed products: codes are shifted by their zero, 128, so the offset that undoes it elsewhere is not needed.
template <bool kShift>
struct SignedBytes {
  static constexpr int kDepth = 4;
  static constexpr bool kWide = false;
  struct Step {
    int8x16_t v;
  };
  struct Acc {
    int32x4_t v;
  };
  PS_INLINE Step load(const uint8_t* p) {
    const uint8x16_t x = vld1q_u8(p);
    return {vreinterpretq_s8_u8(kShift ? veorq_u8(x, vdupq_n_u8(0x80)) : x)};
  }
  PS_INLINE Acc start() { return {vdupq_n_s32(0)}; }
  PS_INLINE void next_plane(Acc* acc) { acc->v = vshlq_n_s32(acc->v, 8); }
  PS_INLINE void dot(Acc* acc, const Step& step, const int8_t* a, const int8_t*) {
    const int8x16_t x = broadcast4(a);
#ifdef __ARM_FEATURE_DOTPROD
    acc->v = vdotq_s32(acc->v, step.v, x);
#else
    const int16x8_t low = vmull_s8(vget_low_s8(step.v), vget_low_s8(x));
    const int16x8_t high = vmull_s8(vget_high_s8(step.v), vget_high_s8(x));
    acc->v = vpadalq_s16(acc->v, vpaddq_s16(low, high));  // two products fit 16 bits: 2 * 128 * 127
#endif
  }
  PS_INLINE IntVec total(const Acc& acc, int) { return {acc.v}; }
};
using Bytes = SignedBytes<true>;
using LowBytes = SignedBytes<false>;

#ifdef __ARM_FEATURE_DOTPROD

struct Nibbles {
  static constexpr int kDepth = 8;
  static constexpr bool kWide = false;
  struct Step {
    int8x16_t low, high;
  };
  struct Acc {
    int32x4_t v;
  };
  PS_INLINE Step load(const uint8_t* p) {
    const uint8x16_t x = vld1q_u8(p);
    return {vreinterpretq_s8_u8(vandq_u8(x, vdupq_n_u8(15))), vreinterpretq_s8_u8(vshrq_n_u8(x, 4))};
  }
  PS_INLINE Acc start() { return {vdupq_n_s32(0)}; }
  PS_INLINE void next_plane(Acc* acc) { acc->v = vshlq_n_s32(acc->v, 8); }
  PS_INLINE void dot(Acc* acc, const Step& step, const int8_t* a, const int8_t* b) {
    acc->v = vdotq_s32(acc->v, step.low, broadcast4(a));
    acc->v = vdotq_s32(acc->v, step.high, broadcast4(b));
  }
  PS_INLINE IntVec total(const Acc& acc, int offset) { return {vaddq_s32(acc.v, vdupq_n_s32(offset))}; }
};

#else

struct Nibbles {
  static constexpr int kDepth = 8;
  static constexpr bool kWide = false;
  struct Step {
    int8x16_t low, high;
  };
  struct Acc {
    int16x8_t first, second;  // of columns 0 and 1, 2 and 3
    int32x4_t carry;
  };
  PS_INLINE Step load(const uint8_t* p) {
    const uint8x16_t x = vld1q_u8(p);
    return {vreinterpretq_s8_u8(vandq_u8(x, vdupq_n_u8(15))), vreinterpretq_s8_u8(vshrq_n_u8(x, 4))};
  }
  PS_INLINE Acc start() { return {vdupq_n_s16(0), vdupq_n_s16(0), vdupq_n_s32(0)}; }
  // Pairs still fit 16 bits: 16 * 15 * 127.
  PS_INLINE int32x4_t pairs(const Acc& acc) { return vpaddlq_s16(vpaddq_s16(acc.first, acc.second)); }
  PS_INLINE void next_plane(Acc* acc) {
    acc->carry = vshlq_n_s32(pairs(*acc), 8);
    acc->first = acc->second = vdupq_n_s16(0);
  }
  PS_INLINE void add(Acc* acc, int8x16_t codes, int8x16_t x) {
    acc->first = vmlal_s8(acc->first, vget_low_s8(codes), vget_low_s8(x));
    acc->second = vmlal_s8(acc->second, vget_high_s8(codes), vget_high_s8(x));
  }
  PS_INLINE void dot(Acc* acc, const Step& step, const int8_t* a, const int8_t* b) {
    add(acc, step.low, broadcast4(a));
    add(acc, step.high, broadcast4(b));
  }
  PS_INLINE IntVec total(const Acc& acc, int offset) {
    return {vaddq_s32(vaddq_s32(acc.carry, pairs(acc)), vdupq_n_s32(offset))};
  }
};

#endif

#else  // scalar

struct IntVec {
  int32_t v[4];
};
PS_INLINE Vec to_float(IntVec a) {
  const float x[4] = {static_cast<float>(a.v[0]), static_cast<float>(a.v[1]), static_cast<float>(a.v[2]),
                      static_cast<float>(a.v[3])};
  return ps::PS_ISA::load(x);
}

PS_INLINE void add_product(Vec* sum, Vec a, Vec b) { *sum = fma(a, b, *sum); }

PS_INLINE Vec load_bf16_even(const uint16_t* p) {
  const float x[4] = {to_float(bf16{p[0]}), to_float(bf16{p[2]}), to_float(bf16{p[4]}), to_float(bf16{p[6]})};
  return ps::PS_ISA::load(x);
}
PS_INLINE Vec load_bf16_odd(const uint16_t* p) { return load_bf16_even(p + 1); }

struct Bytes {
  static constexpr int kDepth = 4;
  static constexpr bool kWide = false;
  struct Step {
    uint8_t v[16];
  };
  struct Acc {
    int32_t v[4];
  };
  PS_INLINE Step load(const uint8_t* p) {
    Step step;
    std::memcpy(step.v, p, 16);
    return step;
  }
  PS_INLINE Acc start() { return {}; }
  PS_INLINE void next_plane(Acc* acc) {
    for (int32_t& v : acc->v) v *= 256;
  }
  PS_INLINE void dot(Acc* acc, const Step& step, const int8_t* a, const int8_t*) {
    for (int j = 0; j < 4; ++j) {
      const uint8_t* w = step.v + 4 * j;
      acc->v[j] += w[0] * a[0] + w[1] * a[1] + w[2] * a[2] + w[3] * a[3];
    }
  }
  PS_INLINE IntVec total(const Acc& acc, int offset) {
    return {{acc.v[0] + offset, acc.v[1] + offset, acc.v[2] + offset, acc.v[3] + offset}};
  }
};

struct Nibbles {
  static constexpr int kDepth = 8;
  static constexpr bool kWide = false;
  struct Step {
    Bytes::Step low, high;
  };
  using Acc = Bytes::Acc;
  PS_INLINE Step load(const uint8_t* p) {
    Step step;
    for (int i = 0; i < 16; ++i) {
      step.low.v[i] = p[i] & 15;
      step.high.v[i] = p[i] >> 4;
    }
    return step;
  }
  PS_INLINE Acc start() { return Bytes::start(); }
  PS_INLINE void next_plane(Acc* acc) { Bytes::next_plane(acc); }
  PS_INLINE void dot(Acc* acc, const Step& step, const int8_t* a, const int8_t* b) {
    Bytes::dot(acc, step.low, a, nullptr);
    Bytes::dot(acc, step.high, b, nullptr);
  }
  PS_INLINE IntVec total(const Acc& acc, int offset) { return Bytes::total(acc, offset); }
};

#endif

#ifndef PS_ISA_NEON
using LowBytes = Bytes;  // of formats whose codes are below 128
#endif

// ---- activations to two planes of 8 bits: 32 numbers at a time ----

#if defined(PS_ISA_AVX512) || defined(PS_ISA_AVX2)

// The sums of both halves.
PS_INLINE void sum_codes(__m256i codes, int* sums) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), codes);
  __m256i x = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  x = _mm256_add_epi32(x, _mm256_shuffle_epi32(x, 0x4e));
  x = _mm256_add_epi32(x, _mm256_shuffle_epi32(x, 0xb1));
  sums[0] = _mm256_cvtsi256_si32(x);
  sums[1] = _mm_cvtsi128_si32(_mm256_extracti128_si256(x, 1));
}

PS_INLINE void store_codes(__m256i all_high, __m256i all_low, int8_t* high, int8_t* low, int* sums) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), all_high);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(low), all_low);
  int low_sums[2];
  sum_codes(all_high, sums);
  sum_codes(all_low, low_sums);
  for (int half = 0; half < 2; ++half) sums[half] = 256 * sums[half] + low_sums[half];
}

#endif

#if defined(PS_ISA_AVX2)
PS_INLINE __m256i pack_codes(const __m256i* v) {
  const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
  return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
#endif

// The bits of the largest magnitude. As integers they are in order, inf and then NaN above all numbers.
PS_INLINE uint32_t largest_bits(const float* x) {
#if defined(PS_ISA_AVX512)
  const __m512i mask = _mm512_set1_epi32(0x7fffffff);
  const __m512i a = _mm512_and_si512(_mm512_loadu_si512(x), mask);
  const __m512i b = _mm512_and_si512(_mm512_loadu_si512(x + 16), mask);
  return static_cast<uint32_t>(_mm512_reduce_max_epi32(_mm512_max_epi32(a, b)));
#elif defined(PS_ISA_AVX2)
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  __m256i largest = _mm256_setzero_si256();
  for (int i = 0; i < 32; i += 8) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
    largest = _mm256_max_epi32(largest, _mm256_and_si256(a, mask));
  }
  __m128i r = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
  r = _mm_max_epi32(r, _mm_shuffle_epi32(r, 0x4e));
  r = _mm_max_epi32(r, _mm_shuffle_epi32(r, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(r));
#else
  uint32_t largest = 0;
  for (int i = 0; i < 32; ++i) {
    const uint32_t bits = bits_of(x[i]) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return largest;
#endif
}

// x * inverse, rounded to nearest even (all within -32512 .. 32512), as 256 * high + low with both within -127 .. 127,
// and the sums of both halves. A low code of -128 would not fit everywhere, and becomes -127.
PS_INLINE void round_to_codes(const float* x, float inverse, int8_t* high, int8_t* low, int* sums) {
#if defined(PS_ISA_AVX512)
  const __m512 scale = _mm512_set1_ps(inverse);
  __m128i h[2], l[2];
  for (int i = 0; i < 2; ++i) {
    const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 16 * i), scale));
    const __m512i top = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
    const __m512i rest = _mm512_sub_epi32(q, _mm512_slli_epi32(top, 8));
    h[i] = _mm512_cvtepi32_epi8(top);
    l[i] = _mm512_cvtepi32_epi8(_mm512_max_epi32(rest, _mm512_set1_epi32(-127)));
  }
  const __m256i all_high = _mm256_set_m128i(h[1], h[0]), all_low = _mm256_set_m128i(l[1], l[0]);
  store_codes(all_high, all_low, high, low, sums);
#elif defined(PS_ISA_AVX2)
  const __m256 scale = _mm256_set1_ps(inverse);
  __m256i h[4], l[4];
  for (int i = 0; i < 4; ++i) {
    const __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), scale));
    h[i] = _mm256_srai_epi32(_mm256_add_epi32(q, _mm256_set1_epi32(128)), 8);
    l[i] = _mm256_max_epi32(_mm256_sub_epi32(q, _mm256_slli_epi32(h[i], 8)), _mm256_set1_epi32(-127));
  }
  store_codes(pack_codes(h), pack_codes(l), high, low, sums);
#else
  float rounded[32];
  for (int i = 0; i < 32; i += kWidth) store(rounded + i, round(load(x + i) * set1(inverse)));
  sums[0] = sums[1] = 0;
  for (int i = 0; i < 32; ++i) {
    const int q = static_cast<int>(rounded[i]);
    const int top = (q + 32896) / 256 - 128;  // floor((q + 128) / 256)
    const int rest = q - 256 * top;
    high[i] = static_cast<int8_t>(top);
    low[i] = static_cast<int8_t>(rest < -127 ? -127 : rest);
    sums[i / 16] += 256 * high[i] + low[i];
  }
#endif
}

}  // namespace PS_ISA
}  // namespace ps
