// Packed-weight linear layers, from one row (decode) to thousands (prefill).
//
// A tile is MR rows by NV registers of columns, held in registers over all of k. Every output is one chain of
// additions in the order of k (integer formats: of groups; sums within a group are exact integers), whatever the
// tile: a row gets the same bits alone and in any batch, from any number of threads. (linear_exact.h: of exact sums over
// all of k.)
#include "dot.h"
#include "linear.h"
#include "scratch.h"
#include "status.h"
#include "thread_pool.h"
#include "vec.h"

// On every loop over MR or NV. Without it GCC keeps the accumulators in memory, at half the speed.
#define PS_UNROLL _Pragma("GCC unroll 16")
// Hides from the compiler where a pointer comes from.
#define PS_OPAQUE(pointer) asm("" : "+r"(pointer))

namespace ps {
namespace PS_ISA {
namespace {

// Tiles of rows that a piece of work goes through with one set of columns: their activations stay in the L2 cache.
static constexpr int64_t kBlockRows = 96;
// An activation's code is 256 * high + low, two planes of 8 bits. Beside 4-bit weights it keeps within 16 * 127 + 7
// (DECISIONS.md 151), but where linear_exact.h takes it.
static constexpr int kPlanes = 2;
static float largest_code(const LinearFormat& format) { return format.code_bits == 4 ? 16 * 127 + 7 : 256 * 127; }
// How far ahead of use the values of float formats are fetched; codes are a tile ahead.
static constexpr int64_t kPrefetchBytes = 1024;

// Activations lie tile by tile, within a tile [k][row] (codes: [group][plane][k / 4][row][4]), so that a kernel walks
// one pointer.
struct Call {
  LinearArgs args;
  const uint8_t* data;
  int64_t panel_bytes;
  int64_t last_panel;
  int64_t num_tiles;
  const float* values;  // float formats
  const int8_t* codes;  // integer formats: quantised activations,
  const float* meta;    // [group][row][meta words]
  const float* row_scales;  // exact products (linear_exact.h)

  int64_t first_row(int64_t tile) const { return args.num_rows * tile / num_tiles; }

