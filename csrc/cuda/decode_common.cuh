// What every decode kernel does before and after its loop over keys.
#pragma once

#include "decode.h"
#include "formats.cuh"

namespace ps {

constexpr float kLog2E = 1.4426950408889634f;

// What a CTA computes at a time: some query rows of one KV head over a piece of one row's context.
struct Piece {
  int item, grid_head;  // which of the plan's pieces, which of the KV heads' row tiles
  int seq;
  int begin, end;  // keys; begin is a multiple of kPlanGranule
  int index, count;  // of the row's pieces
  int kv_head;
  int first_row, num_rows;  // of the KV head's q_len * group query rows; row n is head n % group of token n / group
  int first_token;  // of this row in query and out
  int first_end;    // keys that the first token of the row sees end here; each later token sees one more
};

// The piece of one KV head that `work` numbers; false where it has no query rows.
__device__ __forceinline__ bool find_piece(const DecodeParameters& p, int work, int row_tile, Piece& piece) {
  piece.item = work / p.grid_heads;
  piece.grid_head = work % p.grid_heads;
  const int4 found = p.items[1 + piece.item];
  piece.seq = found.x;
  piece.begin = found.y;
  piece.end = found.z;
  piece.index = found.w & 0xffff;
  piece.count = found.w >> 16;
  piece.kv_head = piece.grid_head / p.row_tiles;
  piece.first_row = piece.grid_head % p.row_tiles * row_tile;
  int query_len = 1;
  piece.first_token = piece.seq;
  if (p.query_start_loc != nullptr) {
    piece.first_token = p.query_start_loc[piece.seq];
    query_len = p.query_start_loc[piece.seq + 1] - piece.first_token;
  }
  const int rows = query_len * p.group - piece.first_row;
  piece.num_rows = rows < row_tile ? rows : row_tile;
  piece.first_end = p.seq_lens[piece.seq] - query_len + 1;
  return piece.num_rows > 0;
}

// The element offset of query row n of the piece.
__device__ __forceinline__ int64_t row_offset(const DecodeParameters& p, const Piece& piece, int n, int64_t stride,
                                              int head_dim) {
  const int row = piece.first_row + n;
  const int head = piece.kv_head * p.group + row % p.group;
  return (piece.first_token + row / p.group) * stride + static_cast<int64_t>(head) * head_dim;
}

// soft_cap * tanh(product * scale / soft_cap), divided by scale * log2(e): what a product without a cap is.
__device__ __forceinline__ float soft_capped(const DecodeParameters& p, float product) {
  // tanh as 1 - 2 / (exp(2 x) + 1): right at both ends, where exp is inf or 0.
  const float e = device::exp2_approx(product * p.cap_in);
  return p.cap_out - 2.0f * p.cap_out * device::reciprocal_approx(e + 1.0f);
}

// 2^x with x = -inf - -inf meant as "nothing there yet".
__device__ __forceinline__ float rescale(float old_max, float new_max) {
  return new_max == -INFINITY ? 1.0f : device::exp2_approx(old_max - new_max);
}

template <typename T>
__device__ __forceinline__ void store_pair(void* out, int64_t offset, float low, float high) {
  if constexpr (T::kDtype == PS_CUDA_F32) {
    *reinterpret_cast<float2*>(static_cast<float*>(out) + offset) = make_float2(low, high);
  } else {
    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(out) + offset) = T::pack(low, high);
  }
}

// Each warp's result in shared memory: attended values (not yet divided by `sum`), highest exponent and sum of each row.
template <int rows, int head_dim>
struct WarpResults {
  static constexpr int kPitch = head_dim + 4;  // keeps the fragments' stores free of bank conflicts
  float values[kDecodeWarps][rows * kPitch];
  float max[kDecodeWarps][rows];
  float sum[kDecodeWarps][rows];
};

