// The tensor-core kernels of one query format and one cache format.
#pragma once

#include "decode_launch.cuh"
#include "decode_mma.cuh"

namespace ps {

template <typename T, typename KV, int head_dim, int row_tile>
DecodeKernel mma_kernel() {
  return decode_kernel<decode_mma<T, KV, head_dim, row_tile>, MmaDecode<T, KV, head_dim, row_tile>::Shape::kSharedBytes>();
}

template <typename T, typename KV, int head_dim>
DecodeKernel mma_kernel(int row_tile) {
  if constexpr (head_dim <= 128) {
    if (row_tile == 16) return mma_kernel<T, KV, head_dim, 16>();
  }
  return row_tile == 8 ? mma_kernel<T, KV, head_dim, 8>() : DecodeKernel{};
}

template <typename T, typename KV>
DecodeKernel find_decode([[maybe_unused]] int head_dim, [[maybe_unused]] int row_tile) {
#if PS_HEAD_DIM_64
  if (head_dim == 64) return mma_kernel<T, KV, 64>(row_tile);
#endif
#if PS_HEAD_DIM_80
  if (head_dim == 80) return mma_kernel<T, KV, 80>(row_tile);
#endif
#if PS_HEAD_DIM_96
  if (head_dim == 96) return mma_kernel<T, KV, 96>(row_tile);
#endif
#if PS_HEAD_DIM_128
  if (head_dim == 128) return mma_kernel<T, KV, 128>(row_tile);
#endif
#if PS_HEAD_DIM_256
  if (head_dim == 256) return mma_kernel<T, KV, 256>(row_tile);
#endif
  return {};
}

}  // namespace ps
