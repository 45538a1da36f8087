// What the host side and the kernels of paged decode agree on.
#pragma once

#include "device.cuh"
#include "pagedserve_cuda.h"

namespace ps {

constexpr int kDecodeWarps = 4;
constexpr int kPlanGranule = 64;      // pieces start at multiples of it; every tile's keys divide it
constexpr int kMaxPiecesPerRow = 512;  // of one row's context

struct DecodeParameters {
  void* out;
  int64_t out_stride;  // elements
  const void* query;
  int64_t query_stride;
  const unsigned char* kv;
  int64_t block_stride;  // bytes, as are the next two
  int64_t head_stride;
  int64_t value_offset;
  const int32_t* block_tables;
  int64_t block_tables_stride;
  const int32_t* seq_lens;
  const int32_t* query_start_loc;
  const int4* items;  // [0].x: how many follow; each: row, first key, end, its number | number of the row's pieces << 16
  float* partials;
  int32_t* counters;
  int group;      // query heads of a KV head
  int row_tiles;   // that share a KV head's query rows
  int grid_heads;  // KV heads times row tiles
  int block_shift;  // log2 of the block size
  int window;        // 0: none
  float scale_log2;  // scale * log2(e)
  float soft_cap;    // 0: none
  float cap_in;      // scale / soft_cap * 2 log2(e)
  float cap_out;     // soft_cap / scale
};

struct DecodeKernel {
  // Launches or, with ctas_per_sm, only tells how many CTAs an SM holds. Null: there is no such kernel.
  cudaError_t (*run)(const DecodeParameters& p, int num_ctas, cudaStream_t stream, int* ctas_per_sm);
  int shared_bytes;  // of a CTA
};

// The kernel for a query format, cache format, head_dim and row tile (8 or 16).
DecodeKernel find_decode_f32(int head_dim);
DecodeKernel find_decode_bf16(int head_dim, int row_tile);
DecodeKernel find_decode_bf16_i8(int head_dim, int row_tile);
DecodeKernel find_decode_bf16_f8(int head_dim, int row_tile);
DecodeKernel find_decode_f16(int head_dim, int row_tile);
DecodeKernel find_decode_f16_i8(int head_dim, int row_tile);
DecodeKernel find_decode_f16_f8(int head_dim, int row_tile);

// Cuts a step's contexts into pieces.
cudaError_t launch_plan(const ps_cuda_decode_plan& plan, const ps_cuda_rows& rows, int grid_heads, int window,
                        cudaStream_t stream);

}  // namespace ps