  // Columns beyond the last panel repeat it; they are not stored.
  const uint8_t* panel(int64_t column) const {
    const int64_t index = column / kPanel;
    return data + (index < last_panel ? index : last_panel) * panel_bytes;
  }
};

template <int MR, int NV>
PS_INLINE void store_tile(const LinearArgs& args, int64_t row, int64_t column, Vec (&sum)[MR][NV]) {
  PS_UNROLL
  for (int v = 0; v < NV; ++v) {
    const int64_t first = column + v * kWidth;
    const int64_t left = args.weight.out_features - first;
    if (left <= 0) return;
    const bool whole = left >= kWidth;
    const int n = static_cast<int>(left);
    const Vec bias = args.bias == nullptr ? zero() : whole ? load(args.bias + first) : load_partial(args.bias + first, n);
    PS_UNROLL
    for (int i = 0; i < MR; ++i) {
      Vec y = sum[i][v];
      if (args.bias != nullptr) y = y + bias;
      if (args.residual != nullptr) {
        const float* residual = args.residual + (row + i) * args.residual_stride + first;
        y = y + (whole ? load(residual) : load_partial(residual, n));
      }
      float* out = args.out + (row + i) * args.out_stride + first;
      if (whole) {
        store(out, y);
      } else {
        store_partial(out, y, n);
      }
    }
  }
}

// ---- float formats ----

struct F32Values {
  static constexpr int kBytes = 4;      // a value
  static constexpr int kLaneBytes = 4;  // from one column to the next
  PS_INLINE Vec even(const uint8_t* p) { return ps::PS_ISA::load(reinterpret_cast<const float*>(p)); }
  PS_INLINE Vec odd(const uint8_t* p) { return ps::PS_ISA::load(reinterpret_cast<const float*>(p) + kPanel); }
};

struct F16Values {
  static constexpr int kBytes = 2;
  static constexpr int kLaneBytes = 2;
  PS_INLINE Vec even(const uint8_t* p) { return ps::PS_ISA::load(reinterpret_cast<const f16*>(p)); }
  PS_INLINE Vec odd(const uint8_t* p) { return ps::PS_ISA::load(reinterpret_cast<const f16*>(p) + kPanel); }
};

struct BF16Values {
  static constexpr int kBytes = 2;
  static constexpr int kLaneBytes = 4;
  PS_INLINE Vec even(const uint8_t* p) { return load_bf16_even(reinterpret_cast<const uint16_t*>(p)); }
  PS_INLINE Vec odd(const uint8_t* p) { return load_bf16_odd(reinterpret_cast<const uint16_t*>(p)); }
};

template <class Values>
struct FloatTile {
  template <int MR, int NV>
  static void run(const Call& call, int64_t row, int64_t column) {
    constexpr int64_t kPairBytes = 2 * kPanel * Values::kBytes;
    const int64_t depth = call.args.weight.in_features;
    const float* a = call.values + row * depth;
    const uint8_t* w[NV];
    Vec sum[MR][NV];
    PS_UNROLL
    for (int v = 0; v < NV; ++v) {
      const int64_t first = column + v * kWidth;
      w[v] = call.panel(first) + first % kPanel * Values::kLaneBytes;
      PS_UNROLL
      for (int i = 0; i < MR; ++i) sum[i][v] = zero();
    }
    for (int64_t pairs = depth / 2; pairs > 0; --pairs) {
      Vec values[NV];
      PS_UNROLL
      for (int v = 0; v < NV; ++v) {
        values[v] = Values::even(w[v]);
        if (v * kWidth % kPanel == 0) {
          __builtin_prefetch(w[v] + kPrefetchBytes);
          if (kPairBytes > 64) __builtin_prefetch(w[v] + kPrefetchBytes + 64);
        }
      }
      PS_UNROLL
      for (int i = 0; i < MR; ++i) {
        const Vec x = set1(a[i]);
        PS_UNROLL
        for (int v = 0; v < NV; ++v) add_product(&sum[i][v], x, values[v]);
      }
      PS_UNROLL
      for (int v = 0; v < NV; ++v) {
        PS_OPAQUE(w[v]);  // else both values of a pair are kept in registers, which are short
        values[v] = Values::odd(w[v]);
        w[v] += kPairBytes;
      }
      PS_UNROLL
      for (int i = 0; i < MR; ++i) {
        const Vec x = set1(a[MR + i]);
        PS_UNROLL
        for (int v = 0; v < NV; ++v) add_product(&sum[i][v], x, values[v]);
      }
      a += 2 * MR;
    }
    if (depth % 2 != 0) {
      PS_UNROLL
      for (int v = 0; v < NV; ++v) {
        const Vec value = Values::even(w[v]);
        PS_UNROLL
        for (int i = 0; i < MR; ++i) add_product(&sum[i][v], set1(a[i]), value);
      }
    }
    store_tile<MR, NV>(call.args, row, column, sum);
  }
};

// ---- integer formats: exact sums within a group, then scaled and added in the order of groups ----

template <class Codes, class Scale, bool kHasMin, int kHalves>
struct IntTile {
  template <int MR, int NV>
  static void run(const Call& call, int64_t row, int64_t column) {
    constexpr int kSteps = kGroup / Codes::kDepth;
    constexpr int kMeta = 1 + kHalves;
    constexpr int kPasses = Codes::kWide ? 1 : kPlanes;  // through the codes of a group
    constexpr int kCodeBytes = kPlanes / kPasses;
    const int64_t depth = call.args.weight.in_features;
    const int64_t num_groups = depth / kGroup;
    const int8_t* a = call.codes + row * depth * kPlanes;
    const float* meta = call.meta + row * num_groups * kMeta;
    // What a thread takes next lies behind this tile (thread_pool.h). Into the second cache: the first takes a line in ten
    // cycles at best from memory, and what is read now would wait behind it.
    constexpr int64_t kTilePanels = NV * kWidth > kPanel ? NV * kWidth / kPanel : 1;
    const int64_t ahead = kTilePanels * call.panel_bytes;
    const uint8_t* codes[NV];
    const Scale* scales[NV];
    Vec sum[MR][NV];
    PS_UNROLL
    for (int v = 0; v < NV; ++v) {
      const int64_t first = column + v * kWidth;
      const uint8_t* panel = call.panel(first);
      codes[v] = panel + first % kPanel * 4;
      scales[v] = reinterpret_cast<const Scale*>(panel + num_groups * kSteps * 64) + first % kPanel;
      PS_UNROLL
      for (int i = 0; i < MR; ++i) sum[i][v] = zero();
    }
    for (int64_t group = 0; group < num_groups; ++group) {
      PS_UNROLL
      for (int half = 0; half < kHalves; ++half) {
        typename Codes::Acc acc[MR][NV];
        PS_UNROLL
        for (int i = 0; i < MR; ++i) {
          PS_UNROLL
          for (int v = 0; v < NV; ++v) acc[i][v] = Codes::start();
        }
        PS_UNROLL
        for (int plane = 0; plane < kPasses; ++plane) {
          PS_UNROLL
          for (int s = half * kSteps / kHalves; s < (half + 1) * kSteps / kHalves; ++s) {
            typename Codes::Step step[NV];
            PS_UNROLL
            for (int v = 0; v < NV; ++v) {
              step[v] = Codes::load(codes[v] + s * 64);
              if (plane == 0 && v * kWidth % kPanel == 0) __builtin_prefetch(codes[v] + s * 64 + ahead, 0, 2);
            }
            PS_UNROLL
            for (int i = 0; i < MR; ++i) {
              const int8_t* x = a + plane * kGroup * MR + (s * Codes::kDepth * MR + i * 4) * kCodeBytes;
              PS_UNROLL
              for (int v = 0; v < NV; ++v) Codes::dot(&acc[i][v], step[v], x, x + 4 * MR);
            }
          }
          if (plane + 1 == kPasses) break;
          PS_UNROLL
          for (int i = 0; i < MR; ++i) {
            PS_UNROLL
            for (int v = 0; v < NV; ++v) Codes::next_plane(&acc[i][v]);
          }
        }
        PS_UNROLL
        for (int v = 0; v < NV; ++v) {
          const Vec scale = load(scales[v] + half * kPanel);
          if (v * kWidth % kPanel == 0) {
            __builtin_prefetch(reinterpret_cast<const uint8_t*>(scales[v] + half * kPanel) + ahead, 0, 2);
          }
          const Vec min = kHasMin ? load(scales[v] + kPanel) : zero();
          PS_UNROLL
          for (int i = 0; i < MR; ++i) {
            const float* m = meta + i * kMeta;
            const int offset = kHasMin ? 0 : static_cast<int>(bits_of(m[1 + half]));
            const Vec dot = to_float(Codes::total(acc[i][v], offset));
            sum[i][v] = fma(dot, scale * set1(m[0]), sum[i][v]);
            if (kHasMin) sum[i][v] = fma(min, set1(m[1]), sum[i][v]);
          }
        }
      }
      PS_UNROLL
      for (int v = 0; v < NV; ++v) {
        codes[v] += kSteps * 64;
        scales[v] += kPanel * (kHalves + (kHasMin ? 1 : 0));
      }
      a += kPlanes * kGroup * MR;
      meta += kMeta * MR;
    }
    store_tile<MR, NV>(call.args, row, column, sum);
  }
};

// One row to two planes of 8 bits, a scale for each group of 32: x ~ scale * (256 * high + low), which leaves 15 bits, or
// 11 beside 4-bit weights: with the 7 of one plane a small model's greedy choices change. The meta words of a group are the scale, then
// for each half (or whole) what the kernel adds for the sum of codes: with a min the sum times the scale, else the
// integer -zero * sum. A group that holds inf or NaN gets the scale NaN.
//
// Codes are written kPiece at a time, code_stride apart, the meta words of a group word_stride and of the next one
// group_stride. kWide: as 16-bit numbers, kPiece of them at a time.
template <int kPiece, bool kWide = false>
void quantize_row(const float* x, int64_t depth, const LinearFormat& format, int64_t code_stride, int8_t* codes,
                  int64_t word_stride, int64_t group_stride, float* meta) {
  const int halves = format.scales_per_group;
  const float largest = largest_code(format);
  for (int64_t k = 0; k < depth; k += kGroup, x += kGroup, meta += group_stride) {
    const uint32_t bits = largest_bits(x);
    const float limit = float_of(bits);
    alignas(32) int8_t planes[kPlanes][kGroup] = {};
    int sums[2] = {0, 0};
    float scale = 0.f;
    if (bits >= 0x7f800000) {
      scale = __builtin_nanf("");
    } else if (limit > 1e-33f) {  // below, largest / limit would overflow: such numbers count as zero
      scale = limit / largest;
      round_to_codes(x, largest / limit, planes[0], planes[1], sums);
    }
    if (kWide) {
      int16_t wide[kGroup];
      for (int i = 0; i < kGroup; ++i) wide[i] = static_cast<int16_t>(256 * planes[0][i] + planes[1][i]);
      for (int i = 0; i < kGroup; i += kPiece, codes += code_stride) std::memcpy(codes, wide + i, kPiece * 2);
    }
    for (int plane = 0; plane < (kWide ? 0 : kPlanes); ++plane) {
      for (int i = 0; i < kGroup; i += kPiece, codes += code_stride) std::memcpy(codes, planes[plane] + i, kPiece);
    }
    if (halves == 1) sums[0] += sums[1];
    meta[0] = scale;
    for (int half = 0; half < halves; ++half) {
      meta[(1 + half) * word_stride] = format.has_min ? scale * static_cast<float>(sums[half])
                                                      : float_of(static_cast<uint32_t>(-format.zero * sums[half]));
    }
  }
}

// ---- from tiles to the whole product ----

template <class Tile, int MR, int NV>
PS_INLINE void run_tile(const Call& call, int64_t row, int64_t height, int64_t column) {
  if (height == MR) {
    Tile::template run<MR, NV>(call, row, column);
  } else if constexpr (MR > 1) {
    run_tile<Tile, MR - 1, NV>(call, row, height, column);
  }
}

template <class Tile, int MR, int NV>
void run_tiles(const Call& call) {
  constexpr int64_t kColumns = NV * kWidth > kPanel ? NV * kWidth : kPanel;
  constexpr int64_t kBlockTiles = kBlockRows / MR;
  const int64_t column_tiles = (call.args.weight.out_features + kColumns - 1) / kColumns;
  const int64_t row_blocks = (call.num_tiles + kBlockTiles - 1) / kBlockTiles;
  const int64_t items = row_blocks * column_tiles;
  // Pieces small enough that a thread which comes late still finds work.
  const int64_t grain = items / (num_threads() * 16) + 1;
  parallel_for(items, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item / column_tiles * kBlockTiles;
      const int64_t last = first + kBlockTiles < call.num_tiles ? first + kBlockTiles : call.num_tiles;
      const int64_t column = item % column_tiles * kColumns;
      for (int64_t part = 0; part < kColumns; part += NV * kWidth) {
        for (int64_t tile = first; tile < last; ++tile) {
          const int64_t row = call.first_row(tile);
          run_tile<Tile, MR, NV>(call, row, call.first_row(tile + 1) - row, column + part);
        }
      }
    }
  });
}

// Calls prepare(tile, first row, height) for tiles of at most max_height rows, then the kernels.
template <class Prepare>
void prepare_tiles(Call* call, int max_height, const Prepare& prepare) {
  const int64_t num_rows = call->args.num_rows;
  call->num_tiles = (num_rows + max_height - 1) / max_height;
  const int64_t tile_size = max_height * call->args.weight.in_features;
  parallel_for(call->num_tiles, 8192 / tile_size + 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t row = call->first_row(tile);
      prepare(row, call->first_row(tile + 1) - row);
    }
  });
}

