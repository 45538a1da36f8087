// Copies of whole blocks within a device pool (copy-on-write) and between it and a pinned host pool (swapping).
#include <unordered_set>
#include <vector>

#include "status.h"

namespace ps {
namespace {

constexpr int kThreads = 256;
constexpr int kVectors = 4;  // of 16 bytes, that a thread has on their way at a time
constexpr int kMostPairs = 480;  // of a launch: they travel as its parameters, of which there may be 4 KiB

struct BlockPairs {
  int32_t source[kMostPairs];
  int32_t target[kMostPairs];
};

__global__ void __launch_bounds__(kThreads) copy_blocks(uint4* pool, int64_t vectors, const BlockPairs pairs) {
  const uint4* const from = pool + pairs.source[blockIdx.y] * vectors;
  uint4* const to = pool + pairs.target[blockIdx.y] * vectors;
  constexpr int kPerCta = kThreads * kVectors;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kPerCta + threadIdx.x; first < vectors;
       first += static_cast<int64_t>(gridDim.x) * kPerCta) {
    uint4 held[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (first + i * kThreads < vectors) held[i] = from[first + i * kThreads];
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (first + i * kThreads < vectors) to[first + i * kThreads] = held[i];
    }
  }
}

int check_pairs(const int64_t* pairs, int64_t num_pairs, int64_t src_num_blocks, int64_t dst_num_blocks,
                int64_t block_bytes) {
  if (num_pairs < 0 || block_bytes <= 0 || block_bytes % 16 != 0) {
    return fail(PS_CUDA_INVALID_ARGUMENT, "blocks of %lld bytes are no multiple of 16",
                static_cast<long long>(block_bytes));
  }
  if (src_num_blocks > INT32_MAX || dst_num_blocks > INT32_MAX) {
    return fail(PS_CUDA_INVALID_ARGUMENT, "a pool of more than 2^31 blocks");
  }
  for (int64_t i = 0; i < num_pairs; ++i) {
    const int64_t source = pairs[2 * i], target = pairs[2 * i + 1];
    if (source < 0 || source >= src_num_blocks || target < 0 || target >= dst_num_blocks) {
      return fail(PS_CUDA_INVALID_ARGUMENT, "block copy %lld -> %lld outside the pools of %lld and %lld blocks",
                  static_cast<long long>(source), static_cast<long long>(target),
                  static_cast<long long>(src_num_blocks), static_cast<long long>(dst_num_blocks));
    }
  }
  return PS_CUDA_OK;
}

// How many of the first pairs may be copied at the same time: none reads or writes what an earlier one writes, nor
// writes what an earlier one reads. `same_pool`: sources and targets number the same blocks.
int64_t count_independent(const int64_t* pairs, int64_t num_pairs, int64_t most, bool same_pool) {
  std::unordered_set<int64_t> written, read;
  int64_t n = 0;
  for (; n < num_pairs && n < most; ++n) {
    const int64_t source = pairs[2 * n], target = pairs[2 * n + 1];
    if (same_pool && (written.count(source) != 0 || read.count(target) != 0)) break;
    if (!written.insert(target).second) break;
    if (same_pool) read.insert(source);
  }
  return n;
}

struct Run {
  const char* from;
  char* to;
  size_t bytes;
};

cudaError_t copy_one_by_one(const std::vector<Run>& runs, cudaStream_t stream) {
  for (const Run& run : runs) {
    const cudaError_t error = cudaMemcpyAsync(run.to, run.from, run.bytes, cudaMemcpyDefault, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// All runs at once, where the runtime can: one call instead of hundreds.
cudaError_t copy_together(const std::vector<Run>& runs, cudaStream_t stream) {
#if CUDART_VERSION >= 13000
  if (stream == nullptr || runs.size() < 2) return copy_one_by_one(runs, stream);  // it takes no default stream
  std::vector<const void*> from;
  std::vector<void*> to;
  std::vector<size_t> bytes;
  for (const Run& run : runs) {
    from.push_back(run.from);
    to.push_back(run.to);
    bytes.push_back(run.bytes);
  }
  cudaMemcpyAttributes attributes = {};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  size_t first = 0;
  return cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), runs.size(), &attributes, &first, 1, stream);
#else
  return copy_one_by_one(runs, stream);
#endif
}

}  // namespace
}  // namespace ps

using namespace ps;

extern "C" {

int ps_cuda_copy_blocks(void* pool, int64_t num_blocks, int64_t block_bytes, const int64_t* pairs, int64_t num_pairs,
                        void* stream) {
  int status = check_pairs(pairs, num_pairs, num_blocks, num_blocks, block_bytes);
  if (status != PS_CUDA_OK || num_pairs == 0) return status;
  if (reinterpret_cast<uintptr_t>(pool) % 16 != 0) {
    return fail(PS_CUDA_INVALID_ARGUMENT, "the pool is not aligned to 16 bytes");
  }
  const int64_t vectors = block_bytes / 16;
  const int64_t ctas = (vectors + kThreads * kVectors - 1) / (kThreads * kVectors);
  while (num_pairs > 0) {
    const int64_t count = count_independent(pairs, num_pairs, kMostPairs, true);
    BlockPairs parameters;
    for (int64_t i = 0; i < count; ++i) {
      parameters.source[i] = static_cast<int32_t>(pairs[2 * i]);
      parameters.target[i] = static_cast<int32_t>(pairs[2 * i + 1]);
    }
    const dim3 grid(static_cast<unsigned>(ctas < 1024 ? ctas : 1024), static_cast<unsigned>(count));
    status = check(device::launch(copy_blocks, grid, dim3(kThreads), 0, static_cast<cudaStream_t>(stream),
                                  static_cast<uint4*>(pool), vectors, parameters),
                   "copying blocks");
    if (status != PS_CUDA_OK) return status;
    pairs += 2 * count;
    num_pairs -= count;
  }
  return PS_CUDA_OK;
}

int ps_cuda_swap_blocks(void* dst_pool, int64_t dst_num_blocks, const void* src_pool, int64_t src_num_blocks,
                        int64_t block_bytes, const int64_t* pairs, int64_t num_pairs, void* stream) {
  int status = check_pairs(pairs, num_pairs, src_num_blocks, dst_num_blocks, block_bytes);
  if (status != PS_CUDA_OK || num_pairs == 0) return status;
  const auto* const from = static_cast<const char*>(src_pool);
  auto* const to = static_cast<char*>(dst_pool);
  const bool same_pool = src_pool == dst_pool;
  std::vector<Run> runs;
  while (num_pairs > 0) {
    // A batch is copied in any order. Blocks that are neighbours on both sides are one copy.
    const int64_t count = count_independent(pairs, num_pairs, num_pairs, same_pool);
    runs.clear();
    for (int64_t i = 0; i < count; ++i) {
      const Run run = {from + pairs[2 * i] * block_bytes, to + pairs[2 * i + 1] * block_bytes,
                       static_cast<size_t>(block_bytes)};
      if (!runs.empty() && runs.back().from + runs.back().bytes == run.from &&
          runs.back().to + runs.back().bytes == run.to) {
        runs.back().bytes += run.bytes;
      } else {
        runs.push_back(run);
      }
    }
    status = check(copy_together(runs, static_cast<cudaStream_t>(stream)), "swapping blocks");
    if (status != PS_CUDA_OK) return status;
    pairs += 2 * count;
    num_pairs -= count;
  }
  return PS_CUDA_OK;
}

}  // extern "C"
