// Packed-weight linear layers, from one row (decode) to thousands (prefill).
//
// A tile is MR rows by NV registers of columns, held in registers over all of k. Every output is one chain of
// additions in the order of k (integer formats: of groups; sums within a group are exact integers), whatever the
// tile: a row gets the same bits alone and in any batch, from any number of threads.
#include "dot.h"
#include "linear.h"
#include "scratch.h"
#include "status.h"
#include "thread_pool.h"
#include "vec.h"

// On every loop over MR or NV. Without it GCC keeps the accumulators in memory, at half the speed.
#define PS_UNROLL _Pragma("GCC unroll 16")

namespace ps {
namespace PS_ISA {
namespace {

static constexpr int kMaxVecs = 4;
// Rows a piece of work goes through with one set of columns: their activations stay in the L2 cache.
static constexpr int64_t kRowBlock = 96;
// Groups' codes to fetch ahead of use.
static constexpr int64_t kPrefetchBytes = 1024;

// The columns of a tile beyond the last panel repeat it and are not stored.
struct Call {
  const LinearArgs& args;
  const uint8_t* data;
  int64_t panel_bytes;
  int64_t last_panel;
  const int8_t* codes;  // quantised activations [num_rows, in_features], integer formats only
  const float* meta;    // [num_rows, in_features / kGroup, meta words]

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

// ---- float formats: values of two neighbouring k at once ----

struct F32Values {
  static constexpr int kBytes = 4;
  PS_INLINE void load_pair(const uint8_t* p, int64_t k, Vec* first, Vec* second) {
    const float* w = reinterpret_cast<const float*>(p) + k * kPanel;
    *first = ps::PS_ISA::load(w);
    *second = ps::PS_ISA::load(w + kPanel);
  }
  static constexpr int kLaneBytes = 4;
};

struct F16Values {
  static constexpr int kBytes = 2;
  PS_INLINE void load_pair(const uint8_t* p, int64_t k, Vec* first, Vec* second) {
    const f16* w = reinterpret_cast<const f16*>(p) + k * kPanel;
    *first = ps::PS_ISA::load(w);
    *second = ps::PS_ISA::load(w + kPanel);
  }
  static constexpr int kLaneBytes = 2;
};

struct BF16Values {
  static constexpr int kBytes = 2;
  PS_INLINE void load_pair(const uint8_t* p, int64_t k, Vec* first, Vec* second) {
    load_bf16_pairs(reinterpret_cast<const uint16_t*>(p) + k * kPanel, first, second);
  }
  static constexpr int kLaneBytes = 4;
};

template <class Values>
struct FloatTile {
  template <int MR, int NV>
  static void run(const Call& call, int64_t row, int64_t column) {
    const LinearArgs& args = call.args;
    const int64_t depth = args.weight.in_features;
    const float* x = args.x + row * args.x_stride;
    const int64_t stride = args.x_stride;
    const uint8_t* panels[NV];
    Vec sum[MR][NV];
    PS_UNROLL
    for (int v = 0; v < NV; ++v) {
      const int64_t first = column + v * kWidth;
      panels[v] = call.panel(first) + first % kPanel * Values::kLaneBytes;
      PS_UNROLL
      for (int i = 0; i < MR; ++i) sum[i][v] = zero();
    }
    Vec w0[NV], w1[NV];
    int64_t k = 0;
    for (; k + 2 <= depth; k += 2) {
      PS_UNROLL
      for (int v = 0; v < NV; ++v) {
        Values::load_pair(panels[v], k, &w0[v], &w1[v]);
        if (v * kWidth % kPanel == 0) {
          const uint8_t* ahead = panels[v] + k * kPanel * Values::kBytes + kPrefetchBytes;
          __builtin_prefetch(ahead);
          if (Values::kBytes == 4) __builtin_prefetch(ahead + 64);
        }
      }
      PS_UNROLL
      for (int i = 0; i < MR; ++i) {
        const Vec a = set1(x[i * stride + k]);
        PS_UNROLL
        for (int v = 0; v < NV; ++v) sum[i][v] = fma(a, w0[v], sum[i][v]);
      }
      PS_UNROLL
      for (int i = 0; i < MR; ++i) {
        const Vec a = set1(x[i * stride + k + 1]);
        PS_UNROLL
        for (int v = 0; v < NV; ++v) sum[i][v] = fma(a, w1[v], sum[i][v]);
      }
    }
    if (k < depth) {
      PS_UNROLL
      for (int v = 0; v < NV; ++v) {
        Values::load_pair(panels[v], k, &w0[v], &w1[v]);
        PS_UNROLL
        for (int i = 0; i < MR; ++i) sum[i][v] = fma(set1(x[i * stride + k]), w0[v], sum[i][v]);
      }
    }
    store_tile<MR, NV>(args, row, column, sum);
  }
};

// ---- integer formats: exact sums within a group, then scaled and added in the order of groups ----

template <class Codes, class Scale, bool kHasMin, int kHalves>
struct IntTile {
  template <int MR, int NV>
  static void run(const Call& call, int64_t row, int64_t column) {
    constexpr int kSteps = kGroup / Codes::kDepth;
    constexpr int kMeta = 1 + kHalves;
    const LinearArgs& args = call.args;
    const int64_t depth = args.weight.in_features;
    const int64_t num_groups = depth / kGroup;
    const int8_t* a = call.codes + row * depth;
    const float* meta = call.meta + row * num_groups * kMeta;
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
          const int offset = kHasMin ? 0 : static_cast<int>(bits_of(meta[i * num_groups * kMeta + 1 + half]));
          PS_UNROLL
          for (int v = 0; v < NV; ++v) acc[i][v] = Codes::start(offset);
        }
        PS_UNROLL
        for (int s = half * kSteps / kHalves; s < (half + 1) * kSteps / kHalves; ++s) {
          typename Codes::Step step[NV];
          PS_UNROLL
          for (int v = 0; v < NV; ++v) {
            step[v] = Codes::load(codes[v] + s * 64);
            if (v * kWidth % kPanel == 0) __builtin_prefetch(codes[v] + s * 64 + kPrefetchBytes);
          }
          PS_UNROLL
          for (int i = 0; i < MR; ++i) {
            PS_UNROLL
            for (int v = 0; v < NV; ++v) Codes::dot(&acc[i][v], step[v], a + i * depth + s * Codes::kDepth);
          }
        }
        PS_UNROLL
        for (int v = 0; v < NV; ++v) {
          const Vec scale = load(scales[v] + half * kPanel);
          const Vec min = kHasMin ? load(scales[v] + kPanel) : zero();
          PS_UNROLL
          for (int i = 0; i < MR; ++i) {
            const float* m = meta + i * num_groups * kMeta;
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
      a += kGroup;
      meta += kMeta;
    }
    store_tile<MR, NV>(args, row, column, sum);
  }
};

// One row to 8 bits, a scale for each group of 32: x ~ scale * code. The meta words of a group are the scale, then
// for each half (or whole) what the kernel adds for the sum of codes: with a min the sum times the scale, else the
// integer -zero * sum. A group that holds inf or NaN gets the scale NaN.
void quantize_row(const float* x, int64_t depth, const LinearFormat& format, int8_t* codes, float* meta) {
  constexpr int kVecs = kGroup / kWidth;
  const int halves = format.scales_per_group;
  for (int64_t k = 0; k < depth; k += kGroup, x += kGroup, codes += kGroup, meta += 1 + halves) {
    Vec largest = zero(), poison = zero();
    for (int v = 0; v < kVecs; ++v) {
      const Vec a = load(x + v * kWidth);
      largest = max(abs(a), largest);
      poison = fma(a, zero(), poison);
    }
    const float finite = reduce_add(poison);  // 0 or NaN
    const float limit = reduce_max(largest);
    // Below this 127 / limit would overflow: such numbers count as zero.
    const bool is_zero = !(limit > 1e-36f) || !(finite == 0.f);
    const float scale = (is_zero ? 0.f : limit / 127.f) + finite;
    const Vec inverse = set1(is_zero ? 0.f : 127.f / limit);
    float rounded[kGroup];
    int sums[2] = {0, 0};
    if (is_zero) {
      std::memset(codes, 0, kGroup);
    } else {
      for (int v = 0; v < kVecs; ++v) store(rounded + v * kWidth, round(load(x + v * kWidth) * inverse));
      for (int i = 0; i < kGroup; ++i) codes[i] = static_cast<int8_t>(static_cast<int>(rounded[i]));
      for (int half = 0; half < 2; ++half) {
        int sum = 0;
        for (int i = 0; i < kGroup / 2; ++i) sum += codes[half * kGroup / 2 + i];
        sums[half] = sum;
      }
    }
    if (halves == 1) sums[0] += sums[1];
    meta[0] = scale;
    for (int half = 0; half < halves; ++half) {
      meta[1 + half] = format.has_min ? scale * static_cast<float>(sums[half])
                                      : float_of(static_cast<uint32_t>(-format.zero * sums[half]));
    }
  }
}

// ---- from tiles to the whole product ----

template <class Tile, int MR, int NV>
PS_INLINE void run_tile(const Call& call, int64_t row, int64_t num_rows, int64_t column) {
  if (num_rows == MR) {
    Tile::template run<MR, NV>(call, row, column);
  } else if constexpr (MR > 1) {
    run_tile<Tile, MR - 1, NV>(call, row, num_rows, column);
  }
}

template <class Tile, int MR, int NV>
void run_tiles(const Call& call) {
  const int64_t num_rows = call.args.num_rows;
  const int64_t tile_columns = NV * kWidth > kPanel ? NV * kWidth : kPanel;
  const int64_t column_tiles = (call.args.weight.out_features + tile_columns - 1) / tile_columns;
  const int64_t row_blocks = (num_rows + kRowBlock - 1) / kRowBlock;
  const int64_t items = row_blocks * column_tiles;
  // Pieces small enough that a thread which comes late still finds work.
  const int64_t grain = items / (num_threads() * 16) + 1;
  parallel_for(items, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item / column_tiles * kRowBlock;
      const int64_t rows = num_rows - first < kRowBlock ? num_rows - first : kRowBlock;
      const int64_t tiles = (rows + MR - 1) / MR;
      const int64_t column = item % column_tiles * tile_columns;
      for (int64_t part = 0; part < tile_columns; part += NV * kWidth) {
        for (int64_t t = 0; t < tiles; ++t) {
          const int64_t begin_row = rows * t / tiles, end_row = rows * (t + 1) / tiles;
          run_tile<Tile, MR, NV>(call, first + begin_row, end_row - begin_row, column + part);
        }
      }
    }
  });
}

// The tile shapes that keep sums, weights and activations in registers. A few rows take more columns at once:
// the additions of one column wait for each other.
#if defined(PS_ISA_AVX512)
template <class Tile>
void run_float(const Call& call) {
  if (call.args.num_rows <= 4 && call.args.weight.out_features >= 2048) return run_tiles<Tile, 4, 4>(call);
  run_tiles<Tile, 12, 2>(call);
}
template <class Tile>
void run_int(const Call& call) {
  run_tiles<Tile, 6, 2>(call);
}
#elif defined(PS_ISA_AVX2)
template <class Tile>
void run_float(const Call& call) {
  if (call.args.num_rows <= 3) return run_tiles<Tile, 3, 4>(call);
  run_tiles<Tile, 6, 2>(call);
}
template <class Tile>
void run_int(const Call& call) {
  run_tiles<Tile, 4, 1>(call);
}
#else
template <class Tile>
void run_float(const Call& call) {
  run_tiles<Tile, 4, 2>(call);
}
template <class Tile>
void run_int(const Call& call) {
  run_tiles<Tile, 4, 1>(call);
}
#endif

}  // namespace

void linear(const LinearArgs& args, int* status) {
  const LinearFormat& format = kLinearFormats[args.weight.format];
  const int64_t depth = args.weight.in_features;
  const int64_t bytes = panel_bytes(format, depth);
  Call call{args, static_cast<const uint8_t*>(args.weight.data), bytes, (args.weight.out_features - 1) / kPanel,
            nullptr, nullptr};
  if (format.code_bits > 0) {
    const int64_t num_groups = depth / kGroup, words = 1 + format.scales_per_group;
    const int64_t code_bytes = (args.num_rows * depth + 63) / 64 * 64;
    const int64_t scratch_bytes = code_bytes + args.num_rows * num_groups * words * 4;
    auto* codes = static_cast<int8_t*>(thread_scratch(kScratchCall, static_cast<size_t>(scratch_bytes)));
    if (codes == nullptr) {
      *status = fail(PS_OUT_OF_MEMORY, "no memory to quantise %lld rows of activations", (long long)args.num_rows);
      return;
    }
    auto* meta = reinterpret_cast<float*>(codes + code_bytes);
    parallel_for(args.num_rows, 8192 / depth + 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        quantize_row(args.x + row * args.x_stride, depth, format, codes + row * depth,
                     meta + row * num_groups * words);
      }
    });
    call.codes = codes;
    call.meta = meta;
  }
  switch (args.weight.format) {
    case PS_LINEAR_F32: run_float<FloatTile<F32Values>>(call); break;
    case PS_LINEAR_BF16: run_float<FloatTile<BF16Values>>(call); break;
    case PS_LINEAR_F16: run_float<FloatTile<F16Values>>(call); break;
    case PS_LINEAR_INT8: run_int<IntTile<Bytes, f16, false, 1>>(call); break;
    case PS_LINEAR_INT8_G16: run_int<IntTile<Bytes, float, false, 2>>(call); break;
    case PS_LINEAR_INT8_MIN: run_int<IntTile<Bytes, float, true, 1>>(call); break;
    case PS_LINEAR_INT4_SYM: run_int<IntTile<Nibbles, f16, false, 1>>(call); break;
    case PS_LINEAR_INT4: run_int<IntTile<Nibbles, f16, true, 1>>(call); break;
    case PS_LINEAR_INT4_F32: run_int<IntTile<Nibbles, float, true, 1>>(call); break;
  }
}

}  // namespace PS_ISA
}  // namespace ps
