// Integer linears on AMX tiles (Intel SDM volume 1, chapter 18): 16 rows by a panel of 16 columns, one group of 32 a step.
// Part of linear_kernels.cpp. The sums of a group are exact integers and enter the chain as everywhere else, so a row
// has the same bits as from the vector kernels, and which of them computes it is a matter of speed.
//
// A group of one panel of 8-bit codes, [8][16 columns][4 k], is a tile as it lies in memory; each plane of the activations
// is multiplied by it. Nibbles are unpacked once for all rows, to a tile of 16 * code over code: one product with
// activations 16 * high + low, [32 high, 32 low] a row, gives the whole sum. A step multiplies the next group while the
// sums of the last one are scaled and added.
#pragma once

#ifdef PS_HAVE_AMX

namespace ps {
namespace PS_ISA {
namespace {

constexpr int kAmxRows = 16;
constexpr int kAmxFewRows = 8;  // of a last tile that has no more, which takes half the time
constexpr int64_t kAmxBlockTiles = 16;  // that share unpacked nibbles; their activations stay in the L2 cache
constexpr int64_t kAmxGroup = 2 * kAmxRows * kGroup;  // bytes of a group's activations
constexpr int64_t kAmxPlane = kAmxRows * kGroup;      // of one plane of them, beside 8-bit codes
constexpr int64_t kAmxCodes = kGroup * kPanel;        // bytes of a group's 8-bit codes
constexpr int kAmxWords = 2;                          // of meta, each for 16 rows: [group][word][row]

// The fewest rows that a tile pays for.
constexpr int64_t kAmxMinRows = 12, kAmxMinNibbleRows = 5;

template <class Codes>
constexpr bool kAmxNibbles = Codes::kDepth == Nibbles::kDepth;

// GCC 12's tile intrinsics do not say what memory they read: what was written before must be there by then.
PS_INLINE void written(const void* memory) { asm volatile("" ::"r"(memory) : "memory"); }

// Beside bytes, tiles 0 and 1: sums of both planes; 2 and 3: activations, 16 rows of 32 bytes; 4: codes, 8 rows.
// Beside nibbles, 0 and 1: sums of 16 and of few rows; 2 and 3: activations, rows of 64 bytes; 4: codes, 16 rows.
class TileConfig {
 public:
  explicit TileConfig(bool nibbles) {
    const uint8_t second = nibbles ? kAmxFewRows : kAmxRows;
    const uint16_t depth = nibbles ? 2 * kGroup : kGroup;
    struct __attribute__((packed)) {
      uint8_t palette = 1, start_row = 0;
      uint8_t reserved[14] = {};
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } config = {1, 0, {}, {64, 64, depth, depth, 64},
                {kAmxRows, second, kAmxRows, second, static_cast<uint8_t>(depth / 4)}};
    written(&config);
    _tile_loadconfig(&config);
  }
  ~TileConfig() { _tile_release(); }
  TileConfig(const TileConfig&) = delete;
  TileConfig& operator=(const TileConfig&) = delete;
};

// The planes of bytes: multiply_group, store_sums and total of a row's sums.
struct AmxBytes {
  static constexpr int kSums = 512;
  static constexpr int64_t kCodes = kAmxCodes;
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
  PS_INLINE __m512i total(const int32_t* row) {
    return _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(row), 8), _mm512_load_si512(row + 256));
  }
};

template <int kRows>
struct AmxNibbles {
  static constexpr int kSums = 16 * kRows;
  static constexpr int64_t kCodes = 2 * kAmxCodes;
  PS_INLINE void multiply_group(const int8_t* activations, const uint8_t* codes) {
    written(codes);
    if constexpr (kRows == kAmxRows) {
      _tile_zero(0);
      _tile_loadd(4, codes, 64);
      _tile_loadd(2, activations, 64);
      _tile_dpbsud(0, 2, 4);
    } else {
      _tile_zero(1);
      _tile_loadd(4, codes, 64);
      _tile_loadd(3, activations, 64);
      _tile_dpbsud(1, 3, 4);
    }
  }
  PS_INLINE void store_sums(int32_t* sums) {
    if constexpr (kRows == kAmxRows) {
      _tile_stored(0, sums, 64);
    } else {
      _tile_stored(1, sums, 64);
    }
  }
  PS_INLINE __m512i total(const int32_t* row) { return _mm512_load_si512(row); }
};

// codes: [group] tiles, scales: as they lie in the panel. `ahead`: the next panel, to be fetched into the cache
// meanwhile, or null.
template <class Product, int kRows, class Scale, bool kHasMin>
void amx_tile(const int8_t* activations, const float* meta, const uint8_t* codes, const Scale* scales,
              int64_t num_groups, const uint8_t* ahead, int64_t ahead_bytes, Vec* out) {
  alignas(64) int32_t sums[2][Product::kSums];
  Vec sum[kRows];  // not `out`: the tile instructions count as writing to all memory that others know of
  PS_UNROLL
  for (int i = 0; i < kRows; ++i) sum[i] = zero();
  Product::multiply_group(activations, codes);
  Product::store_sums(sums[0]);
  for (int64_t group = 0; group < num_groups; ++group) {
    const bool is_last = group + 1 == num_groups;
    if (!is_last) {
      Product::multiply_group(activations + (group + 1) * kAmxGroup, codes + (group + 1) * Product::kCodes);
    }
    if (ahead != nullptr) {
      for (int64_t i = 0; i < ahead_bytes; i += 64) __builtin_prefetch(ahead + i, 0, 2);
      ahead += ahead_bytes;
    }
    const Vec scale = load(scales), min = kHasMin ? load(scales + kPanel) : zero();
    PS_UNROLL
    for (int i = 0; i < kRows; ++i) {
      __m512i total = Product::total(sums[group % 2] + 16 * i);
      if (!kHasMin) total = _mm512_add_epi32(total, _mm512_set1_epi32(static_cast<int>(bits_of(meta[kAmxRows + i]))));
      sum[i] = fma(to_float(IntVec{total}), scale * set1(meta[i]), sum[i]);
      if (kHasMin) sum[i] = fma(min, set1(meta[kAmxRows + i]), sum[i]);
    }
    if (!is_last) Product::store_sums(sums[(group + 1) % 2]);
    scales += kPanel * (kHasMin ? 2 : 1);
    meta += kAmxWords * kAmxRows;
  }
  PS_UNROLL
  for (int i = 0; i < kRows; ++i) out[i] = sum[i];
}

// The same for a tile of `height` rows, into as many of `out` or more.
template <class Codes, class Scale, bool kHasMin>
PS_INLINE void amx_rows(const int8_t* activations, const float* meta, const uint8_t* codes, const Scale* scales,
                        int64_t num_groups, const uint8_t* ahead, int64_t ahead_bytes, int64_t height, Vec* out) {
  if constexpr (!kAmxNibbles<Codes>) {
    amx_tile<AmxBytes, kAmxRows, Scale, kHasMin>(activations, meta, codes, scales, num_groups, ahead, ahead_bytes, out);
  } else if (height > kAmxFewRows) {
    amx_tile<AmxNibbles<kAmxRows>, kAmxRows, Scale, kHasMin>(activations, meta, codes, scales, num_groups, ahead,
                                                             ahead_bytes, out);
  } else {
    amx_tile<AmxNibbles<kAmxFewRows>, kAmxFewRows, Scale, kHasMin>(activations, meta, codes, scales, num_groups, ahead,
                                                                   ahead_bytes, out);
  }
}

// Nibbles of a panel, [group][4][16 columns][4 bytes], to bytes, [group][16 * code, code][8][16][4].
void unpack_nibbles(const uint8_t* from, int64_t num_groups, uint8_t* to) {
  const __m512i low = _mm512_set1_epi8(15), high = _mm512_set1_epi8(static_cast<char>(0xf0));
  for (int64_t group = 0; group < num_groups; ++group, to += 2 * kAmxCodes) {
    for (int i = 0; i < 4; ++i, from += 64) {
      const __m512i x = _mm512_loadu_si512(from);
      _mm512_store_si512(to + 128 * i, _mm512_and_si512(_mm512_slli_epi16(x, 4), high));
      _mm512_store_si512(to + 128 * i + 64, _mm512_and_si512(x, high));
      _mm512_store_si512(to + kAmxCodes + 128 * i, _mm512_and_si512(x, low));
      _mm512_store_si512(to + kAmxCodes + 128 * i + 64, _mm512_and_si512(_mm512_srli_epi16(x, 4), low));
    }
  }
}

struct AmxCall {
  const LinearArgs& args;
  const Call& panels;
  int64_t num_tiles;
  const int8_t* codes;  // [tile][group], [plane][row][32] beside bytes, [row][32 high, 32 low] beside nibbles
  const float* meta;    // [tile][group][word][row]
};

// quantize_row beside nibbles: the same numbers, as 16 * high + low, [32 high, 32 low] for each group. What the next row
// reads and writes is fetched meanwhile: the weights that passed through the cache have pushed it out.
void quantize_nibble_row(const float* x, const float* next, int64_t depth, const LinearFormat& format, int8_t* codes,
                         float* meta) {
  const float largest = largest_code(format);
  for (int64_t k = 0; k < depth; k += kGroup, codes += kAmxGroup, meta += kAmxWords * kAmxRows) {
    __builtin_prefetch(next + k);
    __builtin_prefetch(next + k + 16);
    __builtin_prefetch(codes + 2 * kGroup, 1);
    const uint32_t bits = largest_bits(x + k);
    const float limit = float_of(bits);
    const bool some = bits < 0x7f800000 && limit > 1e-33f;
    const __m512 inverse = _mm512_set1_ps(largest / limit);
    __m512i q[2], sums = _mm512_setzero_si512();
    for (int i = 0; i < 2; ++i) {
      const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + k + 16 * i), inverse));
      // What would be 256 * high - 128 is one more everywhere: see round_to_codes.
      const __m512i one = _mm512_set1_epi32(1), byte = _mm512_and_si512(whole, _mm512_set1_epi32(255));
      q[i] = _mm512_mask_add_epi32(whole, _mm512_cmpeq_epi32_mask(byte, _mm512_set1_epi32(128)), whole, one);
      if (!some) q[i] = _mm512_setzero_si512();
      sums = _mm512_add_epi32(sums, q[i]);
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(q[i], _mm512_set1_epi32(8)), 4);
      const __m512i low = _mm512_sub_epi32(q[i], _mm512_slli_epi32(high, 4));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + 16 * i), _mm512_cvtepi32_epi8(high));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + kGroup + 16 * i), _mm512_cvtepi32_epi8(low));
    }
    const float scale = some ? limit / largest : bits >= 0x7f800000 ? __builtin_nanf("") : 0.f;
    const int sum = _mm512_reduce_add_epi32(sums);
    meta[0] = scale;
    meta[kAmxRows] = format.has_min ? scale * static_cast<float>(sum)
                                    : float_of(static_cast<uint32_t>(-format.zero * sum));
  }
}

