// The ring of key and value tiles that each warp fills by cp.async for itself.
#pragma once

#include "decode_common.cuh"
#include "swizzle.cuh"

namespace ps {

template <typename KV, int head_dim, int row_tile>
struct DecodeShape {
  static constexpr int kRowBytes = head_dim * KV::kBytes;
  static constexpr int kChunks = kRowBytes / 16;
  // About 8 KiB of K and V a tile; tensor cores want 16 keys or a multiple.
  static constexpr int kKeysThatFit = 8192 / (2 * kRowBytes);
  static constexpr int kTileKeys = KV::kBytes == 4 ? 8 : kKeysThatFit >= 64 ? 64 : kKeysThatFit >= 32 ? 32 : 16;
  static constexpr int kTileBytes = kTileKeys * kRowBytes;
  static constexpr int kScaleBytes = KV::kScaled ? 4 * kTileKeys : 0;
  static constexpr int kStageBytes = 2 * (kTileBytes + kScaleBytes);  // K, V, K's scales, V's scales
  static constexpr int kStages = kStageBytes > 12288 ? 2 : 3;
  static constexpr int kWarpBytes = kStages * kStageBytes;
  static constexpr int kRingBytes = kDecodeWarps * kWarpBytes;
  static constexpr int kStride = kDecodeWarps * kTileKeys;  // keys from a warp's tile to its next
  using Results = WarpResults<row_tile, head_dim>;
  static constexpr int kSpareBytes = 4 * kMaxPiecesPerRow * row_tile;
  static constexpr int max(int a, int b) { return a > b ? a : b; }
  static constexpr int kSharedBytes = max(kRingBytes, max(int(sizeof(Results)), kSpareBytes));
  using Place = Swizzle<kChunks>;
  static_assert(kTileKeys * kChunks % 32 == 0 && kPlanGranule % kTileKeys == 0 && head_dim % 16 == 0);
  static_assert(Place::free_of_conflicts());
};

// One warp's walk over its tiles of a piece: every kDecodeWarps-th, copied some stages ahead.
template <typename KV, typename Shape>
struct TileRing {
  device::SharedAddress ring;
  const int32_t* table;
  const unsigned char* heads;  // the KV head's keys in block 0
  int end, lane;
  int ahead;   // the tile to be copied next,
  int blocks;  // and its blocks: lane l has the tile's l-th
  int stage = 0, free_stage = Shape::kStages - 1;

  __device__ __forceinline__ TileRing(const DecodeParameters& p, const Piece& piece, int warp, int lane)
      : ring(device::shared_address(device::shared_memory()) + warp * Shape::kWarpBytes),
        table(p.block_tables + piece.seq * p.block_tables_stride),
        heads(p.kv + piece.kv_head * p.head_stride),
        end(piece.end),
        lane(lane),
        ahead(piece.begin + warp * Shape::kTileKeys) {
    find_blocks(p);
#pragma unroll
    for (int s = 0; s < Shape::kStages - 1; ++s) start_next(p, s);
  }

  // Makes the next tile readable by the whole warp, starts copying another, and returns where in the warp's part of
  // shared memory it lies.
  __device__ __forceinline__ int advance(const DecodeParameters& p) {
    device::copy_async_wait<Shape::kStages - 2>();
    device::sync_warp();  // every lane's copies have landed, and nobody reads the stage that is filled now
    start_next(p, free_stage);
    const int at = stage * Shape::kStageBytes;
    free_stage = stage;
    stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
    return at;
  }

  __device__ __forceinline__ void start_next(const DecodeParameters& p, int to_stage) {
    if (ahead < end) start_tile(p, ring + to_stage * Shape::kStageBytes);
    device::copy_async_commit();
    ahead += Shape::kStride;
    find_blocks(p);
  }

  // Behind the end block 0 stands for none: it is never read.
  __device__ __forceinline__ void find_blocks(const DecodeParameters& p) {
    const int at = ahead + (lane << p.block_shift);
    blocks = lane < Shape::kTileKeys / 8 && at < end ? table[at >> p.block_shift] : 0;
  }

  // Keys from `end` on become zeros, so that no stale NaN meets a weight of 0.
  __device__ __forceinline__ void start_tile(const DecodeParameters& p, device::SharedAddress to_stage) {
    const int block_mask = (1 << p.block_shift) - 1;
#pragma unroll
    for (int i = 0; i < Shape::kTileKeys * Shape::kChunks / 32; ++i) {
      const int chunk = i * 32 + lane;
      const int key = chunk / Shape::kChunks, column = chunk % Shape::kChunks;
      const int block = device::shuffle(blocks, key >> p.block_shift);
      const unsigned char* const from =
          heads + block * p.block_stride + ((ahead + key) & block_mask) * Shape::kRowBytes + column * 16;
      const device::SharedAddress to = to_stage + 16 * Shape::Place::chunk(key, column);
      const bool valid = ahead + key < end;
      device::copy_async_16(to, from, valid);
      device::copy_async_16(to + Shape::kTileBytes, from + p.value_offset, valid);
    }
    if constexpr (KV::kScaled) {
#pragma unroll
      for (int first = 0; first < Shape::kTileKeys; first += 32) {
        const int key = first + lane;
        const int block = device::shuffle(blocks, (key % Shape::kTileKeys) >> p.block_shift);
        if (key < Shape::kTileKeys) {
          const unsigned char* const from = heads + block * p.block_stride + (block_mask + 1) * Shape::kRowBytes +
                                            4 * ((ahead + key) & block_mask);
          const device::SharedAddress to = to_stage + 2 * Shape::kTileBytes + 4 * key;
          const bool valid = ahead + key < end;
          device::copy_async_4(to, from, valid);
          device::copy_async_4(to + Shape::kScaleBytes, from + p.value_offset, valid);
        }
      }
    }
  }
};

}  // namespace ps
