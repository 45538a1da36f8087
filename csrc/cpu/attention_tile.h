// One tile of paged attention: scores, softmax weights and weighted values of one work item over kTile tokens.
// Part of attention_kernels.cpp, whose head explains the order of all sums.
#pragma once

#include "kernels.h"
#include "scratch.h"
#include "vec.h"

namespace ps {
namespace PS_ISA {
namespace {

constexpr int kTile = 64;
constexpr int kSplit = 512;
constexpr int kItemRows = 48;                          // rows of an item, if one token has no more
constexpr int kMaxRowGroup = 6;                        // rows of a register tile
constexpr int kVecs = kRegisters == 32 ? 4 : 2;        // vectors of a register tile
constexpr int kTileVecs = kTile / kWidth;
constexpr float kLowest = -1e30f;                      // running maximum before any score; finite, so m - m = 0

struct Problem {
  float* out;
  int64_t out_stride;
  const float* query;
  int64_t query_stride;
  int64_t num_heads, num_kv_heads, group, head_dim, block_size, block_stride;
  int64_t head_size, num_codes;  // what a block holds of one head's K or V: elements in all, and without scales
  const void* kv_data;
  const ps_attention_rows* rows;
  float scale;
  int64_t window;
  float soft_cap;
  int64_t item_tokens;
};

struct Item {
  int64_t seq, kv_head, first_query, num_queries;  // queries counted within the row
  int64_t num_rows;
  int64_t seen_begin, seen_end;  // positions that at least one of its queries sees
};

// What an item has gathered so far: for each item row the maximum score, the sum of weights, the weighted values.
struct State {
  float* maximum;
  float* sum;
  float* values;  // [num_rows][head_dim]
};

struct Scratch {
  float* query;    // [num_rows][head_dim], scaled
  float* weights;  // [num_rows][kTile]
  float* rescale;  // [num_rows]
  float* keys;     // [head_dim][kTile]
  float* key_scales;    // [kTile], of an 8-bit cache
  float* value_scales;  // [kTile]
  float* tokens;   // [kTile][head_dim], values
  State split, total;
};

struct Carver {
  float* next;
  float* take(int64_t count) {
    float* taken = next;
    next += (count + 15) / 16 * 16;
    return taken;
  }
};

int64_t padded(int64_t count) { return (count + 15) / 16 * 16; }
int64_t state_floats(int64_t rows, int64_t head_dim) { return 2 * padded(rows) + padded(rows * head_dim); }
int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

State carve_state(Carver& carver, int64_t rows, int64_t head_dim) {
  State state;
  state.maximum = carver.take(rows);
  state.sum = carver.take(rows);
  state.values = carver.take(rows * head_dim);
  return state;
}

bool carve(Scratch& scratch, int64_t rows, int64_t head_dim) {
  const int64_t floats = padded(rows * head_dim) + padded(rows * kTile) + padded(rows) +
                         2 * kTile + 2 * padded(head_dim * kTile) + 2 * state_floats(rows, head_dim);
  Carver carver{static_cast<float*>(thread_scratch(kScratchPiece, floats * sizeof(float)))};
  if (carver.next == nullptr) return false;
  scratch.query = carver.take(rows * head_dim);
  scratch.weights = carver.take(rows * kTile);
  scratch.rescale = carver.take(rows);
  scratch.keys = carver.take(head_dim * kTile);
  scratch.key_scales = carver.take(kTile);
  scratch.value_scales = carver.take(kTile);
  scratch.tokens = carver.take(head_dim * kTile);
  scratch.split = carve_state(carver, rows, head_dim);
  scratch.total = carve_state(carver, rows, head_dim);
  return true;
}

void clear(const State& state, int64_t rows, int64_t head_dim) {
  for (int64_t i = 0; i < rows; ++i) state.maximum[i] = kLowest;
  for (int64_t i = 0; i < rows; ++i) state.sum[i] = 0.f;
  for (int64_t i = 0; i < rows * head_dim; ++i) state.values[i] = 0.f;
}

float exp_of(float x) {
  alignas(64) float lanes[kWidth];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

template <class T>
struct Tile {
  const T* keys[kTile];    // of each segment: [head_dim] rows, key_stride apart, of segment_len tokens
  const T* values[kTile];  // of each segment: [segment_len][head_dim]
  int64_t key_stride;
  int segment_len;
  int begin, end;  // tokens of the tile that at least one query sees
};

template <class T>
void locate(const Problem& problem, const Item& item, int64_t tile_start, Tile<T>& tile) {
  const int32_t* table = problem.rows->block_tables + item.seq * problem.rows->block_tables_stride;
  const T* data = static_cast<const T*>(problem.kv_data) + item.kv_head * problem.head_size;
  tile.begin = static_cast<int>(max_of(0, item.seen_begin - tile_start));
  tile.end = static_cast<int>(min_of(kTile, item.seen_end - tile_start));
  tile.segment_len = static_cast<int>(min_of(problem.block_size, kTile));
  tile.key_stride = problem.block_size;
  for (int i = 0; i * tile.segment_len < tile.end; ++i) {
    const int64_t position = tile_start + int64_t{i} * tile.segment_len;
    // Blocks that no query sees may be gone from the table; any block will do, their scores are masked.
    const bool seen = (i + 1) * tile.segment_len > tile.begin;
    const int64_t block = seen ? table[position / problem.block_size] : 0;
    const int64_t offset = position % problem.block_size;
    const T* k = data + block * problem.block_stride;
    tile.keys[i] = k + offset;
    tile.values[i] = k + problem.num_kv_heads * problem.head_size + offset * problem.head_dim;
  }
}

// The lines of the tile that comes next, fetched into the cache while this one is computed: where blocks lie stands in
// the table, so the processor cannot guess it. A few at a time, between the parts of a tile: many at once would keep
// what the current tile reads waiting behind them.
struct Ahead {
  const char* starts[2 * kTile];
  int num_pieces = 0, piece = 0;
  int64_t piece_bytes = 0, offset = 0;

  int64_t lines() const { return num_pieces * ((piece_bytes + 63) / 64); }

  void fetch(int64_t count) {
    for (; piece < num_pieces && count > 0; ++piece, offset = 0) {
      const char* start = starts[piece];
      for (; offset < piece_bytes && count > 0; offset += 64, --count) __builtin_prefetch(start + offset, 0, 2);
      if (offset < piece_bytes) return;
    }
  }
};

// Blocks of at least a line, whole ones: of a block that spans tiles only its first tile is fetched ahead.
template <class T>
void look_ahead(const Problem& problem, const Item& item, int64_t tile_start, Ahead& ahead) {
  ahead.num_pieces = ahead.piece = 0;
  ahead.offset = 0;
  const int64_t len = min_of(problem.block_size, kTile);
  ahead.piece_bytes = len * problem.head_dim * static_cast<int64_t>(sizeof(T));
  const int32_t* table = problem.rows->block_tables + item.seq * problem.rows->block_tables_stride;
  const T* data = static_cast<const T*>(problem.kv_data) + item.kv_head * problem.head_size;
  const int64_t end = min_of(tile_start + kTile, item.seen_end);
  for (int64_t position = max_of(tile_start, item.seen_begin / len * len); position < end; position += len) {
    const T* k = data + table[position / problem.block_size] * problem.block_stride;
    const int64_t offset = position % problem.block_size * problem.head_dim;
    ahead.starts[ahead.num_pieces++] = reinterpret_cast<const char*>(k + offset);
    ahead.starts[ahead.num_pieces++] =
        reinterpret_cast<const char*>(k + problem.num_kv_heads * problem.head_size + offset);
  }
}

// The scales of a tile of an 8-bit cache, which follow a head's codes. Tokens that nobody sees get anything.
void gather_scales(const Problem& problem, const Tile<int8_t>& tile, int64_t tile_start, const Scratch& scratch) {
  const int len = tile.segment_len;
  for (int i = 0; i * len < tile.end; ++i) {
    const int64_t offset = (tile_start + int64_t{i} * len) % problem.block_size;
    const int8_t* k = tile.keys[i] - offset + problem.num_codes;
    const int8_t* v = tile.values[i] - offset * problem.head_dim + problem.num_codes;
    std::memcpy(scratch.key_scales + i * len, reinterpret_cast<const float*>(k) + offset, len * sizeof(float));
    std::memcpy(scratch.value_scales + i * len, reinterpret_cast<const float*>(v) + offset, len * sizeof(float));
  }
}

// Copies the tile's keys to fp32 [head_dim][kTile]: for blocks narrower than a register, and when enough rows
// share the tile to pay for widening once.
template <class T>
void widen_keys(const Tile<T>& tile, int64_t head_dim, float* keys) {
  const int len = tile.segment_len;
  for (int i = 0; i * len < tile.end; ++i) {
    for (int64_t d = 0; d < head_dim; ++d) {
      const T* from = tile.keys[i] + d * tile.key_stride;
      float* to = keys + d * kTile + i * len;
      int j = 0;
      for (; j + kWidth <= len; j += kWidth) store(to + j, load(from + j));
      for (; j < len; ++j) to[j] = to_float(from[j]);
    }
  }
}

template <class T>
void widen_values(const Tile<T>& tile, int64_t head_dim, float* values) {
  for (int j = tile.begin; j < tile.end; ++j) {
    const T* from = tile.values[j / tile.segment_len] + j % tile.segment_len * head_dim;
    float* to = values + j * head_dim;
    int64_t d = 0;
    for (; d + kWidth <= head_dim; d += kWidth) store(to + d, load(from + d));
    for (; d < head_dim; ++d) to[d] = to_float(from[d]);
  }
}

// weights[row][v * kWidth ..] = query[row] . key, for kRows rows and kVectors vectors of tokens.
template <int kRows, int kVectors, class T>
void score(const float* query, int64_t head_dim, const T* const* keys, int64_t key_stride, float* weights) {
  Vec sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[r][v] = zero();
  }
  for (int64_t d = 0; d < head_dim; ++d) {
    Vec key[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) key[v] = load(keys[v] + d * key_stride);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec q = set1(query[r * head_dim + d]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = fma(q, key[v], sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(weights + r * kTile + v * kWidth, sum[r][v]);
  }
}

// values[row][d ..] = values[row][d ..] * rescale[row] + sum over the tile's tokens of weight * value.
template <int kRows, int kVectors, class T>
void accumulate(const Tile<T>& tile, int64_t head_dim, int64_t d, const float* weights, const float* rescale,
                float* values) {
  Vec sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sum[r][v] = load(values + r * head_dim + d + v * kWidth) * set1(rescale[r]);
    }
  }
  for (int start = 0; start < tile.end; start += tile.segment_len) {
    const T* segment = tile.values[start / tile.segment_len] + d;
    const int first = tile.begin > start ? tile.begin - start : 0;
    const int last = tile.end - start < tile.segment_len ? tile.end - start : tile.segment_len;
    for (int j = first; j < last; ++j) {
      Vec value[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) value[v] = load(segment + j * head_dim + v * kWidth);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Vec weight = set1(weights[r * kTile + start + j]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[r][v] = fma(weight, value[v], sum[r][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(values + r * head_dim + d + v * kWidth, sum[r][v]);
  }
}

// The last head_dim % kWidth columns.
template <class T>
void accumulate_tail(const Tile<T>& tile, int64_t head_dim, int64_t d, int count, const float* weights,
                     float rescale, float* values) {
  Vec sum = load_partial(values + d, count) * set1(rescale);
  for (int j = tile.begin; j < tile.end; ++j) {
    const T* value = tile.values[j / tile.segment_len] + j % tile.segment_len * head_dim + d;
    sum = fma(set1(weights[j]), load_partial(value, count), sum);
  }
  store_partial(values + d, sum, count);
}

template <int kRows, class T>
void score_rows(const float* query, int64_t head_dim, const T* const* keys, int64_t key_stride, int num_vecs,
                float* weights) {
  int v = 0;
  for (; v + kVecs <= num_vecs; v += kVecs) {
    score<kRows, kVecs>(query, head_dim, keys + v, key_stride, weights + v * kWidth);
  }
  for (; v < num_vecs; ++v) score<kRows, 1>(query, head_dim, keys + v, key_stride, weights + v * kWidth);
}

template <int kRows, class T>
void accumulate_rows(const Tile<T>& tile, int64_t head_dim, const float* weights, const float* rescale,
                     float* values) {
  int64_t d = 0;
  for (; d + kVecs * kWidth <= head_dim; d += kVecs * kWidth) {
    accumulate<kRows, kVecs>(tile, head_dim, d, weights, rescale, values);
  }
  for (; d + kWidth <= head_dim; d += kWidth) accumulate<kRows, 1>(tile, head_dim, d, weights, rescale, values);
  if (d < head_dim) {
    for (int r = 0; r < kRows; ++r) {
      accumulate_tail(tile, head_dim, d, static_cast<int>(head_dim - d), weights + r * kTile, rescale[r],
                      values + r * head_dim);
    }
  }
}

#define PS_WITH_ROWS(count, call)                            \
  switch (count) {                                           \
    case 1: { constexpr int kRows = 1; call; } break;        \
    case 2: { constexpr int kRows = 2; call; } break;        \
    case 3: { constexpr int kRows = 3; call; } break;        \
    case 4: { constexpr int kRows = 4; call; } break;        \
    case 5: { constexpr int kRows = 5; call; } break;        \
    default: { constexpr int kRows = 6; call; } break;       \
  }

// Scores to weights e^(score - maximum), rows' sums and maxima updated; tokens the row cannot see weigh 0.
// kScaled: scores and weights are of codes, which still lack the scales of their tokens.
template <bool kScaled>
void soften(const Problem& problem, const Scratch& scratch, int begin, int end, int num_vecs, float* weights,
            float* rescale, float* maximum, float* sum) {
  const float negative_infinity = -__builtin_inff();
  Vec highest = set1(kLowest);
  for (int v = 0; v < num_vecs; ++v) {
    Vec x = load(weights + v * kWidth);
    if (kScaled) x = x * load(scratch.key_scales + v * kWidth);
    if (problem.soft_cap > 0.f) {  // cap * tanh(x / cap)
      const Vec e = exp(x * set1(2.f / problem.soft_cap));
      x = set1(problem.soft_cap) * (set1(1.f) - set1(2.f) / (e + set1(1.f)));
    }
    const int first = begin - v * kWidth, last = end - v * kWidth;
    if (first > 0 || last < kWidth) {
      const int from = first < 0 ? 0 : first > kWidth ? kWidth : first;
      const int to = last < 0 ? 0 : last > kWidth ? kWidth : last;
      x = keep_lanes(x, from < to ? from : to, to, negative_infinity);
    }
    store(weights + v * kWidth, x);
    highest = max(highest, x);
  }
  const float tile_maximum = reduce_max(highest);
  const float new_maximum = tile_maximum > *maximum ? tile_maximum : *maximum;
  Vec tile_sum = zero();
  for (int v = 0; v < num_vecs; ++v) {
    const Vec p = exp(load(weights + v * kWidth) - set1(new_maximum));
    store(weights + v * kWidth, kScaled ? p * load(scratch.value_scales + v * kWidth) : p);
    tile_sum = tile_sum + p;
  }
  *rescale = *maximum == new_maximum ? 1.f : exp_of(*maximum - new_maximum);
  *sum = *sum * *rescale + reduce_add(tile_sum);
  *maximum = new_maximum;
}

template <class KeyT>
void score_item(const Problem& problem, const Item& item, const Scratch& scratch, const KeyT* const* keys,
                int64_t key_stride, int num_vecs) {
  const int64_t num_groups = ceil_div(item.num_rows, kMaxRowGroup);
  for (int64_t i = 0; i < num_groups; ++i) {
    const int64_t row = item.num_rows * i / num_groups, next = item.num_rows * (i + 1) / num_groups;
    PS_WITH_ROWS(next - row, (score_rows<kRows>(scratch.query + row * problem.head_dim, problem.head_dim, keys,
                                                key_stride, num_vecs, scratch.weights + row * kTile)));
  }
}

template <class ValueT>
void accumulate_item(const Problem& problem, const Item& item, const Scratch& scratch, const Tile<ValueT>& tile) {
  const int64_t num_groups = ceil_div(item.num_rows, kMaxRowGroup);
  for (int64_t i = 0; i < num_groups; ++i) {
    const int64_t row = item.num_rows * i / num_groups, next = item.num_rows * (i + 1) / num_groups;
    PS_WITH_ROWS(next - row,
                 (accumulate_rows<kRows>(tile, problem.head_dim, scratch.weights + row * kTile,
                                         scratch.rescale + row, scratch.split.values + row * problem.head_dim)));
  }
}

template <class T>
void attend_tile(const Problem& problem, const Item& item, const Scratch& scratch, int64_t tile_start, Ahead& ahead) {
  const int64_t quarter = (ahead.lines() + 3) / 4;
  ahead.fetch(quarter);
  Tile<T> tile;
  locate(problem, item, tile_start, tile);
  const int num_vecs = (tile.end + kWidth - 1) / kWidth;
  constexpr bool kScaled = sizeof(T) == 1;
  if constexpr (kScaled) gather_scales(problem, tile, tile_start, scratch);
  const bool shared = sizeof(T) < sizeof(float) && item.num_rows > kMaxRowGroup;

  if (shared || tile.segment_len % kWidth != 0) {
    widen_keys(tile, problem.head_dim, scratch.keys);
    const float* keys[kTileVecs];
    for (int v = 0; v < num_vecs; ++v) keys[v] = scratch.keys + v * kWidth;
    score_item(problem, item, scratch, keys, kTile, num_vecs);
  } else {
    const T* keys[kTileVecs];
    for (int v = 0; v < num_vecs; ++v) {
      keys[v] = tile.keys[v * kWidth / tile.segment_len] + v * kWidth % tile.segment_len;
    }
    score_item(problem, item, scratch, keys, tile.key_stride, num_vecs);
  }

  ahead.fetch(quarter);
  const int64_t seq_len = problem.rows->seq_lens[item.seq];
  const int32_t* starts = problem.rows->query_start_loc + item.seq;
  const int64_t first_position = seq_len - (starts[1] - starts[0]) + item.first_query;
  for (int64_t row = 0; row < item.num_rows; ++row) {
    const int64_t position = first_position + row / problem.group;
    const int64_t seen_end = min_of(position + 1 - tile_start, kTile);
    const int64_t seen_begin = problem.window > 0 ? max_of(0, position + 1 - problem.window - tile_start) : 0;
    soften<kScaled>(problem, scratch, static_cast<int>(min_of(seen_begin, kTile)),
                    static_cast<int>(max_of(seen_end, 0)), num_vecs, scratch.weights + row * kTile,
                    scratch.rescale + row, scratch.split.maximum + row, scratch.split.sum + row);
  }

  ahead.fetch(quarter);
  if (shared) {
    widen_values(tile, problem.head_dim, scratch.tokens);
    Tile<float> wide;
    wide.values[0] = scratch.tokens;
    wide.segment_len = kTile;
    wide.begin = tile.begin;
    wide.end = tile.end;
    accumulate_item(problem, item, scratch, wide);
  } else {
    accumulate_item(problem, item, scratch, tile);
  }
  ahead.fetch(quarter);
}

#undef PS_WITH_ROWS

}  // namespace
}  // namespace PS_ISA
}  // namespace ps
