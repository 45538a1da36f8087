// Linears with 8-bit weights on AMX tiles (Intel SDM volume 1, chapter 18): 16 rows by a panel of 16 columns, one group of
// 32 a step. Part of linear_kernels.cpp. The sums of a group are exact integers and enter the chain as everywhere else, so
// a row has the same bits as from the vector kernels, and which of them computes it is a matter of speed.
//
// A group of one panel, [8][16 columns][4 k], is a tile as it lies in memory; each plane of the activations is multiplied
// by it. A step multiplies the next group while the sums of the last one are scaled and added.
#pragma once

#ifdef PS_ISA_AMX

namespace ps {
namespace PS_ISA {
namespace {

constexpr int kAmxRows = 16;
constexpr int64_t kAmxMinRows = 12;     // the fewest rows that a tile pays for
constexpr int64_t kAmxBlockTiles = 16;  // that share a panel; their activations stay in the L2 cache
constexpr int64_t kAmxPlane = kAmxRows * kGroup;       // bytes of a group's activations, one plane
constexpr int64_t kAmxGroup = kPlanes * kAmxPlane;     // and both
constexpr int64_t kAmxCodes = kGroup * kPanel;         // bytes of a group's codes
constexpr int kAmxWords = 2;                           // of meta, each for 16 rows: [group][word][row]

// GCC 12's tile intrinsics do not say what memory they read: what was written before must be there by then.
PS_INLINE void written(const void* memory) { asm volatile("" ::"r"(memory) : "memory"); }

// Tiles 0 and 1: sums of both planes; 2 and 3: activations, 16 rows of 32 bytes; 4: codes, 8 rows.
class TileConfig {
 public:
  TileConfig() {
    struct __attribute__((packed)) {
      uint8_t palette = 1, start_row = 0;
      uint8_t reserved[14] = {};
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } config = {1, 0, {}, {64, 64, kGroup, kGroup, 64}, {kAmxRows, kAmxRows, kAmxRows, kAmxRows, kGroup / 4}};
    written(&config);
    _tile_loadconfig(&config);
  }
  ~TileConfig() { _tile_release(); }
  TileConfig(const TileConfig&) = delete;
  TileConfig& operator=(const TileConfig&) = delete;
};

PS_INLINE void multiply_group(const int8_t* activations, const uint8_t* codes) {
  written(codes);
  _tile_zero(0);
  _tile_zero(1);
  _tile_loadd(4, codes, 64);
  _tile_loadd(2, activations, kGroup);
  _tile_loadd(3, activations + kAmxPlane, kGroup);
  _tile_dpbsud(0, 2, 4);
  _tile_dpbsud(1, 3, 4);
}

PS_INLINE void store_sums(int32_t* sums) {
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
}

// scales: as they lie in the panel. `ahead`: the next panel, to be fetched into the cache meanwhile, or null.
template <class Scale, bool kHasMin>
void amx_tile(const int8_t* activations, const float* meta, const uint8_t* codes, const Scale* scales,
              int64_t num_groups, const uint8_t* ahead, int64_t ahead_bytes, Vec* out) {
  alignas(64) int32_t sums[2][512];
  Vec sum[kAmxRows];  // not `out`: the tile instructions count as writing to all memory that others know of
  PS_UNROLL
  for (int i = 0; i < kAmxRows; ++i) sum[i] = zero();
  multiply_group(activations, codes);
  store_sums(sums[0]);
  for (int64_t group = 0; group < num_groups; ++group) {
    const bool is_last = group + 1 == num_groups;
    if (!is_last) multiply_group(activations + (group + 1) * kAmxGroup, codes + (group + 1) * kAmxCodes);
    if (ahead != nullptr) {
      for (int64_t i = 0; i < ahead_bytes; i += 64) __builtin_prefetch(ahead + i, 0, 2);
      ahead += ahead_bytes;
    }
    const Vec scale = load(scales), min = kHasMin ? load(scales + kPanel) : zero();
    PS_UNROLL
    for (int i = 0; i < kAmxRows; ++i) {
      const int32_t* row = sums[group % 2] + kPanel * i;
      __m512i total = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(row), 8), _mm512_load_si512(row + 256));
      if (!kHasMin) total = _mm512_add_epi32(total, _mm512_set1_epi32(static_cast<int>(bits_of(meta[kAmxRows + i]))));
      sum[i] = fma(to_float(IntVec{total}), scale * set1(meta[i]), sum[i]);
      if (kHasMin) sum[i] = fma(min, set1(meta[kAmxRows + i]), sum[i]);
    }
    if (!is_last) store_sums(sums[(group + 1) % 2]);
    scales += kPanel * (kHasMin ? 2 : 1);
    meta += kAmxWords * kAmxRows;
  }
  PS_UNROLL
  for (int i = 0; i < kAmxRows; ++i) out[i] = sum[i];
}

struct AmxCall {
  const LinearArgs& args;
  const Call& panels;
  int64_t num_tiles;
  const int8_t* codes;  // [tile][group][plane][row][32]
  const float* meta;    // [tile][group][word][row]
};

// Row i of a tile.
void quantize_amx_row(const float* x, int64_t depth, const LinearFormat& format, int64_t i, int8_t* codes, float* meta) {
  quantize_row<kGroup>(x, depth, format, kAmxPlane, codes + i * kGroup, kAmxRows, kAmxWords * kAmxRows, meta + i);
}

// The tile's rows; those that the matrix lacks count as zero.
void prepare_amx_tile(const LinearArgs& args, int64_t row, int8_t* codes, float* meta) {
  const LinearFormat& format = kLinearFormats[args.weight.format];
  const int64_t depth = args.weight.in_features, num_groups = depth / kGroup;
  const int64_t num_rows = args.num_rows - row < kAmxRows ? args.num_rows - row : kAmxRows;
  if (num_rows < kAmxRows) {
    std::memset(codes, 0, static_cast<size_t>(num_groups * kAmxGroup));
    std::memset(meta, 0, static_cast<size_t>(num_groups * kAmxWords * kAmxRows) * sizeof(float));
  }
  for (int64_t i = 0; i < num_rows; ++i) {
    quantize_amx_row(args.x + (row + i) * args.x_stride, depth, format, i, codes, meta);
  }
}

template <class Scale, bool kHasMin>
void run_amx_tiles(const AmxCall& call) {
  const int64_t num_groups = call.args.weight.in_features / kGroup;
  const int64_t num_panels = call.panels.last_panel + 1;
  const int64_t items = (call.num_tiles + kAmxBlockTiles - 1) / kAmxBlockTiles * num_panels;
  parallel_for(items, items / (num_threads() * 16) + 1, [&](int64_t begin, int64_t end, int) {
    const TileConfig config;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item / num_panels * kAmxBlockTiles;
      const int64_t last = first + kAmxBlockTiles < call.num_tiles ? first + kAmxBlockTiles : call.num_tiles;
      const int64_t column = item % num_panels * kPanel;
      const uint8_t* ahead = call.panels.panel((item + 1) % num_panels * kPanel);
      const uint8_t* codes = call.panels.panel(column);
      const auto* scales = reinterpret_cast<const Scale*>(codes + num_groups * kAmxCodes);
      for (int64_t tile = first; tile < last; ++tile) {
        const int8_t* activations = call.codes + tile * num_groups * kAmxGroup;
        const float* meta = call.meta + tile * num_groups * kAmxWords * kAmxRows;
        const uint8_t* fetched = tile == first ? ahead : nullptr;
        const int64_t fetched_bytes = (call.panels.panel_bytes + num_groups - 1) / num_groups, row = tile * kAmxRows;
        const int64_t height = call.args.num_rows - row < kAmxRows ? call.args.num_rows - row : kAmxRows;
        for (int64_t i = 0; i < height; ++i) {
          __builtin_prefetch(call.args.out + (row + i) * call.args.out_stride + column, 1);
        }
        Vec sum[kAmxRows];
        amx_tile<Scale, kHasMin>(activations, meta, codes, scales, num_groups, fetched, fetched_bytes, sum);
        for (int64_t i = 0; i < height; ++i) {
          Vec one[1][1] = {{sum[i]}};
          store_tile<1, 1>(call.args, row + i, column, one);
        }
      }
    }
  });
}

