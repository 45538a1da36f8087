// Exact products (linear_exact.h) of more than a few rows, by tiles of 16 rows, 64 numbers of k and a panel of 16 columns.
// Part of linear_kernels.cpp.
//
// A panel's weights are unpacked to two planes of tiles once for a block of rows. Tiles are multiplied one or two at a time;
// what has left them is written out between the products that follow.
#pragma once

#ifdef PS_ISA_AMX

namespace ps {
namespace PS_ISA {
namespace {

// The fewest rows that tiles pay for.
constexpr int64_t kExactAmxRows = 5;
constexpr int64_t kExactAmxDepth = 1 << 15;  // up to which the sums in the tiles, and of two of them, keep within 32 bits
constexpr int64_t kStep = 2 * kGroup;        // k that a tile takes
constexpr int64_t kTileBytes = kAmxRows * kStep;     // of one plane
constexpr int64_t kSums = kAmxRows * kPanel;         // of a tile
constexpr int64_t kPairRows = 2 * kAmxRows;
constexpr int64_t kExactRing = 4;                    // steps of unpacked weights that are kept for one pass
constexpr int64_t kExactBlockBytes = 1 << 20;        // of activations that share unpacked weights: half the L2 cache

PS_INLINE bool takes_tiles(int64_t num_rows, int64_t depth) {
  return num_rows >= kExactAmxRows && depth <= kExactAmxDepth;
}

PS_INLINE int64_t num_steps(int64_t depth) { return (depth + kStep - 1) / kStep; }

// Of up to 16 rows: sums in tiles 0 to 3: high * high, high * low, low * high, low * low; activations in 4 and 5, weights in
// 6 and 7. Of more, two tiles of rows at once: sums of both in 0 and 1 (high * high), 2 and 3 (high * low and low * high),
// 4 and 5 (low * low); activations in 6, weights in 7.
class ExactTiles {
 public:
  ExactTiles() = default;
  ~ExactTiles() { _tile_release(); }
  ExactTiles(const ExactTiles&) = delete;
  ExactTiles& operator=(const ExactTiles&) = delete;

  // How many rows tiles of sums and activations have. Fewer take less time; of two tiles at once each has all.
  void shape(int64_t height) {
    if (height == height_) return;
    height_ = height;
    const auto rows = static_cast<uint8_t>(height);
    const struct __attribute__((packed)) {
      uint8_t palette = 1, start_row = 0;
      uint8_t reserved[14] = {};
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } config = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {rows, rows, rows, rows, rows, rows, kAmxRows, kAmxRows}};
    written(&config);
    _tile_loadconfig(&config);
  }

 private:
  int64_t height_ = 0;
};

// Two registers of 16-bit weights, of k and k + 1, to a row of each plane.
PS_INLINE void store_planes(__m512i first, __m512i second, uint8_t* high, uint8_t* low) {
  const __m512i mask = _mm512_set1_epi16(0x00ff);
  const __m512i inner = _mm512_shldi_epi16(second, first, 8);  // the low byte of the second, the high one of the first
  _mm512_store_si512(high, _mm512_ternarylogic_epi32(mask, inner, second, 0xca));  // mask ? inner : second
  _mm512_store_si512(low, _mm512_ternarylogic_epi32(mask, first, inner, 0xca));
}

// One group of a panel to half a tile of each plane. High bytes are signed, low ones unsigned.
template <class Scale, bool kHasMin>
PS_INLINE void unpack_exactly(const ColumnSteps<Scale, kHasMin>& steps, const uint8_t* codes, const Scale* scales,
                              uint8_t* high, uint8_t* low) {
  using Steps = ColumnSteps<Scale, kHasMin>;
  const __m512i twice = _mm512_set4_epi32(0x0d0c0d0c, 0x09080908, 0x05040504, 0x01000100);
  const __m512i scale = _mm512_shuffle_epi8(Steps::rounded(scales, steps.inverse), twice);
  const __m512i min = kHasMin ? _mm512_shuffle_epi8(Steps::rounded(scales + kPanel, steps.inverse), twice)
                              : _mm512_slli_epi16(_mm512_sub_epi16(_mm512_setzero_si512(), scale), 3);
  const __m512i mask = _mm512_set1_epi16(15);
  const auto weight = [&](__m512i code) __attribute__((always_inline)) {
    return _mm512_add_epi16(_mm512_mullo_epi16(code, scale), min);
  };
  PS_UNROLL
  for (int i = 0; i < 4; ++i) {
    const __m512i x = _mm512_loadu_si512(codes + 64 * i);
    store_planes(weight(_mm512_and_si512(x, mask)), weight(_mm512_and_si512(_mm512_srli_epi16(x, 8), mask)),
                 high + 128 * i, low + 128 * i);
    store_planes(weight(_mm512_and_si512(_mm512_srli_epi16(x, 4), mask)), weight(_mm512_srli_epi16(x, 12)),
                 high + 128 * i + 64, low + 128 * i + 64);
  }
}

// Rows as tiles, [tile][step][plane][row][64], a last half step of zeros; then their scales.
struct AmxLayout {
  int64_t tile_bytes, num_bytes, scales_at;

