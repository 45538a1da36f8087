// One tile of paged attention: scores, softmax weights and weighted values of one work item over kTile tokens.
// Part of attention_kernels.cpp, whose head explains the order of all sums.
#pragma once

#include "attention_fetch.h"
#include "scratch.h"
#include "vec.h"

namespace ps {
namespace PS_ISA {
namespace {

constexpr int kMaxRowGroup = 6;                        // rows of a register tile
constexpr int kVecs = kRegisters == 32 ? 4 : 2;        // vectors of a register tile
constexpr int kTileVecs = kTile / kWidth;
constexpr float kLowest = -1e30f;                      // running maximum before any score; finite, so m - m = 0
constexpr int kPauseDims = 2, kPauseTokens = 2;        // of a register tile, between two fetches of what comes next

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
  float* tile;     // [num_rows]
  float* keys;     // [head_dim][kTile]
  float* key_scales;    // [kTile], of an 8-bit cache
  float* value_scales;  // [kTile]
  float* tokens;   // [kTile][head_dim], values
  Piece* pieces;   // of the stream
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

State carve_state(Carver& carver, int64_t rows, int64_t head_dim) {
  State state;
  state.maximum = carver.take(rows);
  state.sum = carver.take(rows);
  state.values = carver.take(rows * head_dim);
  return state;
}

bool carve(Scratch& scratch, const Problem& problem, int64_t rows) {
  const int64_t head_dim = problem.head_dim, pieces = sizeof(Piece) / 4 * Stream::capacity(problem);
  const int64_t floats = padded(pieces) + padded(rows * head_dim) + padded(rows * kTile) + 2 * padded(rows) +
                         2 * kTile + 2 * padded(head_dim * kTile) + 2 * state_floats(rows, head_dim);
  Carver carver{static_cast<float*>(thread_scratch(kScratchPiece, floats * sizeof(float)))};
  if (carver.next == nullptr) return false;
  scratch.query = carver.take(rows * head_dim);
  scratch.weights = carver.take(rows * kTile);
  scratch.rescale = carver.take(rows);
  scratch.tile = carver.take(rows);
  scratch.keys = carver.take(head_dim * kTile);
  scratch.key_scales = carver.take(kTile);
  scratch.value_scales = carver.take(kTile);
  scratch.tokens = carver.take(head_dim * kTile);
  scratch.pieces = reinterpret_cast<Piece*>(carver.take(pieces));
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
void score(const float* query, int64_t head_dim, const T* const* keys, int64_t key_stride, float* weights,
           Stream& stream) {
  Vec sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[r][v] = zero();
  }
  const int64_t step = stream.is_done() ? head_dim : kPauseDims;
  for (int64_t part = 0; part < head_dim; part += step) {
    stream.pause();
    const int64_t end = min_of(part + step, head_dim);
    for (int64_t d = part; d < end; ++d) {
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
                float* values, Stream& stream) {
  Vec sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sum[r][v] = load(values + r * head_dim + d + v * kWidth) * set1(rescale[r]);
    }
  }
  const int step = stream.is_done() ? kTile : kPauseTokens;
  for (int start = 0; start < tile.end; start += tile.segment_len) {
    const T* segment = tile.values[start / tile.segment_len] + d;
    const int first = tile.begin > start ? tile.begin - start : 0;
    const int last = tile.end - start < tile.segment_len ? tile.end - start : tile.segment_len;
    for (int part = first; part < last; part += step) {
      stream.pause();
      const int part_end = part + step < last ? part + step : last;
      for (int j = part; j < part_end; ++j) {
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
                float* weights, Stream& stream) {
  int v = 0;
  for (; v + kVecs <= num_vecs; v += kVecs) {
    score<kRows, kVecs>(query, head_dim, keys + v, key_stride, weights + v * kWidth, stream);
  }
  for (; v < num_vecs; ++v) score<kRows, 1>(query, head_dim, keys + v, key_stride, weights + v * kWidth, stream);
}

template <int kRows, class T>
void accumulate_rows(const Tile<T>& tile, int64_t head_dim, const float* weights, const float* rescale,
                     float* values, Stream& stream) {
  int64_t d = 0;
  for (; d + kVecs * kWidth <= head_dim; d += kVecs * kWidth) {
    accumulate<kRows, kVecs>(tile, head_dim, d, weights, rescale, values, stream);
  }
  for (; d + kWidth <= head_dim; d += kWidth) {
    accumulate<kRows, 1>(tile, head_dim, d, weights, rescale, values, stream);
  }
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

// A row's scores as the softmax takes them: scaled, capped, -inf where the row does not see the token. Their maximum.
// kScaled: scores and weights are of codes, which still lack the scales of their tokens.
template <bool kScaled>
float prepare(const Problem& problem, const Scratch& scratch, int begin, int end, int num_vecs, float* weights) {
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
  return reduce_max(highest);
}

// Scores to weights e^(score - maximum); their sum. Tokens the row cannot see weigh 0.
template <bool kScaled>
float weigh(const Scratch& scratch, float maximum, int num_vecs, float* weights) {
  Vec sum = zero();
  for (int v = 0; v < num_vecs; ++v) {
    const Vec p = exp(load(weights + v * kWidth) - set1(maximum));
    store(weights + v * kWidth, kScaled ? p * load(scratch.value_scales + v * kWidth) : p);
    sum = sum + p;
  }
  return reduce_add(sum);
}

// Weights of all rows, their sums and maxima updated. In three passes, so that rows wait for nothing but their own.
template <bool kScaled>
void soften(const Problem& problem, const Item& item, const Scratch& scratch, int64_t tile_start, int num_vecs,
            Stream& stream) {
  const int64_t seq_len = problem.rows->seq_lens[item.seq];
  const int32_t* starts = problem.rows->query_start_loc + item.seq;
  const int64_t first_position = seq_len - (starts[1] - starts[0]) + item.first_query;
  float* maximum = scratch.split.maximum;
  float* tile = scratch.tile;  // of each row: its maximum, then its sum
  int64_t row = 0;
  for (int64_t query = 0; query < item.num_queries; ++query) {
    const int64_t position = first_position + query;
    const int seen_end = static_cast<int>(max_of(min_of(position + 1 - tile_start, kTile), 0));
    const int64_t unseen = problem.window > 0 ? max_of(0, position + 1 - problem.window - tile_start) : 0;
    const int seen_begin = static_cast<int>(min_of(unseen, kTile));
    for (int64_t i = 0; i < problem.group; ++i, ++row) {
      stream.pause();
      tile[row] = prepare<kScaled>(problem, scratch, seen_begin, seen_end, num_vecs, scratch.weights + row * kTile);
    }
  }
  for (row = 0; row < item.num_rows; row += kWidth) {
    const Vec old = load(maximum + row), highest = max(load(tile + row), old);
    store(scratch.rescale + row, exp(old - highest));
    store(maximum + row, highest);
  }
  for (row = 0; row < item.num_rows; ++row) {
    stream.pause();
    tile[row] = weigh<kScaled>(scratch, maximum[row], num_vecs, scratch.weights + row * kTile);
  }
  for (row = 0; row < item.num_rows; row += kWidth) {
    float* sum = scratch.split.sum + row;
    store(sum, load(sum) * load(scratch.rescale + row) + load(tile + row));
  }
}

template <class KeyT>
void score_item(const Problem& problem, const Item& item, const Scratch& scratch, const KeyT* const* keys,
                int64_t key_stride, int num_vecs, Stream& stream) {
  const int64_t num_groups = ceil_div(item.num_rows, kMaxRowGroup);
  for (int64_t i = 0; i < num_groups; ++i) {
    const int64_t row = item.num_rows * i / num_groups, next = item.num_rows * (i + 1) / num_groups;
    PS_WITH_ROWS(next - row, (score_rows<kRows>(scratch.query + row * problem.head_dim, problem.head_dim, keys,
                                                key_stride, num_vecs, scratch.weights + row * kTile, stream)));
  }
}

template <class ValueT>
void accumulate_item(const Problem& problem, const Item& item, const Scratch& scratch, const Tile<ValueT>& tile,
                     Stream& stream) {
  const int64_t num_groups = ceil_div(item.num_rows, kMaxRowGroup);
  for (int64_t i = 0; i < num_groups; ++i) {
    const int64_t row = item.num_rows * i / num_groups, next = item.num_rows * (i + 1) / num_groups;
    PS_WITH_ROWS(next - row,
                 (accumulate_rows<kRows>(tile, problem.head_dim, scratch.weights + row * kTile,
                                         scratch.rescale + row, scratch.split.values + row * problem.head_dim, stream)));
  }
}

// Of the first rows of an item: the others find everything fetched.
int64_t num_pauses(int64_t head_dim, int num_vecs, int num_tokens, int64_t num_rows) {
  const int64_t of_scores = (num_vecs / kVecs + num_vecs % kVecs) * ceil_div(head_dim, kPauseDims);
  const int64_t wide = head_dim / kWidth;
  return of_scores + (wide / kVecs + wide % kVecs) * ceil_div(num_tokens, kPauseTokens) + 2 * min_of(num_rows, kMaxRowGroup);
}

template <class T>
void attend_tile(const Problem& problem, const Item& item, const Scratch& scratch, int64_t tile_start, Stream& stream) {
  Tile<T> tile;
  locate(problem, item, tile_start, tile);
  const int num_vecs = (tile.end + kWidth - 1) / kWidth;
  stream.begin_tile(item, tile_start, num_pauses(problem.head_dim, num_vecs, tile.end - tile.begin, item.num_rows));
  constexpr bool kScaled = sizeof(T) == 1;
  if constexpr (kScaled) gather_scales(problem, tile, tile_start, scratch);
  const bool shared = sizeof(T) < sizeof(float) && item.num_rows > kMaxRowGroup;

  if (shared || tile.segment_len % kWidth != 0) {
    widen_keys(tile, problem.head_dim, scratch.keys);
    const float* keys[kTileVecs];
    for (int v = 0; v < num_vecs; ++v) keys[v] = scratch.keys + v * kWidth;
    score_item(problem, item, scratch, keys, kTile, num_vecs, stream);
  } else {
    const T* keys[kTileVecs];
    for (int v = 0; v < num_vecs; ++v) {
      keys[v] = tile.keys[v * kWidth / tile.segment_len] + v * kWidth % tile.segment_len;
    }
    score_item(problem, item, scratch, keys, tile.key_stride, num_vecs, stream);
  }

  stream.pause();
  soften<kScaled>(problem, item, scratch, tile_start, num_vecs, stream);

  if (shared) {
    widen_values(tile, problem.head_dim, scratch.tokens);
    Tile<float> wide;
    wide.values[0] = scratch.tokens;
    wide.segment_len = kTile;
    wide.begin = tile.begin;
    wide.end = tile.end;
    accumulate_item(problem, item, scratch, wide, stream);
  } else {
    accumulate_item(problem, item, scratch, tile, stream);
  }
  stream.end_tile();
}

#undef PS_WITH_ROWS

}  // namespace
}  // namespace PS_ISA
}  // namespace ps