bool prepare_float(Call* call, int max_height) {
  const LinearArgs& args = call->args;
  const int64_t depth = args.weight.in_features;
  if (args.num_rows == 1) {
    call->num_tiles = 1;
    call->values = args.x;
    return true;
  }
  auto* values = static_cast<float*>(thread_scratch(kScratchCall, static_cast<size_t>(args.num_rows * depth) * 4));
  if (values == nullptr) return false;
  call->values = values;
  prepare_tiles(call, max_height, [&](int64_t row, int64_t height) {
    float* out = values + row * depth;
    const float* x = args.x + row * args.x_stride;
    // Four by four: each line is read and written while it is near.
    int64_t i = 0;
    for (; i + 4 <= height; i += 4) {
      const float* from = x + i * args.x_stride;
      const float *a = from, *b = a + args.x_stride, *c = b + args.x_stride, *d = c + args.x_stride;
      for (int64_t k = 0; k < depth; ++k) {
        const float four[4] = {a[k], b[k], c[k], d[k]};
        std::memcpy(out + k * height + i, four, 16);
      }
    }
    for (; i < height; ++i) {
      for (int64_t k = 0; k < depth; ++k) out[k * height + i] = x[i * args.x_stride + k];
    }
  });
  return true;
}

template <bool kWide>
bool prepare_int(Call* call, int max_height) {
  constexpr int kPieceBytes = kWide ? 8 : 4;
  const LinearArgs& args = call->args;
  const LinearFormat& format = kLinearFormats[args.weight.format];
  const int64_t depth = args.weight.in_features;
  const int64_t words = depth / kGroup * (1 + format.scales_per_group);
  const int64_t code_bytes = (args.num_rows * depth * kPlanes + 63) / 64 * 64;
  auto* codes = static_cast<int8_t*>(
      thread_scratch(kScratchCall, static_cast<size_t>(code_bytes + args.num_rows * words * 4)));
  if (codes == nullptr) return false;
  auto* meta = reinterpret_cast<float*>(codes + code_bytes);
  call->codes = codes;
  call->meta = meta;
  prepare_tiles(call, max_height, [&](int64_t row, int64_t height) {
    for (int64_t i = 0; i < height; ++i) {
      const int64_t group_words = 1 + format.scales_per_group;
      quantize_row<4, kWide>(args.x + (row + i) * args.x_stride, depth, format, height * kPieceBytes,
                             codes + row * depth * kPlanes + i * kPieceBytes, 1, height * group_words,
                             meta + row * words + i * group_words);
    }
  });
  return true;
}

}  // namespace
}  // namespace PS_ISA
}  // namespace ps