// Computes the first rows of the call, in whole tiles as far as that pays; returns how many, or -1 without memory.
template <class Scale, bool kHasMin>
int64_t run_amx(const Call& panels) {
  const LinearArgs& args = panels.args;
  int64_t num_tiles = args.num_rows / kAmxRows;
  if (args.num_rows - num_tiles * kAmxRows >= kAmxMinRows) ++num_tiles;
  if (num_tiles == 0) return 0;
  const int64_t num_groups = args.weight.in_features / kGroup;
  const int64_t tile_codes = num_groups * kAmxGroup, tile_words = num_groups * kAmxWords * kAmxRows;
  auto* codes = static_cast<int8_t*>(
      thread_scratch(kScratchCall, static_cast<size_t>(num_tiles * (tile_codes + tile_words * 4))));
  if (codes == nullptr) return -1;
  auto* meta = reinterpret_cast<float*>(codes + num_tiles * tile_codes);
  parallel_for(num_tiles, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t tile = begin; tile < end; ++tile) {
      prepare_amx_tile(args, tile * kAmxRows, codes + tile * tile_codes, meta + tile * tile_words);
    }
  });
  run_amx_tiles<Scale, kHasMin>(AmxCall{args, panels, num_tiles, codes, meta});
  return num_tiles * kAmxRows < args.num_rows ? num_tiles * kAmxRows : args.num_rows;
}

}  // namespace
}  // namespace PS_ISA
}  // namespace ps

#endif