  AmxLayout(int64_t num_rows, int64_t depth) {
    tile_bytes = num_steps(depth) * 2 * kTileBytes;
    scales_at = (num_rows + kAmxRows - 1) / kAmxRows * tile_bytes;
    num_bytes = scales_at + num_rows * 4;
  }

  const float* scales(const uint8_t* memory) const { return reinterpret_cast<const float*>(memory + scales_at); }

  // What the next row reads and writes is fetched meanwhile: the weights that passed through the cache have pushed it out.
  void prepare_row(const float* x, const float* next, int64_t depth, int64_t row, uint8_t* memory) const {
    const RowScale scale(x, depth);
    reinterpret_cast<float*>(memory + scales_at)[row] = scale.scale;
    uint8_t* to = memory + row / kAmxRows * tile_bytes + row % kAmxRows * kStep;
    const __m512 inverse = _mm512_set1_ps(scale.inverse);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int64_t k = 0; k < depth; k += kStep, to += 2 * kTileBytes) {
      const auto rounded = [&](int i) __attribute__((always_inline)) {
        const __mmask16 is_there = k + 16 * i < depth ? 0xffff : 0;
        return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(is_there, x + k + 16 * i), inverse));
      };
      PS_UNROLL
      for (int i = 0; i < 4; ++i) __builtin_prefetch(next + k + 16 * i);
      __builtin_prefetch(to + kStep, 1);
      __builtin_prefetch(to + kTileBytes + kStep, 1);
      // As round_to_codes does, but without sums. Packing interleaves the quarters of registers, which `order` undoes.
      __m512i high[2], low[2];
      PS_UNROLL
      for (int i = 0; i < 2; ++i) {
        const __m512i q = _mm512_packs_epi32(rounded(2 * i), rounded(2 * i + 1));
        high[i] = _mm512_srai_epi16(_mm512_add_epi16(q, _mm512_set1_epi16(128)), 8);
        low[i] = _mm512_max_epi16(_mm512_sub_epi16(q, _mm512_slli_epi16(high[i], 8)), _mm512_set1_epi16(-127));
      }
      _mm512_store_si512(to, _mm512_permutexvar_epi32(order, _mm512_packs_epi16(high[0], high[1])));
      _mm512_store_si512(to + kTileBytes, _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low[0], low[1])));
    }
  }
};

// Sums that have left the tiles and are on their way out, a row at a time between the products that follow: the processor
// does both at once, but does not look far enough ahead to find it out.
class FinishedSums {
 public:
  static constexpr int64_t kCount = 3 * 2 * kSums;  // of two tiles; of one there are four products
  static constexpr int64_t kBytes = 2 * kCount * 4;

  // memory: kBytes.
  FinishedSums(const LinearArgs& args, const float* row_scales, uint8_t* memory)
      : args_(args), row_scales_(row_scales), memory_(reinterpret_cast<int32_t*>(memory)) {}

  // Where the next sums go, [product][row of one or two tiles][16], which `begin` then starts to write out.
  int32_t* place() const { return memory_ + (is_second_ ? kCount : 0); }

  void begin(bool is_pair, int64_t num_rows, int64_t row, int64_t column, __m512 step) {
    sums_ = place();
    is_pair_ = is_pair;
    is_second_ = !is_second_;
    num_rows_ = num_rows;
    done_ = 0;
    row_ = row;
    column_ = column;
    step_ = step;
  }

  PS_INLINE void write(FinishedSums* self, int64_t count) {
    const int64_t last = self->done_ + count < self->num_rows_ ? self->done_ + count : self->num_rows_;
    for (int64_t i = self->done_; i < last; ++i) {
      const int32_t* row = self->sums_ + i * kPanel;
      const int64_t next = self->is_pair_ ? 2 * kSums : kSums;
      __m512i middle = _mm512_load_si512(row + next);
      if (!self->is_pair_) middle = _mm512_add_epi32(middle, _mm512_load_si512(row + 2 * next));
      const __m512i rest = _mm512_and_si512(middle, _mm512_set1_epi32(255));
      const __m512i lowest = _mm512_load_si512(row + (self->is_pair_ ? 2 * next : 3 * next));
      const __m512i low = _mm512_add_epi32(lowest, _mm512_slli_epi32(rest, 8));
      const __m512i carry = _mm512_add_epi32(_mm512_srai_epi32(middle, 8), _mm512_srai_epi32(low, 16));
      const __m512 high = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_load_si512(row), carry));
      Vec one[1][1] = {{{scaled(high, _mm512_and_si512(low, _mm512_set1_epi32(0xffff)), self->step_,
                                self->row_scales_[self->row_ + i])}}};
      store_tile<1, 1>(self->args_, self->row_ + i, self->column_, one);
    }
    self->done_ = last;
  }

  int64_t num_rows() const { return num_rows_; }

 private:
  const LinearArgs& args_;
  const float* row_scales_;
  int32_t* memory_;
  const int32_t* sums_ = nullptr;
  bool is_second_ = false, is_pair_ = false;
  int64_t num_rows_ = 0, done_ = 0, row_ = 0, column_ = 0;
  __m512 step_ = {};
};

