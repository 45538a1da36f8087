// Packing of linear weights (from dense rows, quantising where the format asks; from GGUF rows) and reading rows back.
#include <cstring>

#include "ggml_blocks.h"
#include "half.h"
#include "linear.h"
#include "linear_format.h"
#include "thread_pool.h"
#include "vec.h"

namespace ps {
namespace PS_ISA {
namespace {

constexpr int kHalf = kGroup / 2;

struct Panel {
  uint8_t* data;
  const LinearFormat& format;
  int64_t num_groups;

  uint8_t* codes(int64_t group) const { return data + group * group_code_bytes(format); }
  uint8_t* scales(int64_t group) const {
    return data + num_groups * group_code_bytes(format) + group * group_scale_bytes(format);
  }
};

void put_scale(const LinearFormat& format, uint8_t* block, int64_t index, float value) {
  if (format.scale_bytes == 4) {
    std::memcpy(block + index * 4, &value, 4);
  } else {
    f16 half;
    from_float(value, &half);
    std::memcpy(block + index * 2, &half, 2);
  }
}

float get_scale(const LinearFormat& format, const uint8_t* block, int64_t index) {
  if (format.scale_bytes == 2) return read_f16(block + index * 2);
  float value;
  std::memcpy(&value, block + index * 4, 4);
  return value;
}

void put_group(const Panel& panel, int64_t group, int64_t lane, const GroupCodes& in) {
  uint8_t* out = panel.codes(group) + lane * 4;
  if (panel.format.code_bits == 8) {
    for (int s = 0; s < 8; ++s) std::memcpy(out + s * 64, in.codes + s * 4, 4);
  } else {
    for (int s = 0; s < 4; ++s) {
      for (int t = 0; t < 4; ++t) {
        out[s * 64 + t] = static_cast<uint8_t>(in.codes[s * 8 + t] | in.codes[s * 8 + 4 + t] << 4);
      }
    }
  }
  uint8_t* scales = panel.scales(group);
  const int num_scales = panel.format.scales_per_group;
  for (int i = 0; i < num_scales; ++i) put_scale(panel.format, scales, i * kPanel + lane, in.scale[i]);
  if (panel.format.has_min) put_scale(panel.format, scales, num_scales * kPanel + lane, in.min);
}

void get_group(const Panel& panel, int64_t group, int64_t lane, float* out) {
  const LinearFormat& format = panel.format;
  const uint8_t* codes = panel.codes(group) + lane * 4;
  const uint8_t* scales = panel.scales(group);
  const float min = format.has_min ? get_scale(format, scales, format.scales_per_group * kPanel + lane) : 0.f;
  for (int i = 0; i < kGroup; ++i) {
    const int code = format.code_bits == 8 ? codes[i / 4 * 64 + i % 4]
                                           : codes[i / 8 * 64 + i % 4] >> (i / 4 % 2 * 4) & 15;
    const float scale = get_scale(format, scales, i / kHalf * (format.scales_per_group - 1) * kPanel + lane);
    const float value = scale * static_cast<float>(code - format.zero);
    out[i] = format.has_min ? value + min : value;
  }
}

float as_f16(float x) {
  f16 half;
  from_float(x, &half);
  return to_float(half);
}

int to_code(float x, int highest) {
  const int code = static_cast<int>(x + 0.5f);  // x >= -0.5 or so: truncation rounds
  return code < 0 ? 0 : code > highest ? highest : code;
}

void quantize_int8(const float* x, GroupCodes* out) {
  float limit = 0.f;
  for (int i = 0; i < kGroup; ++i) limit = __builtin_fabsf(x[i]) > limit ? __builtin_fabsf(x[i]) : limit;
  const float scale = as_f16(limit / 127.f);
  const float inverse = scale > 0.f ? 1.f / scale : 0.f;
  for (int i = 0; i < kGroup; ++i) {
    const int code = to_code(x[i] * inverse + 128.f, 255);
    out->codes[i] = static_cast<uint8_t>(code < 1 ? 1 : code);
  }
  out->scale[0] = scale;
}

// The number of largest magnitude becomes the end of the range that reaches further (-8 of -8 .. 7).
void quantize_int4_sym(const float* x, GroupCodes* out) {
  float extreme = 0.f;
  for (int i = 0; i < kGroup; ++i) extreme = __builtin_fabsf(x[i]) > __builtin_fabsf(extreme) ? x[i] : extreme;
  const float scale = as_f16(extreme / -8.f);
  const float inverse = scale != 0.f ? 1.f / scale : 0.f;
  for (int i = 0; i < kGroup; ++i) out->codes[i] = static_cast<uint8_t>(to_code(x[i] * inverse + 8.f, 15));
  out->scale[0] = scale;
}

constexpr int kVecs = kGroup / kWidth;

struct GroupVec {
  Vec v[kVecs];
};

template <class Function>
PS_INLINE GroupVec each(const Function& function) {
  GroupVec r;
  for (int i = 0; i < kVecs; ++i) r.v[i] = function(i);
  return r;
}

// Halves are added to halves, so every instruction set gets the same bits.
PS_INLINE float sum(GroupVec a) {
  for (int n = kVecs / 2; n > 0; n /= 2) {
    for (int i = 0; i < n; ++i) a.v[i] = a.v[i] + a.v[n + i];
  }
  return reduce_add(a.v[0]);
}

struct Grid {
  float scale, min, error;
  GroupVec codes;
};

// The nearest points of a grid of 16, and their squared error.
PS_INLINE Grid assign_codes(const GroupVec& x, float scale, float min) {
  Grid grid{as_f16(scale), as_f16(min), 0.f, {}};
  const Vec low = set1(grid.min), step = set1(grid.scale);
  const Vec inverse = set1(grid.scale > 0.f ? 1.f / grid.scale : 0.f);
  grid.codes = each([&](int i) {
    return round(ps::PS_ISA::min(set1(15.f), max(zero(), (x.v[i] - low) * inverse)));
  });
  grid.error = sum(each([&](int i) {
    const Vec error = step * grid.codes.v[i] + low - x.v[i];
    return error * error;
  }));
  return grid;
}

// Searches grids around [smallest, largest], each refined once by least squares, for the least squared error.
void quantize_int4(const float* numbers, GroupCodes* out) {
  float low = numbers[0], high = numbers[0];
  for (int i = 1; i < kGroup; ++i) {
    low = numbers[i] < low ? numbers[i] : low;
    high = numbers[i] > high ? numbers[i] : high;
  }
  const GroupVec x = each([&](int i) { return load(numbers + i * kWidth); });
  const float sum_x = sum(x), span = high - low;
  Grid best = assign_codes(x, span / 15.f, low);
  Grid grid = best;
  const auto keep_better = [&] {
    if (grid.error < best.error) best = grid;
  };
  for (int cuts = 0;; ++cuts) {
    // The scale and min that fit these codes best.
    const float sum_q = sum(grid.codes);
    const float sum_qq = sum(each([&](int i) { return grid.codes.v[i] * grid.codes.v[i]; }));
    const float sum_qx = sum(each([&](int i) { return grid.codes.v[i] * x.v[i]; }));
    const float determinant = kGroup * sum_qq - sum_q * sum_q;
    const float scale = determinant > 0.f ? (kGroup * sum_qx - sum_q * sum_x) / determinant : 0.f;
    if (scale > 0.f) {
      grid = assign_codes(x, scale, (sum_x - scale * sum_q) / kGroup);
      keep_better();
    }
    if (cuts == 5) break;
    const float cut = 0.03f * static_cast<float>(cuts + 1) * span;
    grid = assign_codes(x, (span - 2.f * cut) / 15.f, low + cut);
    keep_better();
  }
  alignas(64) float codes[kGroup];
  for (int i = 0; i < kVecs; ++i) store(codes + i * kWidth, best.codes.v[i]);
  for (int i = 0; i < kGroup; ++i) out->codes[i] = static_cast<uint8_t>(codes[i]);
  out->scale[0] = best.scale;
  out->min = best.min;
}

void quantize_group(int format, const float* x, GroupCodes* out) {
  switch (format) {
    case PS_LINEAR_INT8: return quantize_int8(x, out);
    case PS_LINEAR_INT4_SYM: return quantize_int4_sym(x, out);
    case PS_LINEAR_INT4: return quantize_int4(x, out);
  }
}

template <class To, class From>
void put_row(void* panel, const From* row, int64_t depth, int64_t k_block, int64_t lane) {
  // k_block neighbouring k of one lane lie side by side (1, or 2 for bf16)
  To* out = static_cast<To*>(panel);
  for (int64_t k = 0; k < depth; ++k) {
    from_float(to_float(row[k]), out + (k / k_block * kPanel + lane) * k_block + k % k_block);
  }
}

template <class From>
void pack_row(const ps_linear_weight& weight, const LinearFormat& format, uint8_t* panel, int64_t lane,
              const From* row) {
  const int64_t depth = weight.in_features;
  switch (weight.format) {
    case PS_LINEAR_F32: return put_row<float>(panel, row, depth, 1, lane);
    case PS_LINEAR_BF16: return put_row<bf16>(panel, row, depth, 2, lane);
    case PS_LINEAR_F16: return put_row<f16>(panel, row, depth, 1, lane);
  }
  const Panel view{panel, format, depth / kGroup};
  for (int64_t group = 0; group < view.num_groups; ++group) {
    float x[kGroup];
    for (int i = 0; i < kGroup; ++i) x[i] = to_float(row[group * kGroup + i]);
    GroupCodes codes;
    quantize_group(weight.format, x, &codes);
    put_group(view, group, lane, codes);
  }
}

// Calls body(row of the part, its panel, its lane), panel by panel over the threads.
template <class Body>
void for_each_row(const ps_linear_weight& weight, int64_t first_row, int64_t num_rows, const Body& body) {
  if (num_rows == 0) return;
  const int64_t bytes = panel_bytes(kLinearFormats[weight.format], weight.in_features);
  auto* data = static_cast<uint8_t*>(const_cast<void*>(weight.data));
  const int64_t first_panel = first_row / kPanel, last_panel = (first_row + num_rows - 1) / kPanel;
  parallel_for(last_panel - first_panel + 1, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t panel = first_panel + begin; panel < first_panel + end; ++panel) {
      for (int64_t lane = 0; lane < kPanel; ++lane) {
        const int64_t row = panel * kPanel + lane - first_row;
        if (row >= 0 && row < num_rows) body(row, data + panel * bytes, lane);
      }
    }
  });
}

}  // namespace

