// Paged decode on tensor cores. One CTA takes the query rows that share a KV head over one piece of a context; each of
// its warps walks tiles of keys of its own, with its own ring of cp.async buffers and its own running softmax, and meets
// the others only at the end. Keys are the rows of the products (S^T = K Q^T, O^T = V^T P^T): m16n8k16 then wastes at
// most 7 of 8 query columns instead of 15 of 16 rows, and half the accumulators are needed.
#pragma once

#include "decode_tiles.cuh"

namespace ps {

template <typename T, typename KV, int head_dim, int row_tile>
struct MmaDecode {
  using Shape = DecodeShape<KV, head_dim, row_tile>;
  static constexpr int kRows = row_tile;
  static constexpr int kKeyTiles = Shape::kTileKeys / 16;  // of 16 keys
  static constexpr int kRowTiles = row_tile / 8;           // of 8 query rows
  static constexpr int kSteps = head_dim / 16;             // of 16 dimensions

  // The query as the right-hand side of S^T = K Q^T. Which dimension an element of a step of 16 means is free, as long
  // as K agrees: codes of 8 bits come four to a register, so a lane has dimensions 4j .. 4j + 3 of a step there.
  __device__ static __forceinline__ void load_query(const DecodeParameters& p, const Piece& piece, int lane,
                                                    uint32_t (&query)[kRowTiles][kSteps][2]) {
    const auto* const data = static_cast<const uint16_t*>(p.query);
    const int j = lane % 4;
    const int first = KV::kBytes == 1 ? 4 * j : 2 * j;
    const int second = KV::kBytes == 1 ? 4 * j + 2 : 2 * j + 8;
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      const int n = t * 8 + lane / 4;
      const bool valid = n < piece.num_rows;
      const uint16_t* from = data + (valid ? row_offset(p, piece, n, p.query_stride, head_dim) : 0);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        query[t][s][0] = valid ? *reinterpret_cast<const uint32_t*>(from + 16 * s + first) : 0;
        query[t][s][1] = valid ? *reinterpret_cast<const uint32_t*>(from + 16 * s + second) : 0;
      }
    }
  }

  // scores[key tile][row tile]: keys lane / 4 and + 8, rows 2 * (lane % 4) and the next.
  __device__ static __forceinline__ void score(device::SharedAddress keys, int lane,
                                               const uint32_t (&query)[kRowTiles][kSteps][2],
                                               float (&scores)[kKeyTiles][kRowTiles][4]) {
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) scores[m][t][0] = scores[m][t][1] = scores[m][t][2] = scores[m][t][3] = 0.0f;
      const int key = m * 16 + lane % 16;
      if constexpr (KV::kBytes == 2) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          uint32_t a[4];
          device::load_matrix_x4(a, keys + 16 * Shape::Place::chunk(key, 2 * s + lane / 16));
