// Products with 4-bit weights as exact integers, where AMX tiles multiply bytes (Intel SDM volume 1, chapter 18). Part of
// linear_kernels.cpp.
//
// A row of activations becomes integers of 16 bits with one scale, and a column of weights likewise: its scales and mins
// are rounded to multiples of one step D, so that a weight is scale * code + min in integers. The sum of the products over
// all of k is then exact, and whoever computes it in whatever order gets the same bits: a few rows by byte products of
// the codes as they are, with a group's sum scaled in 64-bit integers; more rows by tiles. There a weight is unpacked to
// 256 * high + low, an activation is 256 * high + low too, and the sums of the four products leave the tiles at the end
// of k only, where no group is left to scale.
#pragma once

#ifdef PS_ISA_AMX

namespace ps {
namespace PS_ISA {
namespace {

constexpr float kLargestActivation = 256 * 127;
constexpr float kLargestWeight = 32000;  // with what rounding adds to 15 scales and a min, still within 16 bits
constexpr float kSmallestNumber = 1e-33f;  // its reciprocal times the above overflows not yet; below, numbers count as zero

// ---- rows and columns to integers ----

// What a row's numbers are multiplied with to become integers, and the scale of these. A row that holds inf or NaN gets
// the scale NaN and zeros.
struct RowScale {
  float inverse, scale;

  RowScale(const float* x, int64_t depth) {
    const __m512i mask = _mm512_set1_epi32(0x7fffffff);
    __m512i largest = _mm512_setzero_si512();
    for (int64_t k = 0; k < depth; k += 16) {
      largest = _mm512_max_epi32(largest, _mm512_and_si512(_mm512_loadu_si512(x + k), mask));
    }
    const auto bits = static_cast<uint32_t>(_mm512_reduce_max_epi32(largest));
    const float limit = float_of(bits);
    const bool is_finite = bits < 0x7f800000, some = is_finite && limit > kSmallestNumber;
    inverse = some ? kLargestActivation / limit : 0.f;
    scale = some ? limit / kLargestActivation : is_finite ? 0.f : __builtin_nanf("");
  }
};

// 32 numbers of a row to two planes; returns the sum of the integers.
PS_INLINE int round_exactly(const float* x, const RowScale& row, int8_t* high, int8_t* low) {
  if (!(row.inverse > 0.f)) {  // inf * 0 would be NaN
    std::memset(high, 0, kGroup);
    std::memset(low, 0, kGroup);
    return 0;
  }
  int sums[2];
  round_to_codes(x, row.inverse, high, low, sums);
  return sums[0] + sums[1];
}

PS_INLINE __m512i magnitudes(const void* p, int mask) {
  return _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(mask));
}

// How a panel's scales and mins become integers: the step of each column, and its reciprocal. A column that holds inf or NaN
// has the step NaN, one of zeros 0.
template <class Scale, bool kHasMin>
struct ColumnSteps {
  static constexpr int64_t kCount = kPanel * (kHasMin ? 2 : 1);  // of scales and mins, a group
  __m512 step, inverse;

  ColumnSteps(const Scale* scales, int64_t num_groups) {
    __m512 scale, min = _mm512_setzero_ps();
    // Magnitudes in the order of their bits, inf and then NaN above all numbers.
    if constexpr (sizeof(Scale) == 4) {
      __m512i largest = _mm512_setzero_si512(), largest_min = largest;
      for (int64_t group = 0; group < num_groups; ++group, scales += kCount) {
        largest = _mm512_max_epu32(largest, magnitudes(scales, 0x7fffffff));
        if (kHasMin) largest_min = _mm512_max_epu32(largest_min, magnitudes(scales + kPanel, 0x7fffffff));
      }
      scale = _mm512_castsi512_ps(largest);
      min = _mm512_castsi512_ps(largest_min);
    } else if constexpr (kHasMin) {
      __m512i largest = _mm512_setzero_si512();
      for (int64_t group = 0; group < num_groups; ++group, scales += kCount) {
        largest = _mm512_max_epu16(largest, magnitudes(scales, 0x7fff7fff));
      }
      scale = _mm512_cvtph_ps(_mm512_castsi512_si256(largest));
      min = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(largest, 1));
    } else {
      __m256i largest = _mm256_setzero_si256();
      for (int64_t group = 0; group < num_groups; ++group, scales += kCount) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales));
        largest = _mm256_max_epu16(largest, _mm256_and_si256(bits, _mm256_set1_epi16(0x7fff)));
      }
      scale = _mm512_cvtph_ps(largest);
    }
    const __m512 bound = _mm512_fmadd_ps(scale, _mm512_set1_ps(kHasMin ? 15.f : 8.f), min);
    const __m512 largest_weight = _mm512_set1_ps(kLargestWeight);
    const __mmask16 is_finite = _mm512_cmplt_ps_mask(bound, _mm512_set1_ps(__builtin_inff()));
    const __mmask16 some = _mm512_mask_cmp_ps_mask(is_finite, bound, _mm512_set1_ps(kSmallestNumber), _CMP_GT_OQ);
    inverse = _mm512_maskz_div_ps(some, largest_weight, bound);
    step = _mm512_mask_blend_ps(is_finite, _mm512_set1_ps(__builtin_nanf("")),
                                _mm512_maskz_div_ps(some, bound, largest_weight));
  }

  PS_INLINE __m512i rounded(const Scale* scales, __m512 inverse) {
    return _mm512_cvtps_epi32(_mm512_mul_ps(load(scales).v, inverse));
  }
};

