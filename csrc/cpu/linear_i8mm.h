// Integer tiles by smmla (Arm FEAT_I8MM): an instruction multiplies two rows by two columns over eight numbers of k.
// Part of linear_kernels.cpp. The sums of a group are exact integers, so a row has the bits that other tiles give it.
#pragma once

namespace ps {
namespace PS_ISA {
namespace {

#ifdef __ARM_FEATURE_MATMUL_INT8

// Eight numbers of k of four columns: those of columns 0 and 1, and of 2 and 3.
struct ColumnPairs {
  int8x16_t first, second;
};

PS_INLINE ColumnPairs pair_columns(int8x16_t k0, int8x16_t k4) {
  const int32x4_t a = vreinterpretq_s32_s8(k0), b = vreinterpretq_s32_s8(k4);
  return {vreinterpretq_s8_s32(vzip1q_s32(a, b)), vreinterpretq_s8_s32(vzip2q_s32(a, b))};
}

PS_INLINE ColumnPairs load_columns(Nibbles, const uint8_t* p) {
  const Nibbles::Step step = Nibbles::load(p);
  return pair_columns(step.low, step.high);
}

template <bool kShift>
PS_INLINE ColumnPairs load_columns(SignedBytes<kShift>, const uint8_t* p) {
  return pair_columns(SignedBytes<kShift>::load(p).v, SignedBytes<kShift>::load(p + 64).v);
}

// Eight activations of each of two rows, whose first four lie at `a` and whose others `step` bytes on. Where there is no
// second row the first one counts twice, and nobody reads what becomes of it.
PS_INLINE int8x16_t load_rows(const int8_t* a, int64_t step, bool has_second) {
  const int64_t second = has_second ? 4 : 0;
  int32_t k[4];
  std::memcpy(&k[0], a, 4);
  std::memcpy(&k[1], a + step, 4);
  std::memcpy(&k[2], a + second, 4);
  std::memcpy(&k[3], a + step + second, 4);
  return vreinterpretq_s8_s32(vld1q_s32(k));
}

constexpr bool needs_offset(Nibbles) { return true; }
template <bool kShift>
constexpr bool needs_offset(SignedBytes<kShift>) {
  return false;  // its codes were shifted by their zero
}

template <class Codes, class Scale, bool kHasMin, int kHalves>
struct MatrixTile {
  template <int MR, int NV>
  static void run(const Call& call, int64_t row, int64_t column) {
    if constexpr (MR == 1) {  // half of each product would be for nothing
      IntTile<Codes, Scale, kHasMin, kHalves>::template run<MR, NV>(call, row, column);
    } else {
      run_pairs<MR, NV>(call, row, column);
    }
  }

 private:
  template <int MR, int NV>
  static void run_pairs(const Call& call, int64_t row, int64_t column) {
    constexpr int kPairs = (MR + 1) / 2;
    constexpr int kEights = kGroup / 8;  // of a group's k
    constexpr int64_t kEightBytes = 64 * 8 / Codes::kDepth;
    constexpr int kMeta = 1 + kHalves;
    const int64_t num_groups = call.args.weight.in_features / kGroup;
    const int8_t* a = call.codes + row * call.args.weight.in_features * kPlanes;
    const float* meta = call.meta + row * num_groups * kMeta;
    const uint8_t* codes[NV];
    const Scale* scales[NV];
    Vec sum[MR][NV];
    PS_UNROLL
    for (int v = 0; v < NV; ++v) {
      const int64_t first = column + v * kWidth;
      const uint8_t* panel = call.panel(first);
      codes[v] = panel + first % kPanel * 4;
      scales[v] = reinterpret_cast<const Scale*>(panel + num_groups * kEights * kEightBytes) + first % kPanel;
      PS_UNROLL
      for (int i = 0; i < MR; ++i) sum[i][v] = zero();
    }
    for (int64_t group = 0; group < num_groups; ++group) {
      PS_UNROLL
      for (int half = 0; half < kHalves; ++half) {
        int32x4_t acc[kPairs][NV][2];  // [row, column] of 2 x 2, for both pairs of columns
        PS_UNROLL
        for (int pair = 0; pair < kPairs; ++pair) {
          PS_UNROLL
          for (int v = 0; v < NV; ++v) acc[pair][v][0] = acc[pair][v][1] = vdupq_n_s32(0);
        }
        PS_UNROLL
        for (int plane = 0; plane < kPlanes; ++plane) {
          PS_UNROLL
          for (int e = half * kEights / kHalves; e < (half + 1) * kEights / kHalves; ++e) {
            ColumnPairs columns[NV];
            PS_UNROLL
            for (int v = 0; v < NV; ++v) columns[v] = load_columns(Codes{}, codes[v] + e * kEightBytes);
            PS_UNROLL
            for (int pair = 0; pair < kPairs; ++pair) {
              const int8_t* x = a + plane * kGroup * MR + e * 8 * MR + pair * 8;
              const int8x16_t rows = load_rows(x, 4 * MR, 2 * pair + 1 < MR);
              PS_UNROLL
              for (int v = 0; v < NV; ++v) {
                acc[pair][v][0] = vmmlaq_s32(acc[pair][v][0], rows, columns[v].first);
                acc[pair][v][1] = vmmlaq_s32(acc[pair][v][1], rows, columns[v].second);
              }
            }
          }
          if (plane + 1 == kPlanes) break;
          PS_UNROLL
          for (int pair = 0; pair < kPairs; ++pair) {
            PS_UNROLL
            for (int v = 0; v < NV; ++v) {
              acc[pair][v][0] = vshlq_n_s32(acc[pair][v][0], 8);
              acc[pair][v][1] = vshlq_n_s32(acc[pair][v][1], 8);
            }
          }
        }
        PS_UNROLL
        for (int v = 0; v < NV; ++v) {
          const Vec scale = load(scales[v] + half * kPanel);
          const Vec min = kHasMin ? load(scales[v] + kPanel) : zero();
          PS_UNROLL
          for (int i = 0; i < MR; ++i) {
            const int32x4_t* both = acc[i / 2][v];
            int32x4_t total = i % 2 == 0 ? vcombine_s32(vget_low_s32(both[0]), vget_low_s32(both[1]))
                                         : vcombine_s32(vget_high_s32(both[0]), vget_high_s32(both[1]));
            const float* m = meta + i * kMeta;
            if (!kHasMin && needs_offset(Codes{})) {
              total = vaddq_s32(total, vdupq_n_s32(static_cast<int>(bits_of(m[1 + half]))));
            }
            sum[i][v] = fma(to_float(IntVec{total}), scale * set1(m[0]), sum[i][v]);
            if (kHasMin) sum[i][v] = fma(min, set1(m[1]), sum[i][v]);
          }
        }
      }
      PS_UNROLL
      for (int v = 0; v < NV; ++v) {
        codes[v] += kEights * kEightBytes;
        scales[v] += kPanel * (kHalves + (kHasMin ? 1 : 0));
      }
      a += kPlanes * kGroup * MR;
      meta += kMeta * MR;
    }
    store_tile<MR, NV>(call.args, row, column, sum);
  }
};

template <class Codes, class Scale, bool kHasMin, int kHalves>
using IntTiles = MatrixTile<Codes, Scale, kHasMin, kHalves>;

#else

template <class Codes, class Scale, bool kHasMin, int kHalves>
using IntTiles = IntTile<Codes, Scale, kHasMin, kHalves>;

#endif

}  // namespace
}  // namespace PS_ISA
}  // namespace ps
