// The number formats: what a query is in, what the cache is in, and how codes become what tensor cores multiply.
#pragma once

#include "device.cuh"
#include "pagedserve_cuda.h"

namespace ps {

struct Float {
  static constexpr int kDtype = PS_CUDA_F32;
  using Storage = float;
};

struct BFloat16 {
  static constexpr int kDtype = PS_CUDA_BF16;
  using Storage = uint16_t;
  __device__ static uint32_t pack(float low, float high) { return device::pack_bf16(low, high); }
  __device__ static void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    device::multiply_bf16(d, a, b);
  }
};

struct Half {
  static constexpr int kDtype = PS_CUDA_F16;
  using Storage = uint16_t;
  __device__ static uint32_t pack(float low, float high) { return device::pack_f16(low, high); }
  __device__ static void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    device::multiply_f16(d, a, b);
  }
};

// A cache in the query's own format.
template <typename T>
struct Same {
  static constexpr int kDtype = T::kDtype;
  static constexpr int kBytes = sizeof(typename T::Storage);
  static constexpr bool kScaled = false;
};

// 8-bit codes with a scale for each token and head. `widen` makes two pairs of T of four codes: `even` of bytes 0 and 2,
// `odd` of bytes 1 and 3. Every code is exact in either T. kMaxCode * scale is the largest magnitude of a head, which
// its own dtype could hold: V's scales go into the probabilities times kMaxCode, so that fp16 neither loses them below
// its range nor runs over it.
template <typename T>
struct Int8;
template <typename T>
struct Float8E4M3;

template <>
struct Int8<Half> {
  static constexpr int kDtype = PS_CUDA_I8;
  static constexpr int kBytes = 1;
  static constexpr bool kScaled = true;
  static constexpr float kMaxCode = 127.0f;
  __device__ static void widen(uint32_t codes, uint32_t& even, uint32_t& odd) {
    // With 0x64 above it a byte is the fp16 number 1024 + byte; the bytes are code + 128.
    const uint32_t biased = codes ^ 0x80808080u;
    even = device::subtract_f16(device::pick_bytes(biased, 0x64646464u, 0x4240), 0x64806480u);
    odd = device::subtract_f16(device::pick_bytes(biased, 0x64646464u, 0x4341), 0x64806480u);
  }
};

template <>
struct Int8<BFloat16> {
  static constexpr int kDtype = PS_CUDA_I8;
  static constexpr int kBytes = 1;
  static constexpr bool kScaled = true;
  static constexpr float kMaxCode = 127.0f;
  __device__ static void widen(uint32_t codes, uint32_t& even, uint32_t& odd) {
    // bf16 has too few bits for that trick; fp32 numbers 2^23 + byte have enough, and their upper halves are exact.
    const uint32_t biased = codes ^ 0x80808080u;
    uint32_t wide[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t number = device::pick_bytes(biased, 0x4b000000u, 0x7440 + i);
      wide[i] = device::as_bits(device::as_float(number) - 8388736.0f);
    }
    even = device::pick_bytes(wide[0], wide[2], 0x7632);
    odd = device::pick_bytes(wide[1], wide[3], 0x7632);
  }
};

// e4m3's exponent and mantissa fit into either T's fields; the difference of the biases is a product with a power of two,
// which is right for subnormal codes too. No fp8 instruction is needed, so sm_80 has it as well.
template <>
struct Float8E4M3<Half> {
  static constexpr int kDtype = PS_CUDA_F8E4M3;
  static constexpr int kBytes = 1;
  static constexpr bool kScaled = true;
  static constexpr float kMaxCode = 448.0f;
  __device__ static uint32_t widen_upper_bytes(uint32_t codes) {
    const uint32_t bits = (codes & 0x80008000u) | ((codes & 0x7f007f00u) >> 1);
    return device::multiply_pair_f16(bits, 0x5c005c00u);  // 2^8
  }
  __device__ static void widen(uint32_t codes, uint32_t& even, uint32_t& odd) {
    even = widen_upper_bytes(codes << 8);
    odd = widen_upper_bytes(codes);
  }
};

template <>
struct Float8E4M3<BFloat16> {
  static constexpr int kDtype = PS_CUDA_F8E4M3;
  static constexpr int kBytes = 1;
  static constexpr bool kScaled = true;
  static constexpr float kMaxCode = 448.0f;
  __device__ static uint32_t widen_upper_bytes(uint32_t codes) {
    const uint32_t bits = (codes & 0x80008000u) | ((codes & 0x7f007f00u) >> 4);
    return device::multiply_pair_bf16(bits, 0x7b807b80u);  // 2^120
  }
  __device__ static void widen(uint32_t codes, uint32_t& even, uint32_t& odd) {
    even = widen_upper_bytes(codes << 8);
    odd = widen_upper_bytes(codes);
  }
};

}  // namespace ps