// An exact sum, 65536 * high + low with low within 0 .. 65535, to the output that it stands for. Who computed it brought it to
// this form, so that roundings are the same.
PS_INLINE __m512 scaled(__m512 high, __m512i low, __m512 step, float row_scale) {
  const __m512 sum = _mm512_fmadd_ps(high, _mm512_set1_ps(65536.f), _mm512_cvtepi32_ps(low));
  return _mm512_mul_ps(_mm512_mul_ps(sum, step), _mm512_set1_ps(row_scale));
}

template <class Scale>
PS_INLINE const Scale* scales_of(const uint8_t* panel, int64_t num_groups) {
  return reinterpret_cast<const Scale*>(panel + num_groups * kGroup * kPanel / 2);
}

// ---- a few rows; more in linear_exact_amx.h ----

constexpr int kExactRows = 4, kExactVecs = 2;

template <class Scale, bool kHasMin>
struct ExactTile {
  template <int MR, int NV>
  static void run(const Call& call, int64_t row, int64_t column) {
    using Steps = ColumnSteps<Scale, kHasMin>;
    constexpr int kSteps = kGroup / Nibbles::kDepth;
    const int64_t depth = call.args.weight.in_features, num_groups = depth / kGroup;
    const int8_t* a = call.codes + row * depth * kPlanes;
    const float* meta = call.meta + row * num_groups;
    const int64_t ahead = NV * call.panel_bytes;  // see IntTile
    const uint8_t* codes[NV];
    const Scale* scales[NV];
    Vec out[MR][NV];
    __m512 steps[NV], inverses[NV];
    __m512i even[MR][NV], odd[MR][NV];  // columns of the sums, in 64 bits
    PS_UNROLL
    for (int v = 0; v < NV; ++v) {
      codes[v] = call.panel(column + v * kPanel);
      scales[v] = scales_of<Scale>(codes[v], num_groups);
      const Steps column_steps(scales[v], num_groups);
      steps[v] = column_steps.step;
      inverses[v] = column_steps.inverse;
      PS_UNROLL
      for (int i = 0; i < MR; ++i) even[i][v] = odd[i][v] = _mm512_setzero_si512();
    }
    for (int64_t group = 0; group < num_groups; ++group) {
      Nibbles::Acc acc[MR][NV];
      PS_UNROLL
      for (int i = 0; i < MR; ++i) {
        PS_UNROLL
        for (int v = 0; v < NV; ++v) acc[i][v] = Nibbles::start();
      }
      PS_UNROLL
      for (int plane = 0; plane < kPlanes; ++plane) {
        PS_UNROLL
        for (int s = 0; s < kSteps; ++s) {
          Nibbles::Step step[NV];
          PS_UNROLL
          for (int v = 0; v < NV; ++v) {
            step[v] = Nibbles::load(codes[v] + s * 64);
            if (plane == 0) __builtin_prefetch(codes[v] + s * 64 + ahead, 0, 2);
          }
          PS_UNROLL
          for (int i = 0; i < MR; ++i) {
            const int8_t* x = a + plane * kGroup * MR + s * Nibbles::kDepth * MR + i * 4;
            PS_UNROLL
            for (int v = 0; v < NV; ++v) Nibbles::dot(&acc[i][v], step[v], x, x + 4 * MR);
          }
        }
        if (plane + 1 == kPlanes) break;
        PS_UNROLL
        for (int i = 0; i < MR; ++i) {
          PS_UNROLL
          for (int v = 0; v < NV; ++v) Nibbles::next_plane(&acc[i][v]);
        }
      }
      PS_UNROLL
      for (int v = 0; v < NV; ++v) {
        __builtin_prefetch(reinterpret_cast<const uint8_t*>(scales[v]) + ahead, 0, 2);
        const __m512i scale = Steps::rounded(scales[v], inverses[v]), odd_scale = _mm512_srli_epi64(scale, 32);
        const __m512i min = kHasMin ? Steps::rounded(scales[v] + kPanel, inverses[v]) : scale;
        const __m512i odd_min = _mm512_srli_epi64(min, 32);
        PS_UNROLL
        for (int i = 0; i < MR; ++i) {
          const int sum = static_cast<int>(bits_of(meta[i]));
          const __m512i dot = Nibbles::total(acc[i][v], kHasMin ? 0 : sum).v;
          even[i][v] = _mm512_add_epi64(even[i][v], _mm512_mul_epi32(dot, scale));
          odd[i][v] = _mm512_add_epi64(odd[i][v], _mm512_mul_epi32(_mm512_srli_epi64(dot, 32), odd_scale));
          if (kHasMin) {
            const __m512i sums = _mm512_set1_epi32(sum);
            even[i][v] = _mm512_add_epi64(even[i][v], _mm512_mul_epi32(min, sums));
            odd[i][v] = _mm512_add_epi64(odd[i][v], _mm512_mul_epi32(odd_min, sums));
          }
        }
      }
      PS_UNROLL
      for (int v = 0; v < NV; ++v) {
        codes[v] += kSteps * 64;
        scales[v] += Steps::kCount;
      }
      a += kPlanes * kGroup * MR;
      meta += MR;
    }
    const __m512i order = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    PS_UNROLL
    for (int i = 0; i < MR; ++i) {
      PS_UNROLL
      for (int v = 0; v < NV; ++v) {
        const __m256 even_high = _mm512_cvtepi64_ps(_mm512_srai_epi64(even[i][v], 16));
        const __m256 odd_high = _mm512_cvtepi64_ps(_mm512_srai_epi64(odd[i][v], 16));
        const __m512 high = _mm512_permutex2var_ps(_mm512_castps256_ps512(even_high), order, _mm512_castps256_ps512(odd_high));
        const __m512i low = _mm512_mask_blend_epi32(0xaaaa, even[i][v], _mm512_slli_epi64(odd[i][v], 32));
        out[i][v] = {scaled(high, _mm512_and_si512(low, _mm512_set1_epi32(0xffff)), steps[v], call.row_scales[row + i])};
      }
    }
    store_tile<MR, NV>(call.args, row, column, out);
  }
};