#include "linear_amx.h"
#include "linear_exact.h"
#include "linear_exact_amx.h"
#include "linear_i8mm.h"

namespace ps {
namespace PS_ISA {
namespace {

// The tile shapes that keep sums, weights and activations in registers. A few rows take more columns at once:
// the additions of one column wait for each other.
#if defined(PS_ISA_AVX512)
static constexpr int kRows = 12, kVecs = 2, kFewRows = 4, kManyVecs = 4;
static constexpr int kIntRows = 6, kByteRows = 6, kIntVecs = 2;
#elif defined(PS_ISA_AVX2)
static constexpr int kRows = 6, kVecs = 2, kFewRows = 2, kManyVecs = 4;
#ifdef __AVXVNNI__
static constexpr int kIntRows = 6, kByteRows = 6, kIntVecs = 1;
#else
static constexpr int kIntRows = 4, kByteRows = 4, kIntVecs = 1;
#endif
#else
static constexpr int kRows = 4, kVecs = 2, kFewRows = 1, kManyVecs = 4;
#ifdef __ARM_FEATURE_DOTPROD
static constexpr int kIntRows = 4, kByteRows = 4, kIntVecs = 2;
#else
static constexpr int kIntRows = 4, kByteRows = 4, kIntVecs = 1;
#endif
#endif

template <class Values>
bool run_float(Call* call) {
  if (call->args.num_rows <= kFewRows) {
    if (!prepare_float(call, kFewRows)) return false;
    run_tiles<FloatTile<Values>, kFewRows, kManyVecs>(*call);
  } else {
    if (!prepare_float(call, kRows)) return false;
    run_tiles<FloatTile<Values>, kRows, kVecs>(*call);
  }
  return true;
}

template <class Codes, class Scale, bool kHasMin, int kHalves>
bool run_int(Call* call) {
#ifdef PS_ISA_AMX
  if constexpr (Codes::kDepth == Nibbles::kDepth) {
    return run_exact<Scale, kHasMin>(call);
  } else if constexpr (kHalves == 1) {
    const int64_t done = run_amx<Scale, kHasMin>(*call);
    if (done < 0) return false;
    call->args.skip_rows(done);
    if (call->args.num_rows == 0) return true;
  }
#endif
  constexpr int kHeight = Codes::kDepth == Nibbles::kDepth ? kIntRows : kByteRows;
  if (!prepare_int<Codes::kWide>(call, kHeight)) return false;
  run_tiles<IntTiles<Codes, Scale, kHasMin, kHalves>, kHeight, kIntVecs>(*call);
  return true;
}

bool run(Call* call) {
  switch (call->args.weight.format) {
    case PS_LINEAR_F32: return run_float<F32Values>(call);
    case PS_LINEAR_BF16: return run_float<BF16Values>(call);
    case PS_LINEAR_F16: return run_float<F16Values>(call);
    case PS_LINEAR_INT8: return run_int<Bytes, f16, false, 1>(call);
    case PS_LINEAR_INT8_G16: return run_int<Bytes, float, false, 2>(call);
    case PS_LINEAR_INT8_MIN: return run_int<LowBytes, float, true, 1>(call);
    case PS_LINEAR_INT4_SYM: return run_int<Nibbles, f16, false, 1>(call);
    case PS_LINEAR_INT4: return run_int<Nibbles, f16, true, 1>(call);
    default: return run_int<Nibbles, float, true, 1>(call);  // PS_LINEAR_INT4_F32: linear.cpp let no other pass
  }
}

}  // namespace

void linear(const LinearArgs& args, int* status) {
  Call call{args,
            static_cast<const uint8_t*>(args.weight.data),
            panel_bytes(kLinearFormats[args.weight.format], args.weight.in_features),
            (args.weight.out_features - 1) / kPanel,
            1,
            nullptr,
            nullptr,
            nullptr,
            nullptr};
  if (!run(&call)) {
    *status = fail(PS_OUT_OF_MEMORY, "no memory for the activations of %lld rows", (long long)args.num_rows);
  }
}

}  // namespace PS_ISA
}  // namespace ps

#include "linear_experts.h"