// Row i of a tile.
template <class Codes>
void quantize_amx_row(const float* x, const float* next, int64_t depth, const LinearFormat& format, int64_t i,
                      int8_t* codes, float* meta) {
  if constexpr (kAmxNibbles<Codes>) {
    quantize_nibble_row(x, next, depth, format, codes + i * 2 * kGroup, meta + i);
  } else {
    quantize_row<kGroup>(x, depth, format, kAmxPlane, codes + i * kGroup, kAmxRows, kAmxWords * kAmxRows, meta + i);
  }
}

// The tile's rows; those that the matrix lacks count as zero.
template <class Codes>
void prepare_amx_tile(const LinearArgs& args, int64_t row, int8_t* codes, float* meta) {
  const LinearFormat& format = kLinearFormats[args.weight.format];
  const int64_t depth = args.weight.in_features, num_groups = depth / kGroup;
  const int64_t num_rows = args.num_rows - row < kAmxRows ? args.num_rows - row : kAmxRows;
  if (num_rows < kAmxRows) {
    std::memset(codes, 0, static_cast<size_t>(num_groups * kAmxGroup));
    std::memset(meta, 0, static_cast<size_t>(num_groups * kAmxWords * kAmxRows) * sizeof(float));
  }
  for (int64_t i = 0; i < num_rows; ++i) {
    const float* x = args.x + (row + i) * args.x_stride;
    quantize_amx_row<Codes>(x, x + args.x_stride, depth, format, i, codes, meta);
  }
}

