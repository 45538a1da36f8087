/* The C ABI of libpagedserve_cuda.
 *
 * Rules: raw pointers, sizes and strides in, a status out; work is queued on `stream` (a cudaStream_t) and nothing waits
 * for it. Pointers are to device memory unless they say otherwise. The library loads and answers on machines without a
 * driver: what needs a device returns PS_CUDA_NO_DEVICE there. Every function may be called from any thread.
 */
#ifndef PAGEDSERVE_CUDA_H
#define PAGEDSERVE_CUDA_H

#include <stdint.h>

#define PS_CUDA_API __attribute__((visibility("default")))
#define PS_CUDA_ABI_VERSION 1

#ifdef __cplusplus
extern "C" {
#endif

enum ps_cuda_status {
  PS_CUDA_OK = 0,
  PS_CUDA_INVALID_ARGUMENT = 1, /* ps_cuda_last_error() says which */
  PS_CUDA_UNSUPPORTED = 2,      /* no kernel for this */
  PS_CUDA_OUT_OF_MEMORY = 3,
  PS_CUDA_NO_DEVICE = 4,        /* no driver, or no card that it can use */
  PS_CUDA_FAILED = 5            /* what the CUDA runtime says is in the text */
};

enum ps_cuda_dtype { PS_CUDA_F32 = 0, PS_CUDA_BF16 = 1, PS_CUDA_F16 = 2, PS_CUDA_I8 = 3, PS_CUDA_F8E4M3 = 4 };

PS_CUDA_API int ps_cuda_abi_version(void);
/* Text of the last failure on this thread; empty after none. Valid until the thread's next failure. */
PS_CUDA_API const char* ps_cuda_last_error(void);
/* How many devices the driver shows; 0 with the reason in ps_cuda_last_error() where there is none. */
PS_CUDA_API int ps_cuda_device_count(void);

/* One layer's view of a KV pool. Block b starts block_stride_bytes * b after data and holds
 * K [num_kv_heads][block_size][head_dim], then V likewise. In an 8-bit cache each head's codes are followed by its
 * tokens' fp32 scales [block_size], so a head takes block_size * (head_dim + 4) bytes. Addresses are multiples of 16. */
typedef struct ps_cuda_kv_cache {
  const void* data;
  int64_t block_stride_bytes;
  int64_t num_blocks;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t block_size; /* a power of two, 8 to 128 */
  int32_t dtype;      /* ps_cuda_dtype */
} ps_cuda_kv_cache;

/* The rows of a decode step. Row i's queries are tokens query_start_loc[i] .. query_start_loc[i + 1] - 1 and the last
 * ones of its seq_lens[i] tokens of context; query_start_loc NULL means one each. Rows of seq_len 0 are skipped: their
 * output is not touched. */
typedef struct ps_cuda_rows {
  const int32_t* seq_lens;        /* [num_seqs] */
  const int32_t* block_tables;    /* [num_seqs, block_tables_stride] */
  const int32_t* query_start_loc; /* [num_seqs + 1] or NULL */
  int64_t block_tables_stride;
  int64_t num_seqs;
  int64_t max_query_len; /* of any row; decides the grid */
} ps_cuda_rows;

/* The work of one step, cut into pieces of about equal cost by ps_cuda_plan_decode; every layer of one window reads it.
 * All sizes are host-side upper bounds, so that a captured graph may grow its contexts. */
typedef struct ps_cuda_decode_plan {
  int32_t* items;    /* [4 + 4 * max_items]; written by ps_cuda_plan_decode */
  int64_t max_items; /* ps_cuda_decode_max_items or more */
  int64_t resident_ctas; /* ps_cuda_decode_resident_ctas: what the pieces are cut for, and the launch's grid */
  float* partials;   /* ps_cuda_decode_partial_floats; layers of one stream share them */
  int32_t* counters; /* [num_seqs * num_kv_heads * row tiles]; zero before the first call, and again after each */
} ps_cuda_decode_plan;

/* CTAs of the kernel that the current device holds at a time. */
PS_CUDA_API int ps_cuda_decode_resident_ctas(int64_t head_dim, int64_t max_rows, int dtype, int kv_dtype,
                                             int64_t* resident_ctas);
/* Query rows that one CTA takes of a KV head's num_heads / num_kv_heads * max_query_len, 8 or 16. This and the sizes below need no device. */
PS_CUDA_API int64_t ps_cuda_decode_row_tile(int64_t head_dim, int64_t max_rows, int dtype);
/* Shared memory of a CTA in bytes; 0 where there is no such kernel. */
PS_CUDA_API int64_t ps_cuda_decode_shared_bytes(int64_t head_dim, int64_t max_rows, int dtype, int kv_dtype);
PS_CUDA_API int64_t ps_cuda_decode_max_items(int64_t num_seqs, int64_t grid_heads, int64_t resident_ctas);
PS_CUDA_API int64_t ps_cuda_decode_partial_floats(int64_t max_items, int64_t grid_heads, int64_t row_tile,
                                                  int64_t head_dim);

/* grid_heads: num_kv_heads * row tiles. window 0: none. */
PS_CUDA_API int ps_cuda_plan_decode(const ps_cuda_decode_plan* plan, const ps_cuda_rows* rows, int64_t grid_heads,
                                    int64_t window, void* stream);

/* Causal attention of each row's queries over its context. query, out: [num_tokens, num_heads, head_dim] of dtype F32
 * (with an F32 cache), BF16 or F16 (with a cache of the same, I8 or F8E4M3). window 0: none; soft_cap 0: none. */
PS_CUDA_API int ps_cuda_paged_decode(void* out, int64_t out_stride, const void* query, int64_t query_stride,
                                     int64_t num_heads, int dtype, const ps_cuda_kv_cache* kv_cache,
                                     const ps_cuda_rows* rows, const ps_cuda_decode_plan* plan, float scale,
                                     int64_t window, float soft_cap, void* stream);

/* For each pair (src, dst) of host memory, in order: copies one whole block of block_bytes, a multiple of 16, within a
 * device pool. One launch for as many pairs as do not depend on each other (up to 480). */
PS_CUDA_API int ps_cuda_copy_blocks(void* pool, int64_t num_blocks, int64_t block_bytes, const int64_t* pairs,
                                    int64_t num_pairs, void* stream);
/* The same between two pools, each on the device or in pinned host memory, by the copy engines. */
PS_CUDA_API int ps_cuda_swap_blocks(void* dst_pool, int64_t dst_num_blocks, const void* src_pool,
                                    int64_t src_num_blocks, int64_t block_bytes, const int64_t* pairs,
                                    int64_t num_pairs, void* stream);

#ifdef __cplusplus
}
#endif

#endif
