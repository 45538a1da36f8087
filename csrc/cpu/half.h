// 16-bit floats and 8-bit codes as they lie in memory, and their conversion one by one (any CPU, same bits as torch's).
#pragma once

#include <cstdint>
#include <cstring>

#ifndef PS_ISA
#error "half.h is for *_kernels.cpp: its functions must not be shared between instruction sets"
#endif

namespace ps {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

namespace PS_ISA {

static inline uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}

static inline float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

static inline float to_float(float x) { return x; }

static inline float to_float(int8_t x) { return static_cast<float>(x); }

static inline float to_float(bf16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }

static inline float to_float(f16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);  // inf, nan
  if (magnitude < 0x400) {  // zero, subnormal: magnitude * 2^-24, exact
    const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
    return float_of(sign | bits_of(value));
  }
  return float_of(sign | ((magnitude << 13) + 0x38000000));
}

static inline void from_float(float x, float* out) { *out = x; }

static inline void from_float(float x, bf16* out) {
  const uint32_t u = bits_of(x);
  const bool is_nan = (u & 0x7fffffff) > 0x7f800000;
  out->bits = is_nan ? 0x7fc0 : static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static inline void from_float(float x, f16* out) {
  const uint32_t u = bits_of(x);
  const uint16_t sign = static_cast<uint16_t>(u >> 16 & 0x8000);
  const uint32_t magnitude = u & 0x7fffffff;
  if (magnitude > 0x7f800000) {
    out->bits = sign | 0x7e00;
  } else if (magnitude >= 0x477ff000) {  // rounds to 65536 or more
    out->bits = sign | 0x7c00;
  } else if (magnitude < 0x38800000) {  // subnormal: adding 0.5 leaves the rounded value in the low bits
    out->bits = sign | static_cast<uint16_t>(bits_of(float_of(magnitude) + 0.5f) - 0x3f000000);
  } else {
    out->bits = sign | static_cast<uint16_t>((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
  }
}

}  // namespace PS_ISA
}  // namespace ps
