// How a packed matrix lies in memory; the same bytes serve every instruction set, so they may be cached.
//
// Rows of the matrix (output features) are cut into panels of 16, the last one padded with zero rows. A panel
// is contiguous and starts on a 64-byte boundary. With K = in_features and j the row within the panel:
//   F32   [K][16] fp32                  BF16  [K/2][16 j][2 k] bf16       F16   [K][16] fp16
//         (K rounded up to even, the last k zero)
//   INT8* [K/32 groups][8][16 j][4 k] bytes, then one block of scales a group
//   INT4* [K/32 groups][4][16 j][4] bytes: of 8 k, the first four in low nibbles, the others in high ones;
//         then one block of scales a group
// A weight is scale * (code - zero) or scale * code + min:
//   INT8      fp16 scale a group, zero 128            INT8_MIN  fp32 scale and min a group, codes below 128
//   INT8_G16  fp32 scale per half group, zero 128     INT4_SYM  fp16 scale a group, zero 8
//   INT4      fp16 scale and min a group              INT4_F32  fp32 scale and min a group
// A block of scales holds 16 scales (INT8_G16: twice 16), then 16 mins if the format has them.
#pragma once

#include <cstdint>

#include "pagedserve.h"

namespace ps {

static constexpr int64_t kPanel = 16;
static constexpr int64_t kGroup = 32;

struct LinearFormat {
  int value_bytes;   // of a float format, else 0
  int code_bits;     // of an integer format, else 0
  int zero;          // the code that means 0, where there is no min
  int scale_bytes;   // 2: fp16, 4: fp32
  int scales_per_group;
  bool has_min;
};

static constexpr LinearFormat kLinearFormats[] = {
    /* F32 */ {4, 0, 0, 0, 0, false},      /* BF16 */ {2, 0, 0, 0, 0, false},
    /* F16 */ {2, 0, 0, 0, 0, false},      /* INT8 */ {0, 8, 128, 2, 1, false},
    /* INT8_G16 */ {0, 8, 128, 4, 2, false}, /* INT8_MIN */ {0, 8, 0, 4, 1, true},
    /* INT4_SYM */ {0, 4, 8, 2, 1, false}, /* INT4 */ {0, 4, 0, 2, 1, true},
    /* INT4_F32 */ {0, 4, 0, 4, 1, true},
};

// Bytes of the codes of one group of one panel.
static constexpr int64_t group_code_bytes(const LinearFormat& format) { return kGroup * kPanel * format.code_bits / 8; }

static constexpr int64_t group_scale_bytes(const LinearFormat& format) {
  return kPanel * format.scale_bytes * (format.scales_per_group + (format.has_min ? 1 : 0));
}

static constexpr int64_t panel_bytes(const LinearFormat& format, int64_t in_features) {
  if (format.value_bytes > 0) return (in_features + in_features % 2) * kPanel * format.value_bytes;
  const int64_t bytes = in_features / kGroup * (group_code_bytes(format) + group_scale_bytes(format));
  return (bytes + 63) / 64 * 64;
}

}  // namespace ps