struct ExactPanel {
  const uint8_t* codes;
  int64_t num_groups;
  const uint8_t* ahead;  // what is fetched into the cache meanwhile
  int64_t ahead_bytes;   // of it, a step
  uint8_t* unpacked;     // [step][plane] tiles
};

// The sums of one or two tiles of rows by a panel, left in the tiles. kUnpacks: the weights are unpacked on the way, and
// kept where more rows follow.
template <class Scale, bool kHasMin, bool kIsPair, bool kUnpacks>
void multiply_step_by_step(const ExactPanel& panel, const ColumnSteps<Scale, kHasMin>& steps, const uint8_t* activations,
                           bool keeps, FinishedSums* finished) {
  const int64_t count = (panel.num_groups + 1) / 2;
  const int64_t rows_a_step = (finished->num_rows() + count - 1) / count;
  const uint8_t* next = activations + count * 2 * kTileBytes;  // tile
  const auto* scales = scales_of<Scale>(panel.codes, panel.num_groups);
  const uint8_t *codes = panel.codes, *ahead = panel.ahead;
  const auto place_of = [&](int64_t step) __attribute__((always_inline)) {
    return panel.unpacked + (keeps ? step : step % kExactRing) * 2 * kTileBytes;
  };
  const auto unpack = [&](int64_t step) __attribute__((always_inline)) {
    uint8_t* to = place_of(step);
    const int64_t groups = panel.num_groups - 2 * step;
    PS_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (half == 1 && groups < 2) break;  // activations are zero there
      unpack_exactly<Scale, kHasMin>(steps, codes, scales, to + half * kTileBytes / 2,
                                     to + kTileBytes + half * kTileBytes / 2);
      codes += kGroup * kPanel / 2;
      scales += ColumnSteps<Scale, kHasMin>::kCount;
    }
    for (int64_t i = 0; i < panel.ahead_bytes; i += 64) __builtin_prefetch(ahead + i, 0, 2);
    ahead += panel.ahead_bytes;
  };
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if (kIsPair) {
    _tile_zero(4);
    _tile_zero(5);
  }
  if (kUnpacks) unpack(0);
  for (int64_t step = 0; step < count; ++step, activations += 2 * kTileBytes, next += 2 * kTileBytes) {
    if (kUnpacks && step + 1 < count) unpack(step + 1);
    const uint8_t* weights = place_of(step);
    written(weights);
    // All products by the same weights one after the other: these are then at hand. A sum is used again as late as can be.
    if (kIsPair) {
      _tile_loadd(7, weights, 64);
      _tile_loadd(6, activations, 64);
      _tile_dpbssd(0, 6, 7);
      _tile_loadd(6, next, 64);
      _tile_dpbssd(1, 6, 7);
      _tile_loadd(6, activations + kTileBytes, 64);
      _tile_dpbssd(2, 6, 7);
      _tile_loadd(6, next + kTileBytes, 64);
      _tile_dpbssd(3, 6, 7);
      _tile_loadd(7, weights + kTileBytes, 64);
      _tile_loadd(6, activations + kTileBytes, 64);
      _tile_dpbsud(4, 6, 7);
      _tile_loadd(6, next + kTileBytes, 64);
      _tile_dpbsud(5, 6, 7);
      _tile_loadd(6, activations, 64);
      _tile_dpbsud(2, 6, 7);
      _tile_loadd(6, next, 64);
      _tile_dpbsud(3, 6, 7);
    } else {
      _tile_loadd(6, weights, 64);
      _tile_loadd(4, activations, 64);
      _tile_dpbssd(0, 4, 6);
      _tile_loadd(5, activations + kTileBytes, 64);
      _tile_dpbssd(2, 5, 6);
      _tile_loadd(7, weights + kTileBytes, 64);
      _tile_dpbsud(1, 4, 7);
      _tile_dpbsud(3, 5, 7);
    }
    FinishedSums::write(finished, rows_a_step);
  }
}