#pragma unroll
          for (int t = 0; t < kRowTiles; ++t) T::multiply(scores[m][t], a, query[t][s]);
        }
      } else {
#pragma unroll
        for (int s = 0; s + 1 < kSteps; s += 2) {
          uint32_t codes[4];
          device::load_matrix_x4(codes, keys + 16 * Shape::Place::chunk(key, s + lane / 16));
          multiply_codes(codes[0], codes[1], query, s, scores[m]);
          multiply_codes(codes[2], codes[3], query, s + 1, scores[m]);
        }
        if constexpr (kSteps % 2 != 0) {
          uint32_t codes[2];
          device::load_matrix_x2(codes, keys + 16 * Shape::Place::chunk(key, kSteps - 1));
          multiply_codes(codes[0], codes[1], query, kSteps - 1, scores[m]);
        }
      }
    }
  }

  // One step of 16 dimensions: `low` holds four codes of key lane / 4, `high` of the eighth key after it.
  __device__ static __forceinline__ void multiply_codes(uint32_t low, uint32_t high,
                                                        const uint32_t (&query)[kRowTiles][kSteps][2], int step,
                                                        float (&scores)[kRowTiles][4]) {
    uint32_t even[2], odd[2];
    KV::widen(low, even[0], odd[0]);
    KV::widen(high, even[1], odd[1]);
    // Bytes 0, 2 and 1, 3 came together, dimensions 0, 1 and 2, 3 belong together.
    const uint32_t a[4] = {
        device::pick_bytes(even[0], odd[0], 0x5410), device::pick_bytes(even[1], odd[1], 0x5410),
        device::pick_bytes(even[0], odd[0], 0x7632), device::pick_bytes(even[1], odd[1], 0x7632)};
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) T::multiply(scores[t], a, query[t][step]);
  }

  // values[step][row tile] += V^T weights. Of a 16-bit cache a lane has dimensions lane / 4 and + 8 of a step; of codes,
  // which transpose in pairs, 2 * (lane / 4) and the next.
  __device__ static __forceinline__ void attend(device::SharedAddress tile, int lane,
                                                const uint32_t (&weights)[kKeyTiles][kRowTiles][2],
                                                float (&values)[kSteps][kRowTiles][4]) {
    const int key_in_tile = lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
      if constexpr (KV::kBytes == 2) {
        const int key = m * 16 + key_in_tile;
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          uint32_t a[4];
          device::load_matrix_x4_transposed(
              a, tile + 16 * Shape::Place::chunk(key, 2 * s + lane / 8 % 2));
#pragma unroll
          for (int t = 0; t < kRowTiles; ++t) T::multiply(values[s][t], a, weights[m][t]);
        }
      } else {
        const int key = m * 16 + lane % 16;
#pragma unroll
        for (int s = 0; s + 1 < kSteps; s += 2) {
          uint32_t codes[4];
          device::load_matrix_x4_transposed(codes, tile + 16 * Shape::Place::chunk(key, s + lane / 16));
          attend_codes(codes[0], codes[1], weights[m], values[s]);
          attend_codes(codes[2], codes[3], weights[m], values[s + 1]);
        }
        if constexpr (kSteps % 2 != 0) {
          uint32_t codes[2];
          device::load_matrix_x2_transposed(codes, tile + 16 * Shape::Place::chunk(key, kSteps - 1));
          attend_codes(codes[0], codes[1], weights[m], values[kSteps - 1]);
        }
      }
    }
  }

  __device__ static __forceinline__ void attend_codes(uint32_t low, uint32_t high,
                                                      const uint32_t (&weights)[kRowTiles][2],
                                                      float (&values)[kRowTiles][4]) {
    uint32_t a[4];
    KV::widen(low, a[0], a[1]);
    KV::widen(high, a[2], a[3]);
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) T::multiply(values[t], a, weights[t]);
  }

  __device__ static __forceinline__ void run(const DecodeParameters& p, const Piece& piece) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned char* const shared = device::shared_memory() + warp * Shape::kWarpBytes;
    TileRing<KV, Shape> ring(p, piece, warp, lane);
    uint32_t query[kRowTiles][kSteps][2];
    load_query(p, piece, lane, query);

    // Of this lane's rows, t * 8 + 2 * (lane % 4) + c: the keys each sees end here; its highest exponent; its own part
    // of the sum.
    int visible_end[kRowTiles][2];
    float highest[kRowTiles][2], sum[kRowTiles][2];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        visible_end[t][c] = piece.first_end + (piece.first_row + t * 8 + 2 * (lane % 4) + c) / p.group;
        highest[t][c] = -INFINITY;
        sum[t][c] = 0.0f;
      }
    }
    const int last_end = piece.first_end + (piece.first_row + piece.num_rows - 1) / p.group;
    const int window = p.window > 0 ? p.window : 0x40000000;
    float values[kSteps][kRowTiles][4];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) values[s][t][0] = values[s][t][1] = values[s][t][2] = values[s][t][3] = 0.0f;
    }

    for (int position = piece.begin + warp * Shape::kTileKeys; position < piece.end; position += Shape::kStride) {
      const int tile = ring.advance(p);
      const device::SharedAddress keys = ring.ring + tile;
      const auto* const key_scales = reinterpret_cast<const float*>(shared + tile + 2 * Shape::kTileBytes);
      float scores[kKeyTiles][kRowTiles][4];
      score(keys, lane, query, scores);

      if (p.soft_cap != 0.0f) {
#pragma unroll
        for (int i = 0; i < kKeyTiles * kRowTiles * 4; ++i) {
          float& score = scores[i / (4 * kRowTiles)][i / 4 % kRowTiles][i % 4];
          if constexpr (KV::kScaled) score *= key_scales[i / (4 * kRowTiles) * 16 + i % 4 / 2 * 8 + lane / 4];
          score = soft_capped(p, score);
        }
      }
      const bool whole = position + Shape::kTileKeys <= piece.first_end && position >= last_end - window;
      float new_max[kRowTiles][2];
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float local = highest[t][c];
#pragma unroll
          for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              float& score = scores[m][t][2 * half + c];
              const int key = m * 16 + half * 8 + lane / 4;
              if constexpr (KV::kScaled) score *= p.soft_cap == 0.0f ? key_scales[key] : 1.0f;
              score *= p.scale_log2;
              if (!whole) {
                const int at = position + key;
                if (at >= visible_end[t][c] || at < visible_end[t][c] - window) score = -INFINITY;
              }
              local = fmaxf(local, score);
            }
          }
          local = fmaxf(local, device::shuffle_xor(local, 4));
          local = fmaxf(local, device::shuffle_xor(local, 8));
          new_max[t][c] = fmaxf(local, device::shuffle_xor(local, 16));
        }
      }

      uint32_t weights[kKeyTiles][kRowTiles][2];
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        float factor[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          factor[c] = rescale(highest[t][c], new_max[t][c]);
          highest[t][c] = new_max[t][c];
          sum[t][c] *= factor[c];
          const float base = new_max[t][c] == -INFINITY ? 0.0f : new_max[t][c];
#pragma unroll
          for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              float& score = scores[m][t][2 * half + c];
              score = device::exp2_approx(score - base);
              sum[t][c] += score;
              if constexpr (KV::kScaled) {
                score *= key_scales[Shape::kTileKeys + m * 16 + half * 8 + lane / 4] * KV::kMaxCode;
              }
            }
          }
        }
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m) {
          weights[m][t][0] = device::transpose_matrix(T::pack(scores[m][t][0], scores[m][t][1]));
          weights[m][t][1] = device::transpose_matrix(T::pack(scores[m][t][2], scores[m][t][3]));
        }
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          values[s][t][0] *= factor[0];
          values[s][t][1] *= factor[1];
          values[s][t][2] *= factor[0];
          values[s][t][3] *= factor[1];
        }
      }
      attend(keys + Shape::kTileBytes, lane, weights, values);
    }

    device::copy_async_wait<0>();
    device::sync_block();  // the rings become the warps' results
    auto& results = *reinterpret_cast<typename Shape::Results*>(device::shared_memory());
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int n = t * 8 + 2 * (lane % 4) + c;
        float total = sum[t][c];
        total += device::shuffle_xor(total, 4);
        total += device::shuffle_xor(total, 8);
        total += device::shuffle_xor(total, 16);
        if (lane < 4) {
          results.max[warp][n] = highest[t][c];
          results.sum[warp][n] = total;
        }
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          const int first = KV::kBytes == 1 ? 2 * (lane / 4) : lane / 4;
          const int second = KV::kBytes == 1 ? first + 1 : first + 8;
          float* const to = results.values[warp] + n * Shape::Results::kPitch + 16 * s;
          to[first] = values[s][t][c];
          to[second] = values[s][t][2 + c];
        }
      }
    }
    float value_scale = 1.0f;
    if constexpr (KV::kScaled) value_scale = 1.0f / KV::kMaxCode;
    finish<T, row_tile, head_dim>(p, piece, results, reinterpret_cast<float*>(device::shared_memory()), value_scale);
  }
};

template <typename T, typename KV, int head_dim, int row_tile>
__global__ void __launch_bounds__(32 * kDecodeWarps, 2) decode_mma(const DecodeParameters p) {
  run_pieces<MmaDecode<T, KV, head_dim, row_tile>>(p);
}

}  // namespace ps