void linear_pack(const ps_linear_weight& weight, int64_t first_row, int64_t num_rows, const void* rows,
                 int64_t row_stride, int dtype) {
  const LinearFormat& format = kLinearFormats[weight.format];
  for_each_row(weight, first_row, num_rows, [&](int64_t row, uint8_t* panel, int64_t lane) {
    switch (dtype) {
      case PS_F32: return pack_row(weight, format, panel, lane, static_cast<const float*>(rows) + row * row_stride);
      case PS_BF16: return pack_row(weight, format, panel, lane, static_cast<const bf16*>(rows) + row * row_stride);
      case PS_F16: return pack_row(weight, format, panel, lane, static_cast<const f16*>(rows) + row * row_stride);
    }
  });
}

void linear_pack_ggml(const ps_linear_weight& weight, int64_t first_row, int64_t num_rows, const void* rows,
                      int64_t row_bytes, const GgmlType& type) {
  const LinearFormat& format = kLinearFormats[weight.format];
  for_each_row(weight, first_row, num_rows, [&](int64_t row, uint8_t* panel, int64_t lane) {
    const Panel view{panel, format, weight.in_features / kGroup};
    const uint8_t* source = static_cast<const uint8_t*>(rows) + row * row_bytes;
    for (int64_t group = 0; group < view.num_groups; ++group) {
      GroupCodes codes;
      read_ggml_group(type, source, group, &codes);
      put_group(view, group, lane, codes);
    }
  });
}

