// From a kernel to the function that launches it.
#pragma once

#include <atomic>

#include "decode.h"

// Which head sizes are compiled in: all, or those that the build names (PS_CUDA_HEAD_DIMS).
#ifdef PS_HEAD_DIMS_CHOSEN
#ifndef PS_HEAD_DIM_64
#define PS_HEAD_DIM_64 0
#endif
#ifndef PS_HEAD_DIM_80
#define PS_HEAD_DIM_80 0
#endif
#ifndef PS_HEAD_DIM_96
#define PS_HEAD_DIM_96 0
#endif
#ifndef PS_HEAD_DIM_128
#define PS_HEAD_DIM_128 0
#endif
#ifndef PS_HEAD_DIM_256
#define PS_HEAD_DIM_256 0
#endif
#else
#define PS_HEAD_DIM_64 1
#define PS_HEAD_DIM_80 1
#define PS_HEAD_DIM_96 1
#define PS_HEAD_DIM_128 1
#define PS_HEAD_DIM_256 1
#endif

namespace ps {

template <void (*kernel)(const DecodeParameters), int shared_bytes>
cudaError_t run_decode(const DecodeParameters& p, int num_ctas, cudaStream_t stream, int* ctas_per_sm) {
  // More than 48 KiB of shared memory must be asked for, once a device.
  static std::atomic<uint64_t> prepared{0};
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const uint64_t bit = uint64_t{1} << (device & 63);
  if ((prepared.load(std::memory_order_relaxed) & bit) == 0) {
    error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 shared_bytes);
    if (error != cudaSuccess) return error;
    prepared.fetch_or(bit, std::memory_order_relaxed);
  }
  if (ctas_per_sm != nullptr) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(ctas_per_sm, reinterpret_cast<const void*>(kernel),
                                                         32 * kDecodeWarps, shared_bytes);
  }
  return device::launch(kernel, dim3(num_ctas), dim3(32 * kDecodeWarps), shared_bytes, stream, p);
}

template <void (*kernel)(const DecodeParameters), int shared_bytes>
constexpr DecodeKernel decode_kernel() {
  return {run_decode<kernel, shared_bytes>, shared_bytes};
}

}  // namespace ps
