// The quant types of GGUF files: one group of 32 numbers of a row as codes, scales and min, exactly.
//
// Layouts as in ggml's block_* structs (https://github.com/ggml-org/ggml, src/ggml-common.h). For *_kernels.cpp.
#pragma once

#include <cstdint>
#include <cstring>

#include "half.h"
#include "linear.h"

namespace ps {
namespace PS_ISA {

// Numbers are scale * (code - zero) or scale * code + min; which, and the zero, is the format's.
struct GroupCodes {
  uint8_t codes[kGroup];
  float scale[2];  // of each half; equal, or only the first used, where the format has one
  float min;
};

static inline float read_f16(const uint8_t* p) {
  f16 x;
  std::memcpy(&x, p, 2);
  return to_float(x);
}

// 16 bytes: the first half of the group in the low nibbles, the second in the high ones.
static inline void read_nibbles(const uint8_t* p, uint8_t* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = p[i] & 15;
    codes[16 + i] = p[i] >> 4;
  }
}

static inline void read_fifth_bits(const uint8_t* p, uint8_t* codes) {
  for (int i = 0; i < 32; ++i) codes[i] = static_cast<uint8_t>(codes[i] | (p[i / 8] >> (i % 8) & 1) << 4);
}

// The 6-bit scale and min of group j of a Q4_K or Q5_K block.
static inline void read_scale_min(const uint8_t* p, int j, int* scale, int* min) {
  if (j < 4) {
    *scale = p[j] & 63;
    *min = p[j + 4] & 63;
  } else {
    *scale = (p[j + 4] & 15) | (p[j - 4] >> 2 & 0x30);
    *min = (p[j + 4] >> 4) | (p[j] >> 2 & 0x30);
  }
}

static const int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t kMxfp4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

static inline void look_up(const int8_t* values, uint8_t* codes) {
  for (int i = 0; i < kGroup; ++i) codes[i] = static_cast<uint8_t>(values[codes[i]] + 128);
}

static inline void shift_codes(uint8_t* codes, int by) {
  for (int i = 0; i < kGroup; ++i) codes[i] = static_cast<uint8_t>(codes[i] + by);
}

// Group number `group` of a row.
static inline void read_ggml_group(const GgmlType& type, const uint8_t* row, int64_t group, GroupCodes* out) {
  const int groups_per_block = type.block_len / static_cast<int>(kGroup);
  const uint8_t* block = row + group / groups_per_block * type.block_bytes;
  const int j = static_cast<int>(group % groups_per_block);
  uint8_t* codes = out->codes;
  out->min = 0.f;
  switch (type.id) {
    case 2:  // Q4_0
      out->scale[0] = read_f16(block);
      read_nibbles(block + 2, codes);
      break;
    case 3:  // Q4_1
      out->scale[0] = read_f16(block);
      out->min = read_f16(block + 2);
      read_nibbles(block + 4, codes);
      break;
    case 6:  // Q5_0: zero is 16
      out->scale[0] = read_f16(block);
      read_nibbles(block + 6, codes);
      read_fifth_bits(block + 2, codes);
      shift_codes(codes, 128 - 16);
      break;
    case 7:  // Q5_1
      out->scale[0] = read_f16(block);
      out->min = read_f16(block + 2);
      read_nibbles(block + 8, codes);
      read_fifth_bits(block + 4, codes);
      break;
    case 8:  // Q8_0
      out->scale[0] = read_f16(block);
      std::memcpy(codes, block + 2, kGroup);
      shift_codes(codes, 128);
      break;
    case 11: {  // Q3_K: zero is 4, the third bit is inverted
      const float d = read_f16(block + 108);
      const uint8_t* scales = block + 96;
      for (int half = 0; half < 2; ++half) {
        const int s = 2 * j + half;
        const int low = scales[s % 8] >> (4 * (s / 8)) & 15;
        const int high = scales[8 + s % 4] >> (2 * (s / 4)) & 3;
        out->scale[half] = d * static_cast<float>((low | high << 4) - 32);
      }
      for (int i = 0; i < kGroup; ++i) {
        const int low = block[32 + j / 4 * 32 + i] >> (2 * (j % 4)) & 3;
        const int high = block[i] >> j & 1;
        codes[i] = static_cast<uint8_t>(128 - 4 + (low | high << 2));
      }
      break;
    }
    case 12:    // Q4_K
    case 13: {  // Q5_K
      int scale, min;
      read_scale_min(block + 4, j, &scale, &min);
      out->scale[0] = read_f16(block) * static_cast<float>(scale);
      out->min = -(read_f16(block + 2) * static_cast<float>(min));
      const uint8_t* quants = block + (type.id == 12 ? 16 : 48) + j / 2 * 32;
      for (int i = 0; i < kGroup; ++i) codes[i] = quants[i] >> (4 * (j % 2)) & 15;
      if (type.id == 13) {
        for (int i = 0; i < kGroup; ++i) codes[i] = static_cast<uint8_t>(codes[i] | (block[16 + i] >> j & 1) << 4);
      }
      break;
    }
    case 14: {  // Q6_K: zero is 32
      const float d = read_f16(block + 208);
      const auto* scales = reinterpret_cast<const int8_t*>(block + 192);
      for (int half = 0; half < 2; ++half) out->scale[half] = d * static_cast<float>(scales[2 * j + half]);
      for (int i = 0; i < kGroup; ++i) {
        const int low = block[j / 4 * 64 + j % 2 * 32 + i] >> (4 * (j % 4 / 2)) & 15;
        const int high = block[128 + j / 4 * 32 + i] >> (2 * (j % 4)) & 3;
        codes[i] = static_cast<uint8_t>(128 - 32 + (low | high << 4));
      }
      break;
    }
    case 20:  // IQ4_NL
      out->scale[0] = read_f16(block);
      read_nibbles(block + 2, codes);
      look_up(kIq4Values, codes);
      break;
    case 23: {  // IQ4_XS
      const int high = (block[2] | block[3] << 8) >> (2 * j) & 3;
      const int low = block[4 + j / 2] >> (4 * (j % 2)) & 15;
      out->scale[0] = out->scale[1] = read_f16(block) * static_cast<float>((low | high << 4) - 32);
      read_nibbles(block + 8 + j * 16, codes);
      look_up(kIq4Values, codes);
      break;
    }
    case 39: {  // MXFP4: the scale is half a power of two, since the values are doubled
      const uint32_t e = block[0];
      out->scale[0] = out->scale[1] = float_of(e < 2 ? 0x00200000u << e : (e - 1) << 23);
      read_nibbles(block + 1, codes);
      look_up(kMxfp4Values, codes);
      break;
    }
  }
}

}  // namespace PS_ISA
}  // namespace ps
