// Paged decode in fp32 by plain multiply-adds, for models that are served in fp32: the tiles, the split and the joining
// are those of decode_mma.cuh.
#pragma once

#include "decode_tiles.cuh"

namespace ps {

template <int head_dim>
struct FmaDecode {
  static constexpr int kRows = 8;
  using KV = Same<Float>;
  using Shape = DecodeShape<KV, head_dim, kRows>;
  static constexpr int kKeys = Shape::kTileKeys;
  static constexpr int kOwned = (head_dim + 31) / 32;  // dimensions lane, lane + 32, ... of the values
  // Behind the rings: the query, then of each warp its keys' weights and its rows' factors.
  static constexpr int kQueryBytes = 4 * kRows * head_dim;
  static constexpr int kWeightFloats = kKeys * kRows + kRows;
  static constexpr int kSharedBytes =
      Shape::max(Shape::kSharedBytes, Shape::kRingBytes + kQueryBytes + 4 * kDecodeWarps * kWeightFloats);
  static_assert(kKeys == 8);

  __device__ static __forceinline__ void run(const DecodeParameters& p, const Piece& piece) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned char* const shared = device::shared_memory();
    TileRing<KV, Shape> ring(p, piece, warp, lane);
    auto* const query = reinterpret_cast<float*>(shared + Shape::kRingBytes);
    float* const weights = query + kRows * head_dim + warp * kWeightFloats;
    float* const factors = weights + kKeys * kRows;
    for (int i = threadIdx.x; i < kRows * head_dim; i += 32 * kDecodeWarps) {
      const int n = i / head_dim, d = i % head_dim;
      query[i] = n < piece.num_rows
                     ? static_cast<const float*>(p.query)[row_offset(p, piece, n, p.query_stride, head_dim) + d]
                     : 0.0f;
    }
    device::sync_block();

    // Scores: four lanes a key, each with every fourth chunk; then lane j of the four keeps rows j and j + 4.
    const int key = lane / 4, j = lane % 4;
    const int window = p.window > 0 ? p.window : 0x40000000;
    int visible_end[2];
    float highest[2], sum[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      visible_end[c] = piece.first_end + (piece.first_row + j + 4 * c) / p.group;
      highest[c] = -INFINITY;
      sum[c] = 0.0f;
    }
    float values[kOwned][kRows] = {};

    for (int position = piece.begin + warp * kKeys; position < piece.end; position += Shape::kStride) {
      const auto* const tile = reinterpret_cast<const float*>(shared + warp * Shape::kWarpBytes + ring.advance(p));
      float scores[kRows] = {};
#pragma unroll
      for (int i = 0; i < Shape::kChunks / 4; ++i) {
        const int column = 4 * i + j;
        const float4 k = *reinterpret_cast<const float4*>(tile + 4 * Shape::Place::chunk(key, column));
#pragma unroll
        for (int n = 0; n < kRows; ++n) {
          const float4 q = *reinterpret_cast<const float4*>(query + n * head_dim + 4 * column);
          scores[n] += q.x * k.x + q.y * k.y + q.z * k.z + q.w * k.w;
        }
      }
#pragma unroll
      for (int n = 0; n < kRows; ++n) {
        scores[n] += device::shuffle_xor(scores[n], 1);
        scores[n] += device::shuffle_xor(scores[n], 2);
      }
      const int at = position + key;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float score = scores[4 * c];
#pragma unroll
        for (int n = 1; n < 4; ++n) score = j == n ? scores[4 * c + n] : score;
        if (p.soft_cap != 0.0f) score = soft_capped(p, score);
        score *= p.scale_log2;
        if (at >= visible_end[c] || at < visible_end[c] - window) score = -INFINITY;
        float new_max = fmaxf(highest[c], score);
        new_max = fmaxf(new_max, device::shuffle_xor(new_max, 4));
        new_max = fmaxf(new_max, device::shuffle_xor(new_max, 8));
        new_max = fmaxf(new_max, device::shuffle_xor(new_max, 16));
        const float factor = rescale(highest[c], new_max);
        const float weight = new_max == -INFINITY ? 0.0f : device::exp2_approx(score - new_max);
        highest[c] = new_max;
        sum[c] = sum[c] * factor + weight;
        weights[key * kRows + 4 * c + j] = weight;
        if (key == 0) factors[4 * c + j] = factor;
      }
      device::sync_warp();
      float factor[kRows];
#pragma unroll
      for (int n = 0; n < kRows; ++n) factor[n] = factors[n];
#pragma unroll
      for (int i = 0; i < kOwned; ++i) {
        const int d = lane + 32 * i;
        if (head_dim % 32 != 0 && d >= head_dim) continue;
        float attended[kRows] = {};
#pragma unroll
        for (int k = 0; k < kKeys; ++k) {
          const float v = tile[Shape::kTileBytes / 4 + 4 * Shape::Place::chunk(k, d / 4) + d % 4];
#pragma unroll
          for (int n = 0; n < kRows; ++n) attended[n] += weights[k * kRows + n] * v;
        }
#pragma unroll
        for (int n = 0; n < kRows; ++n) values[i][n] = values[i][n] * factor[n] + attended[n];
      }
      device::sync_warp();  // the weights are written again
    }

    device::copy_async_wait<0>();
    device::sync_block();  // the rings become the warps' results
    auto& results = *reinterpret_cast<typename Shape::Results*>(shared);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float total = sum[c];
      total += device::shuffle_xor(total, 4);
      total += device::shuffle_xor(total, 8);
      total += device::shuffle_xor(total, 16);
      if (key == 0) {
        results.max[warp][4 * c + j] = highest[c];
        results.sum[warp][4 * c + j] = total;
      }
    }
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      const int d = lane + 32 * i;
      if (head_dim % 32 != 0 && d >= head_dim) continue;
#pragma unroll
      for (int n = 0; n < kRows; ++n) results.values[warp][n * Shape::Results::kPitch + d] = values[i][n];
    }
    finish<Float, kRows, head_dim>(p, piece, results, reinterpret_cast<float*>(shared), 1.0f);
  }
};

template <int head_dim>
__global__ void __launch_bounds__(32 * kDecodeWarps) decode_fma(const DecodeParameters p) {
  run_pieces<FmaDecode<head_dim>>(p);
}

}  // namespace ps
