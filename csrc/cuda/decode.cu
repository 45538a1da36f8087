// ABI functions of paged decode: check what a kernel cannot survive, choose the kernel, launch.
#include "decode.h"

#include <cmath>

#include "status.h"

namespace ps {
namespace {

constexpr int kMostSeqs = 65535;  // of one launch
constexpr int kMostGridHeads = 65535;

// 16 rows of 256 dimensions are more accumulators than a thread has registers.
int row_tile_of(int64_t head_dim, int64_t max_rows, int dtype) {
  return dtype == PS_CUDA_F32 || max_rows <= 8 || head_dim > 128 ? 8 : 16;
}

DecodeKernel find(int dtype, int kv_dtype, int64_t head_dim, int row_tile) {
  const int dim = head_dim > 256 ? 0 : static_cast<int>(head_dim);
  switch (dtype) {
    case PS_CUDA_F32:
      return kv_dtype == PS_CUDA_F32 ? find_decode_f32(dim) : DecodeKernel{};
    case PS_CUDA_BF16:
      if (kv_dtype == PS_CUDA_BF16) return find_decode_bf16(dim, row_tile);
      if (kv_dtype == PS_CUDA_I8) return find_decode_bf16_i8(dim, row_tile);
      if (kv_dtype == PS_CUDA_F8E4M3) return find_decode_bf16_f8(dim, row_tile);
      return {};
    case PS_CUDA_F16:
      if (kv_dtype == PS_CUDA_F16) return find_decode_f16(dim, row_tile);
      if (kv_dtype == PS_CUDA_I8) return find_decode_f16_i8(dim, row_tile);
      if (kv_dtype == PS_CUDA_F8E4M3) return find_decode_f16_f8(dim, row_tile);
      return {};
    default:
      return {};
  }
}

int no_kernel(int dtype, int kv_dtype, int64_t head_dim) {
  return fail(PS_CUDA_UNSUPPORTED, "no decode kernel for dtype %d, cache dtype %d, head_dim %lld", dtype, kv_dtype,
              static_cast<long long>(head_dim));
}

bool aligned(const void* pointer, int64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

int log2_of(int64_t x) {
  int shift = 0;
  while ((int64_t{1} << shift) < x) ++shift;
  return shift;
}

int check_rows(const ps_cuda_rows& rows) {
  if (rows.num_seqs < 0 || rows.num_seqs > kMostSeqs || rows.max_query_len < 1 || rows.max_query_len > 1024 ||
      (rows.query_start_loc == nullptr && rows.max_query_len != 1)) {
    return fail(PS_CUDA_INVALID_ARGUMENT, "%lld rows of up to %lld queries", static_cast<long long>(rows.num_seqs),
                static_cast<long long>(rows.max_query_len));
  }
  return PS_CUDA_OK;
}

}  // namespace
}  // namespace ps

using namespace ps;

extern "C" {

int64_t ps_cuda_decode_row_tile(int64_t head_dim, int64_t max_rows, int dtype) {
  return row_tile_of(head_dim, max_rows, dtype);
}

int64_t ps_cuda_decode_shared_bytes(int64_t head_dim, int64_t max_rows, int dtype, int kv_dtype) {
  return find(dtype, kv_dtype, head_dim, row_tile_of(head_dim, max_rows, dtype)).shared_bytes;
}

int64_t ps_cuda_decode_max_items(int64_t num_seqs, int64_t grid_heads, int64_t resident_ctas) {
  // Eight waves are as even as it gets; a piece of each row comes on top.
  return num_seqs + (8 * resident_ctas + grid_heads - 1) / grid_heads;
}

int64_t ps_cuda_decode_partial_floats(int64_t max_items, int64_t grid_heads, int64_t row_tile, int64_t head_dim) {
  return max_items * grid_heads * row_tile * (head_dim + 2);
}

int ps_cuda_decode_resident_ctas(int64_t head_dim, int64_t max_rows, int dtype, int kv_dtype,
                                 int64_t* resident_ctas) {
  const DecodeKernel kernel = find(dtype, kv_dtype, head_dim, row_tile_of(head_dim, max_rows, dtype));
  if (kernel.run == nullptr) return no_kernel(dtype, kv_dtype, head_dim);
  int device = 0, sms = 0, ctas = 0;
  int status = check(cudaGetDevice(&device), "asking for the device");
  if (status != PS_CUDA_OK) return status;
  status = check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "asking for the device");
  if (status != PS_CUDA_OK) return status;
  status = check(kernel.run(DecodeParameters{}, 1, nullptr, &ctas), "preparing the decode kernel");
  if (status != PS_CUDA_OK) return status;
  if (ctas < 1) return fail(PS_CUDA_UNSUPPORTED, "the decode kernel does not fit on this device");
  *resident_ctas = static_cast<int64_t>(sms) * ctas;
  return PS_CUDA_OK;
}

int ps_cuda_plan_decode(const ps_cuda_decode_plan* plan, const ps_cuda_rows* rows, int64_t grid_heads, int64_t window,
                        void* stream) {
  const int status = check_rows(*rows);
  if (status != PS_CUDA_OK) return status;
  if (grid_heads < 1 || grid_heads > kMostGridHeads || plan->resident_ctas < 1 || plan->resident_ctas > 1 << 20 || window < 0 ||
      window > INT32_MAX || plan->max_items < rows->num_seqs || plan->max_items > INT32_MAX ||
      !aligned(plan->items, 16)) {
    return fail(PS_CUDA_INVALID_ARGUMENT, "a plan of %lld items for %lld rows",
                static_cast<long long>(plan->max_items), static_cast<long long>(rows->num_seqs));
  }
  return check(launch_plan(*plan, *rows, static_cast<int>(grid_heads), static_cast<int>(window),
                           static_cast<cudaStream_t>(stream)),
               "planning a decode step");
}

int ps_cuda_paged_decode(void* out, int64_t out_stride, const void* query, int64_t query_stride, int64_t num_heads,
                         int dtype, const ps_cuda_kv_cache* kv, const ps_cuda_rows* rows,
                         const ps_cuda_decode_plan* plan, float scale, int64_t window, float soft_cap, void* stream) {
  int status = check_rows(*rows);
  if (status != PS_CUDA_OK) return status;
  if (kv->num_kv_heads < 1 || num_heads < 1 || num_heads % kv->num_kv_heads != 0) {
    return fail(PS_CUDA_INVALID_ARGUMENT, "%lld query heads cannot share %lld KV heads",
                static_cast<long long>(num_heads), static_cast<long long>(kv->num_kv_heads));
  }
  if (kv->block_size < 8 || kv->block_size > 128 || (kv->block_size & (kv->block_size - 1)) != 0) {
    return fail(PS_CUDA_UNSUPPORTED, "block_size must be a power of two from 8 to 128, it is %lld",
                static_cast<long long>(kv->block_size));
  }
  const int64_t group = num_heads / kv->num_kv_heads;
  const int64_t max_rows = group * rows->max_query_len;
  const int row_tile = row_tile_of(kv->head_dim, max_rows, dtype);
  const DecodeKernel kernel = find(dtype, kv->dtype, kv->head_dim, row_tile);
  if (kernel.run == nullptr) return no_kernel(dtype, kv->dtype, kv->head_dim);
  const int64_t row_tiles = (max_rows + row_tile - 1) / row_tile;
  const int element = dtype == PS_CUDA_F32 ? 4 : 2;
  if (!aligned(out, 16) || !aligned(query, 16) || !aligned(kv->data, 16) || kv->block_stride_bytes % 16 != 0 ||
      out_stride * element % 16 != 0 || query_stride * element % 16 != 0 || !aligned(plan->items, 16) ||
      !aligned(plan->partials, 16)) {
    return fail(PS_CUDA_INVALID_ARGUMENT, "query, out, the cache and their rows must be aligned to 16 bytes");
  }
  if (window < 0 || window > INT32_MAX || !(soft_cap >= 0.0f) || !(scale > 0.0f) || plan->max_items < 1 ||
      plan->max_items * kv->num_kv_heads * row_tiles > INT32_MAX || plan->resident_ctas < 1 ||
      plan->resident_ctas > INT32_MAX) {
    return fail(PS_CUDA_INVALID_ARGUMENT, "window %lld, soft_cap %g, scale %g, %lld items",
                static_cast<long long>(window), soft_cap, scale, static_cast<long long>(plan->max_items));
  }
  if (rows->num_seqs == 0) return PS_CUDA_OK;
  const int64_t most_work = plan->max_items * kv->num_kv_heads * row_tiles;
  const int64_t num_ctas = most_work < plan->resident_ctas ? most_work : plan->resident_ctas;
  constexpr double kLog2E = 1.4426950408889634;
  const bool is_coded = kv->dtype == PS_CUDA_I8 || kv->dtype == PS_CUDA_F8E4M3;
  const int64_t token_bytes = is_coded ? kv->head_dim + 4 : kv->head_dim * element;
  DecodeParameters p;
  p.out = out;
  p.out_stride = out_stride;
  p.query = query;
  p.query_stride = query_stride;
  p.kv = static_cast<const unsigned char*>(kv->data);
  p.block_stride = kv->block_stride_bytes;
  p.head_stride = kv->block_size * token_bytes;
  p.value_offset = kv->num_kv_heads * p.head_stride;
  p.block_tables = rows->block_tables;
  p.block_tables_stride = rows->block_tables_stride;
  p.seq_lens = rows->seq_lens;
  p.query_start_loc = rows->query_start_loc;
  p.items = reinterpret_cast<const int4*>(plan->items);
  p.partials = plan->partials;
  p.counters = plan->counters;
  p.group = static_cast<int>(group);
  p.row_tiles = static_cast<int>(row_tiles);
  p.grid_heads = static_cast<int>(kv->num_kv_heads * row_tiles);
  p.block_shift = log2_of(kv->block_size);
  p.window = static_cast<int>(window);
  p.scale_log2 = static_cast<float>(scale * kLog2E);
  p.soft_cap = soft_cap;
  p.cap_in = soft_cap == 0.0f ? 0.0f : static_cast<float>(scale / soft_cap * 2.0 * kLog2E);
  p.cap_out = soft_cap / scale;
  return check(kernel.run(p, static_cast<int>(num_ctas), static_cast<cudaStream_t>(stream), nullptr), "decode attention");
}

}  // extern "C"
