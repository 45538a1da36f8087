/* The C ABI of libpagedserve_cpu.
 *
 * Rules: raw pointers, sizes and strides in, a status out. Strides count elements unless they end in _bytes.
 * Rows of activations are fp32 and contiguous in their last dimension. Nothing is kept after a call returns.
 * Every function may be called from any thread; calls that use the thread pool run one after another.
 */
#ifndef PAGEDSERVE_H
#define PAGEDSERVE_H

#include <stdint.h>

#define PS_API __attribute__((visibility("default")))
#define PS_ABI_VERSION 6

#ifdef __cplusplus
extern "C" {
#endif

enum ps_status {
  PS_OK = 0,
  PS_INVALID_ARGUMENT = 1, /* ps_last_error() says which */
  PS_UNSUPPORTED = 2,      /* this build or CPU cannot */
  PS_OUT_OF_MEMORY = 3
};

enum ps_dtype { PS_F32 = 0, PS_BF16 = 1, PS_F16 = 2, PS_I8 = 3 /* of KV caches only */ };

enum ps_activation { PS_SILU = 0, PS_GELU_TANH = 1, PS_GELU_ERF = 2, PS_RELU = 3 };

PS_API int ps_abi_version(void);
/* Text of the last failure on this thread; empty after none. Valid until the thread's next failure. */
PS_API const char* ps_last_error(void);

/* Instruction sets of this library that this CPU can run, best first, separated by commas. */
PS_API const char* ps_available_isas(void);
PS_API const char* ps_isa(void);
/* NULL: the best one. Not to be called while kernels run. */
PS_API int ps_select_isa(const char* name);

/* Threads that compute, the caller included (default: the CPUs this process may use). */
PS_API int ps_set_num_threads(int num_threads);
PS_API int ps_num_threads(void);

/* out = normalize(x) * weight over the last dimension, of num_outer x num_inner rows. With a residual
 * (may be NULL; only with num_inner 1): residual += x first, then out = normalize(residual) * weight. out may be x. */
PS_API int ps_rms_norm(float* out, int64_t out_outer_stride, int64_t out_inner_stride, const float* x,
                       int64_t x_outer_stride, int64_t x_inner_stride, float* residual, int64_t residual_stride,
                       const float* weight, int64_t num_outer, int64_t num_inner, int64_t dim, float eps);

/* out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias for each row; bias may be NULL. With a residual (may be
 * NULL): residual += x first, and the sum is what gets normalized. out may be x or residual. */
PS_API int ps_layer_norm(float* out, int64_t out_stride, const float* x, int64_t x_stride, float* residual,
                         int64_t residual_stride, const float* weight, const float* bias, int64_t num_rows, int64_t dim,
                         float eps);

/* Rotates, in place, the first rotary_dim elements of each head, half against half (NeoX style).
 * cos_sin: [max_position, rotary_dim], cosines in the first half of a row, sines in the second. key may be NULL. */
PS_API int ps_rotary_embedding(const int64_t* positions, float* query, int64_t query_stride, int64_t num_heads,
                               float* key, int64_t key_stride, int64_t num_kv_heads, const float* cos_sin,
                               int64_t max_position, int64_t num_tokens, int64_t head_dim, int64_t rotary_dim);

/* out[row] = activation(x[row, :dim]) * x[row, dim:] */
PS_API int ps_gated_activation(int activation, float* out, int64_t out_stride, const float* x, int64_t x_stride,
                               int64_t num_rows, int64_t dim);

/* out[row] = activation(x[row]); out may be x. */
PS_API int ps_activation(int activation, float* out, int64_t out_stride, const float* x, int64_t x_stride,
                         int64_t num_rows, int64_t dim);

/* x *= factor; x = cap * tanh(x / cap); x += y. Each in place. */
PS_API int ps_scale(float* x, int64_t x_stride, int64_t num_rows, int64_t dim, float factor);
PS_API int ps_soft_cap(float* x, int64_t x_stride, int64_t num_rows, int64_t dim, float cap);
PS_API int ps_add(float* x, int64_t x_stride, const float* y, int64_t y_stride, int64_t num_rows, int64_t dim);

/* logits[rows[i], t] = -inf where bit t % 32 of masks[i, t / 32] is 0. logits: [num_rows, vocab_size]; rows differ. */
PS_API int ps_token_bitmask(float* logits, int64_t logits_stride, int64_t num_rows, int64_t vocab_size,
                            const int64_t* rows, const uint32_t* masks, int64_t masks_stride, int64_t num_masked);

/* out[i] = table[row_ids[i]], widened from its ps_dtype. table: [table_rows, dim], rows table_stride elements apart. */
PS_API int ps_embedding(float* out, int64_t out_stride, const void* table, int64_t table_stride, int64_t table_rows,
                        int dtype, const int64_t* row_ids, int64_t num_rows, int64_t dim);

/* One layer's view of a KV pool. Block b starts at data + b * block_stride and holds
 * K [num_kv_heads][head_dim][block_size], then V [num_kv_heads][block_size][head_dim]. With PS_I8 each head's codes
 * are followed by its tokens' fp32 scales, [block_size]; block_stride counts bytes then, and head_dim, block_stride and
 * the address are multiples of 4. */
typedef struct ps_kv_cache {
  void* data;
  int64_t block_stride;
  int64_t num_blocks;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t block_size;
  int32_t dtype; /* ps_dtype */
} ps_kv_cache;

/* key, value: [num_tokens, num_kv_heads, head_dim]; slot -1 is skipped. */
PS_API int ps_write_kv(const ps_kv_cache* kv_cache, const float* key, int64_t key_stride, const float* value,
                       int64_t value_stride, const int64_t* slot_mapping, int64_t num_tokens);

typedef struct ps_attention_rows {
  const int32_t* query_start_loc; /* [num_seqs + 1] */
  const int32_t* seq_lens;        /* [num_seqs] */
  const int32_t* block_tables;    /* [num_seqs, block_tables_stride] */
  int64_t block_tables_stride;
  int64_t num_seqs;
  int64_t num_tokens; /* of query and out */
} ps_attention_rows;

/* Causal attention of each row's tokens over its whole context. window 0: no window; soft_cap 0: none.
 * query, out: [num_tokens, num_heads, head_dim]. */
PS_API int ps_paged_attention(float* out, int64_t out_stride, const float* query, int64_t query_stride,
                              int64_t num_heads, const ps_kv_cache* kv_cache, const ps_attention_rows* rows,
                              float scale, int64_t window, float soft_cap);

/* ps_rotary_embedding, ps_write_kv and ps_paged_attention over one fused projection, in one call.
 * qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; query and key are rotated in place. */
PS_API int ps_rotary_attention(float* out, int64_t out_stride, float* qkv, int64_t qkv_stride, int64_t num_heads,
                               const int64_t* positions, const float* cos_sin, int64_t max_position,
                               int64_t rotary_dim, const int64_t* slot_mapping, const ps_kv_cache* kv_cache,
                               const ps_attention_rows* rows, float scale, int64_t window, float soft_cap);

/* For each pair (src, dst), in order: copies one whole block of block_bytes. The pools may be the same. */
PS_API int ps_copy_blocks(void* dst_pool, int64_t dst_num_blocks, const void* src_pool, int64_t src_num_blocks,
                          int64_t block_bytes, const int64_t* pairs, int64_t num_pairs);

/* Formats of packed weights; csrc/cpu/linear_format.h gives their layout. INT formats group 32 inputs and quantise
 * activations to 15 bits (beside 4-bit weights 12) per row and group; float formats are exact but for the order of
 * additions. */
enum ps_linear_format {
  PS_LINEAR_F32 = 0,
  PS_LINEAR_BF16 = 1,
  PS_LINEAR_F16 = 2,
  PS_LINEAR_INT8 = 3,     /* fp16 scale (Q8_0, Q5_0, IQ4_NL) */
  PS_LINEAR_INT8_G16 = 4, /* fp32 scale per 16 (Q6_K, Q3_K, IQ4_XS, MXFP4) */
  PS_LINEAR_INT8_MIN = 5, /* fp32 scale and min (Q5_1, Q5_K) */
  PS_LINEAR_INT4_SYM = 6, /* fp16 scale (Q4_0) */
  PS_LINEAR_INT4 = 7,     /* fp16 scale and min (Q4_1) */
  PS_LINEAR_INT4_F32 = 8  /* fp32 scale and min (Q4_K) */
};

/* A packed matrix [out_features, in_features]; data is aligned to 64 bytes. */
typedef struct ps_linear_weight {
  const void* data;
  int64_t out_features;
  int64_t in_features;
  int32_t format; /* ps_linear_format */
} ps_linear_weight;

/* Bytes of the packed matrix, or 0 with an error text: in_features of INT formats must be a multiple of 32. */
PS_API int64_t ps_linear_packed_bytes(int format, int64_t out_features, int64_t in_features);
/* The format that holds a GGML quant type without loss, or -1 where there is none. */
PS_API int ps_linear_format_of_ggml_type(int ggml_type);
/* Fills rows first_row .. first_row + num_rows of weight->data (zeroed by the caller before the first call) from
 * dense rows of a ps_dtype. Formats INT8, INT4_SYM and INT4 quantise. */
PS_API int ps_linear_pack(const ps_linear_weight* weight, int64_t first_row, int64_t num_rows, const void* rows,
                          int64_t row_stride, int dtype);
/* The same from the rows of a GGUF tensor, of the format ps_linear_format_of_ggml_type gives. */
PS_API int ps_linear_pack_ggml(const ps_linear_weight* weight, int64_t first_row, int64_t num_rows, const void* rows,
                               int64_t row_bytes, int ggml_type);
/* out[i] = the dequantised row row_ids[i]: embedding lookup. */
PS_API int ps_linear_rows(float* out, int64_t out_stride, const ps_linear_weight* weight, const int64_t* row_ids,
                          int64_t num_rows);
/* The same from the rows of a GGUF tensor as they lie in the file: table_rows rows of row_bytes bytes. */
PS_API int ps_ggml_rows(float* out, int64_t out_stride, const void* rows, int64_t row_bytes, int64_t table_rows,
                        int64_t in_features, int ggml_type, const int64_t* row_ids, int64_t num_rows);
/* out = x @ weight.T + bias + residual; bias and residual may be NULL, residual may be out. x: [num_rows,
 * in_features]. A row's bits depend neither on the other rows nor on the number of threads. */
PS_API int ps_linear(float* out, int64_t out_stride, const float* x, int64_t x_stride, int64_t num_rows,
                     const ps_linear_weight* weight, const float* bias, const float* residual,
                     int64_t residual_stride);

/* A token's best experts: chosen [num_rows, top_k], the largest logits first, of equal ones the first expert's, NaN
 * before all; weights [num_rows, top_k], their softmax over all num_experts logits, or with renormalize over the chosen. */
PS_API int ps_route(float* weights, int64_t* chosen, const float* logits, int64_t logits_stride, int64_t num_rows,
                    int64_t num_experts, int64_t top_k, int renormalize);

/* out[row] = the sum of weights[row, i] * down(activation(gate(x[row])) * up(x[row])) over its chosen experts, added in
 * the order of i. x, out: [num_rows, hidden_size], not the same; weights, chosen: [num_rows, top_k]. gate_up:
 * [num_experts, 2] of [expert_size, hidden_size], the gate first; down: [num_experts] of [hidden_size, expert_size]; each
 * matrix may have a format of its own. A row's bits depend neither on the other rows nor on the number of threads. */
PS_API int ps_experts_sum(float* out, int64_t out_stride, const float* x, int64_t x_stride, int64_t num_rows,
                          const float* weights, const int64_t* chosen, int64_t top_k, const ps_linear_weight* gate_up,
                          const ps_linear_weight* down, int64_t num_experts, int activation);

/* One token a row of logits [num_rows, vocab]; every other argument has one number a row. temperature 0 takes the
 * likeliest token, the first of equals. Else logits / temperature, min_p (0: none), top_k (0: none), top_p (of what is
 * left; 1 or more: none), then the inverse CDF in the order of the ids at uniform, in [0, 1). NaN counts as -inf, +inf
 * as 1e30; token -1 where nothing is above -inf. */
PS_API int ps_sample(const float* logits, int64_t logits_stride, int64_t num_rows, int64_t vocab,
                     const float* temperature, const float* min_p, const int64_t* top_k, const double* top_p,
                     const double* uniform, int64_t* token_ids);

/* A step program: calls of the functions above, recorded once and replayed by one call for any number of rows. It is
 * the exception to "nothing is kept": it lives from create to destroy, and one thread at a time may run it. What its
 * arguments point to must outlive it. */
typedef struct ps_program ps_program;

enum ps_argument_kind {
  PS_ARGUMENT_VALUE = 0, /* value: an integer, a pointer, or the 32 bits of a float */
  PS_ARGUMENT_COUNT = 1, /* value * counts[index] */
  PS_ARGUMENT_BUFFER = 2, /* the program's buffer `index`, and value bytes on */
  PS_ARGUMENT_INPUT = 3   /* inputs[index], and value bytes on */
};

typedef struct ps_argument {
  int32_t kind; /* ps_argument_kind */
  int32_t index;
  int64_t value;
} ps_argument;

PS_API int ps_program_create(ps_program** program, int64_t num_counts, int64_t num_inputs);
PS_API void ps_program_destroy(ps_program* program);
/* Working memory of bytes * counts[count_index] bytes (count_index -1: of `bytes`), aligned to 64; its contents last
 * for one run. Buffers are numbered from 0. */
PS_API int ps_program_add_buffer(ps_program* program, int64_t bytes, int64_t count_index);
/* A call of the function named `op`, one argument for each of its parameters. */
PS_API int ps_program_add_op(ps_program* program, const char* op, const ps_argument* arguments,
                             int64_t num_arguments);
/* The calls in order, until one fails. Where op_seconds is not NULL each call's time is added to its place there. */
PS_API int ps_program_run(ps_program* program, const int64_t* counts, void* const* inputs, double* op_seconds);

#ifdef __cplusplus
}
#endif
#endif