template <class Codes, class Scale, bool kHasMin>
void run_amx_tiles(const AmxCall& call, int* status) {
  constexpr bool kIsNibbles = kAmxNibbles<Codes>;
  const int64_t num_groups = call.args.weight.in_features / kGroup;
  const int64_t num_panels = call.panels.last_panel + 1;
  const int64_t items = (call.num_tiles + kAmxBlockTiles - 1) / kAmxBlockTiles * num_panels;
  parallel_for(items, items / (num_threads() * 16) + 1, [&](int64_t begin, int64_t end, int) {
    uint8_t* unpacked = nullptr;
    if (kIsNibbles) {
      unpacked = static_cast<uint8_t*>(thread_scratch(kScratchPiece, static_cast<size_t>(num_groups * 2 * kAmxCodes)));
      if (unpacked == nullptr) {
        __atomic_store_n(status, PS_OUT_OF_MEMORY, __ATOMIC_RELAXED);
        return;
      }
    }
    const TileConfig config(kIsNibbles);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item / num_panels * kAmxBlockTiles;
      const int64_t last = first + kAmxBlockTiles < call.num_tiles ? first + kAmxBlockTiles : call.num_tiles;
      const int64_t column = item % num_panels * kPanel;
      const uint8_t* ahead = call.panels.panel((item + 1) % num_panels * kPanel);
      const uint8_t* codes = call.panels.panel(column);
      const auto* scales =
          reinterpret_cast<const Scale*>(codes + num_groups * (kIsNibbles ? kAmxCodes / 2 : kAmxCodes));
      if (kIsNibbles) {
        unpack_nibbles(codes, num_groups, unpacked);
        codes = unpacked;
      }
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
        amx_rows<Codes, Scale, kHasMin>(activations, meta, codes, scales, num_groups, fetched, fetched_bytes, height,
                                        sum);
        for (int64_t i = 0; i < height; ++i) {
          Vec one[1][1] = {{sum[i]}};
          store_tile<1, 1>(call.args, row + i, column, one);
        }
      }
    }
  });
}