// Memory of rows for ExactTile: codes and meta as for other integer tiles, but that the one meta word of a group is the sum
// of its integers (without a min, times -zero), and the scales of rows.
struct ExactLayout {
  int64_t code_bytes, meta_bytes, num_bytes;

  ExactLayout(int64_t num_rows, int64_t depth) {
    code_bytes = (num_rows * depth * kPlanes + 63) / 64 * 64;
    meta_bytes = (num_rows * (depth / kGroup) * 4 + 63) / 64 * 64;
    num_bytes = code_bytes + meta_bytes + num_rows * 4;
  }

  void place(uint8_t* memory, Call* call) const {
    call->codes = reinterpret_cast<const int8_t*>(memory);
    call->meta = reinterpret_cast<const float*>(memory + code_bytes);
    call->row_scales = reinterpret_cast<const float*>(memory + code_bytes + meta_bytes);
  }

  // Row i of a tile of `height` rows that begins at row `first`.
  void prepare_row(const float* x, int64_t depth, const LinearFormat& format, int64_t first, int64_t height, int64_t i,
                   uint8_t* memory) const {
    const RowScale row(x, depth);
    auto* codes = reinterpret_cast<int8_t*>(memory) + first * depth * kPlanes + i * 4;
    auto* meta = reinterpret_cast<float*>(memory + code_bytes) + first * (depth / kGroup) + i;
    reinterpret_cast<float*>(memory + code_bytes + meta_bytes)[first + i] = row.scale;
    for (int64_t k = 0; k < depth; k += kGroup, meta += height) {
      alignas(32) int8_t planes[kPlanes * kGroup];
      const int sum = round_exactly(x + k, row, planes, planes + kGroup);
      for (int j = 0; j < kPlanes * kGroup; j += 4, codes += 4 * height) std::memcpy(codes, planes + j, 4);
      *meta = float_of(static_cast<uint32_t>(format.has_min ? sum : -format.zero * sum));
    }
  }
};

template <class Scale, bool kHasMin>
bool run_exact_tiles(Call* call) {
  const LinearArgs& args = call->args;
  const int64_t depth = args.weight.in_features;
  const ExactLayout layout(args.num_rows, depth);
  auto* memory = static_cast<uint8_t*>(thread_scratch(kScratchCall, static_cast<size_t>(layout.num_bytes)));
  if (memory == nullptr) return false;
  layout.place(memory, call);
  prepare_tiles(call, kExactRows, [&](int64_t row, int64_t height) {
    for (int64_t i = 0; i < height; ++i) {
      layout.prepare_row(args.x + (row + i) * args.x_stride, depth, kLinearFormats[args.weight.format], row, height, i,
                         memory);
    }
  });
  run_tiles<ExactTile<Scale, kHasMin>, kExactRows, kExactVecs>(*call);
  return true;
}

}  // namespace
}  // namespace PS_ISA
}  // namespace ps

#endif