// The rows of `tiles` by a panel, on their way into args.out. first_row: which one of args is the first of `tiles`.
template <class Scale, bool kHasMin>
void multiply_panel(const uint8_t* tiles, int64_t tile_bytes, int64_t num_rows, int64_t first_row, int64_t column,
                    const ExactPanel& panel, ExactTiles* config, FinishedSums* finished) {
  const ColumnSteps<Scale, kHasMin> steps(scales_of<Scale>(panel.codes, panel.num_groups), panel.num_groups);
  const bool keeps = num_rows > kPairRows;
  for (int64_t row = 0; row < num_rows; row += kPairRows, tiles += 2 * tile_bytes) {
    const int64_t height = num_rows - row < kPairRows ? num_rows - row : kPairRows;
    const bool is_pair = height > kAmxRows;
    config->shape(is_pair ? kAmxRows : height);
    if (is_pair && row == 0) {
      multiply_step_by_step<Scale, kHasMin, true, true>(panel, steps, tiles, keeps, finished);
    } else if (is_pair) {
      multiply_step_by_step<Scale, kHasMin, true, false>(panel, steps, tiles, true, finished);
    } else if (row == 0) {
      multiply_step_by_step<Scale, kHasMin, false, true>(panel, steps, tiles, keeps, finished);
    } else {
      multiply_step_by_step<Scale, kHasMin, false, false>(panel, steps, tiles, true, finished);
    }
    FinishedSums::write(finished, kPairRows);
    int32_t* sums = finished->place();
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + kSums, 64);
    _tile_stored(2, sums + 2 * kSums, 64);
    _tile_stored(3, sums + 3 * kSums, 64);
    if (is_pair) {
      _tile_stored(4, sums + 4 * kSums, 64);
      _tile_stored(5, sums + 5 * kSums, 64);
    }
    written(sums);
    finished->begin(is_pair, height, first_row + row, column, steps.step);
  }
}

// Memory of a piece of work: finished sums, then unpacked weights of a panel.
int64_t exact_piece_bytes(int64_t depth) { return FinishedSums::kBytes + num_steps(depth) * 2 * kTileBytes; }

// `next`: the panel that follows. memory: exact_piece_bytes.
PS_INLINE ExactPanel exact_panel(const Call& call, int64_t column, int64_t next, uint8_t* memory) {
  const int64_t depth = call.args.weight.in_features, count = num_steps(depth);
  return {call.panel(column), depth / kGroup, call.panel(next), (call.panel_bytes + count - 1) / count,
          memory + FinishedSums::kBytes};
}

template <class Scale, bool kHasMin>
bool run_exact_amx(const Call& call) {
  const LinearArgs& args = call.args;
  const int64_t depth = args.weight.in_features;
  const AmxLayout layout(args.num_rows, depth);
  auto* tiles = static_cast<uint8_t*>(thread_scratch(kScratchCall, static_cast<size_t>(layout.num_bytes)));
  if (tiles == nullptr) return false;
  parallel_for(args.num_rows, 8192 / depth + 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      const float* x = args.x + row * args.x_stride;
      layout.prepare_row(x, x + args.x_stride, depth, row, tiles);
    }
  });
  int64_t block_tiles = kExactBlockBytes / layout.tile_bytes / 2 * 2;
  if (block_tiles < 4) block_tiles = 4;
  const int64_t block_rows = block_tiles * kAmxRows, num_panels = call.last_panel + 1;
  const int64_t items = (args.num_rows + block_rows - 1) / block_rows * num_panels;
  bool has_memory = true;
  parallel_for(items, (items - 1) / (num_threads() * 5) + 1, [&](int64_t begin, int64_t end, int) {
    auto* memory = static_cast<uint8_t*>(thread_scratch(kScratchPiece, static_cast<size_t>(exact_piece_bytes(depth))));
    if (memory == nullptr) {
      __atomic_store_n(&has_memory, false, __ATOMIC_RELAXED);
      return;
    }
    ExactTiles config;
    FinishedSums finished(args, layout.scales(tiles), memory);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t block = item / num_panels, row = block * block_rows, column = item % num_panels * kPanel;
      const int64_t left = args.num_rows - row;
      const ExactPanel panel = exact_panel(call, column, (item + 1) % num_panels * kPanel, memory);
      multiply_panel<Scale, kHasMin>(tiles + block * block_tiles * layout.tile_bytes, layout.tile_bytes,
                                     left < block_rows ? left : block_rows, row, column, panel, &config, &finished);
    }
    FinishedSums::write(&finished, kPairRows);
  });
  return has_memory;
}

template <class Scale, bool kHasMin>
bool run_exact(Call* call) {
  return takes_tiles(call->args.num_rows, call->args.weight.in_features) ? run_exact_amx<Scale, kHasMin>(*call)
                                                                          : run_exact_tiles<Scale, kHasMin>(call);
}

}  // namespace
}  // namespace PS_ISA
}  // namespace ps

#endif