// Computes the first rows of the call, in whole tiles as far as that pays; returns how many, or -1 without memory.
template <class Codes, class Scale, bool kHasMin>
int64_t run_amx(const Call& panels) {
  const LinearArgs& args = panels.args;
  int64_t num_tiles = args.num_rows / kAmxRows;
  if (args.num_rows - num_tiles * kAmxRows >= (kAmxNibbles<Codes> ? kAmxMinNibbleRows : kAmxMinRows)) ++num_tiles;
  if (num_tiles == 0) return 0;
  const int64_t num_groups = args.weight.in_features / kGroup;
  const int64_t tile_codes = num_groups * kAmxGroup, tile_words = num_groups * kAmxWords * kAmxRows;
  auto* codes = static_cast<int8_t*>(
      thread_scratch(kScratchCall, static_cast<size_t>(num_tiles * (tile_codes + tile_words * 4))));
  if (codes == nullptr) return -1;
  auto* meta = reinterpret_cast<float*>(codes + num_tiles * tile_codes);
  parallel_for(num_tiles, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t tile = begin; tile < end; ++tile) {
      prepare_amx_tile<Codes>(args, tile * kAmxRows, codes + tile * tile_codes, meta + tile * tile_words);
    }
  });
  int status = PS_OK;
  run_amx_tiles<Codes, Scale, kHasMin>(AmxCall{args, panels, num_tiles, codes, meta}, &status);
  if (status != PS_OK) return -1;
  return num_tiles * kAmxRows < args.num_rows ? num_tiles * kAmxRows : args.num_rows;
}

}  // namespace
}  // namespace PS_ISA
}  // namespace ps

#endif