void linear_rows(float* out, int64_t out_stride, const ps_linear_weight& weight, const int64_t* row_ids,
                 int64_t num_rows) {
  const LinearFormat& format = kLinearFormats[weight.format];
  const int64_t depth = weight.in_features, bytes = panel_bytes(format, depth);
  parallel_for(num_rows, 16384 / depth + 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      auto* panel = static_cast<uint8_t*>(const_cast<void*>(weight.data)) + row_ids[i] / kPanel * bytes;
      const int64_t lane = row_ids[i] % kPanel;
      float* to = out + i * out_stride;
      if (format.code_bits > 0) {
        const Panel view{panel, format, depth / kGroup};
        for (int64_t group = 0; group < view.num_groups; ++group) get_group(view, group, lane, to + group * kGroup);
      } else if (weight.format == PS_LINEAR_F32) {
        for (int64_t k = 0; k < depth; ++k) to[k] = reinterpret_cast<const float*>(panel)[k * kPanel + lane];
      } else if (weight.format == PS_LINEAR_F16) {
        for (int64_t k = 0; k < depth; ++k) to[k] = to_float(reinterpret_cast<const f16*>(panel)[k * kPanel + lane]);
      } else {
        const auto* values = reinterpret_cast<const bf16*>(panel);
        for (int64_t k = 0; k < depth; ++k) to[k] = to_float(values[(k / 2 * kPanel + lane) * 2 + k % 2]);
      }
    }
  });
}

void ggml_rows(float* out, int64_t out_stride, const void* rows, int64_t row_bytes, int64_t in_features,
               const GgmlType& type, const int64_t* row_ids, int64_t num_rows) {
  const LinearFormat& format = kLinearFormats[type.format];
  parallel_for(num_rows, 16384 / in_features + 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const uint8_t* row = static_cast<const uint8_t*>(rows) + row_ids[i] * row_bytes;
      for (int64_t group = 0; group < in_features / kGroup; ++group) {
        GroupCodes codes;
        read_ggml_group(type, row, group, &codes);
        float* to = out + i * out_stride + group * kGroup;
        for (int k = 0; k < kGroup; ++k) {
          const float scale = codes.scale[format.scales_per_group == 2 ? k / (kGroup / 2) : 0];
          to[k] = scale * static_cast<float>(codes.codes[k] - (format.has_min ? 0 : format.zero)) + codes.min;
        }
      }
    }
  });
}

}  // namespace PS_ISA
}  // namespace ps