// Joins the warps, then the row's pieces: the last CTA to arrive reads the others' results in their order, so that the
// numbers do not depend on who was last. `results` has been written by all warps; `spare` is shared memory for
// kMaxPiecesPerRow * rows floats, which may overlap it. `value_scale` multiplies everything.
template <typename T, int rows, int head_dim>
__device__ __forceinline__ void finish(const DecodeParameters& p, const Piece& piece,
                                       WarpResults<rows, head_dim>& results, float* spare, float value_scale) {
  constexpr int kPitch = WarpResults<rows, head_dim>::kPitch;
  constexpr int kPairs = head_dim / 2;
  constexpr int kThreads = 32 * kDecodeWarps;
  const int thread = threadIdx.x;
  device::sync_block();

  // Of each piece: `rows` pairs (max, sum), then the values [rows][head_dim].
  constexpr int kPartial = rows * (head_dim + 2);
  const int64_t piece_stride = static_cast<int64_t>(p.grid_heads) * kPartial;
  float* const first = p.partials + (piece.item - piece.index) * piece_stride + piece.grid_head * kPartial;
  float* const mine = first + piece.index * piece_stride;

  for (int i = thread; i < piece.num_rows * kPairs; i += kThreads) {
    const int n = i / kPairs, d = i % kPairs * 2;
    float highest = -INFINITY, sum = 0.0f, low = 0.0f, high = 0.0f;
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) highest = fmaxf(highest, results.max[w][n]);
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) {
      const float factor = results.max[w][n] == -INFINITY ? 0.0f : device::exp2_approx(results.max[w][n] - highest);
      sum += factor * results.sum[w][n];
      low += factor * results.values[w][n * kPitch + d];
      high += factor * results.values[w][n * kPitch + d + 1];
    }
    if (piece.count == 1) {
      const float inverse = value_scale / sum;
      store_pair<T>(p.out, row_offset(p, piece, n, p.out_stride, head_dim) + d, low * inverse, high * inverse);
    } else {
      if (d == 0) *reinterpret_cast<float2*>(mine + 2 * n) = make_float2(highest, sum);
      *reinterpret_cast<float2*>(mine + 2 * rows + n * head_dim + d) = make_float2(low, high);
    }
  }
  if (piece.count == 1) return;

  device::fence_device();
  device::sync_block();
  int* const flag = reinterpret_cast<int*>(spare);
  int32_t* const counter = p.counters + piece.seq * p.grid_heads + piece.grid_head;
  if (thread == 0) *flag = device::atomic_add(counter, 1) == piece.count - 1;
  device::sync_block();
  const bool is_last = *flag;
  if (!is_last) return;
  device::fence_device();
  device::sync_block();  // everybody has read the flag, whose place is used again
  if (thread == 0) *counter = 0;

  // Each piece's weight: spare[piece * rows + n]. Some lanes a row, each with every so many pieces.
  constexpr int kLanes = kThreads / rows;
  const int n = thread / kLanes;
  float highest = -INFINITY, sum = 0.0f;
  for (int c = thread % kLanes; c < piece.count; c += kLanes) {
    const float2 found = device::load_past_l1(reinterpret_cast<const float2*>(first + c * piece_stride + 2 * n));
    const float new_max = fmaxf(highest, found.x);
    sum = sum * rescale(highest, new_max) + found.y * rescale(found.x, new_max);
    highest = new_max;
    spare[c * rows + n] = found.x;
  }
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) {
    const float other_max = device::shuffle_xor(highest, mask), other_sum = device::shuffle_xor(sum, mask);
    const float new_max = fmaxf(highest, other_max);
    sum = sum * rescale(highest, new_max) + other_sum * rescale(other_max, new_max);
    highest = new_max;
  }
  for (int c = thread % kLanes; c < piece.count; c += kLanes) {
    spare[c * rows + n] = rescale(spare[c * rows + n], highest) * (value_scale / sum);
  }
  device::sync_block();
  constexpr int kQuads = head_dim / 4;
  for (int i = thread; i < piece.num_rows * kQuads; i += kThreads) {
    const int row = i / kQuads, d = i % kQuads * 4;
    const float* from = first + 2 * rows + row * head_dim + d;
    float total[4] = {};
#pragma unroll 8
    for (int c = 0; c < piece.count; ++c) {
      const float4 values = device::load_past_l1(reinterpret_cast<const float4*>(from + c * piece_stride));
      const float weight = spare[c * rows + row];
      total[0] += weight * values.x;
      total[1] += weight * values.y;
      total[2] += weight * values.z;
      total[3] += weight * values.w;
    }
    const int64_t offset = row_offset(p, piece, row, p.out_stride, head_dim) + d;
    store_pair<T>(p.out, offset, total[0], total[1]);
    store_pair<T>(p.out, offset + 2, total[2], total[3]);
  }
}

// The loop of a CTA over its share of the plan: every gridDim.x-th piece and head. There are as many CTAs as the device
// holds at a time, so none is started for nothing however few pieces a step has.
template <typename Kernel>
__device__ __forceinline__ void run_pieces(const DecodeParameters& p) {
  const int total = p.items[0].x * p.grid_heads;
  for (int work = blockIdx.x; work < total; work += gridDim.x) {
    Piece piece;
    if (!find_piece(p, work, Kernel::kRows, piece)) continue;
    Kernel::run(p, piece);
    device::sync_block();  // shared memory is used again
  }
}

}  // namespace ps
