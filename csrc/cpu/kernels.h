// The kernels behind the C ABI, once per instruction set. Arguments are those of pagedserve.h, already checked.
#pragma once

#include <cstdint>

#include "isa.h"
#include "pagedserve.h"

namespace ps {

PS_FOR_EACH_ISA(
    void rms_norm(float* out, int64_t out_outer_stride, int64_t out_inner_stride, const float* x,
                  int64_t x_outer_stride, int64_t x_inner_stride, float* residual, int64_t residual_stride,
                  const float* weight, int64_t num_outer, int64_t num_inner, int64_t dim, float eps);

    void layer_norm(float* out, int64_t out_stride, const float* x, int64_t x_stride, float* residual,
                    int64_t residual_stride, const float* weight, const float* bias, int64_t num_rows, int64_t dim,
                    float eps);

    void rotary_embedding(const int64_t* positions, float* query, int64_t query_stride, int64_t num_heads,
                          float* key, int64_t key_stride, int64_t num_kv_heads, const float* cos_sin,
                          int64_t num_tokens, int64_t head_dim, int64_t rotary_dim);

    void gated_activation(int activation, float* out, int64_t out_stride, const float* x, int64_t x_stride,
                          int64_t num_rows, int64_t dim);

    void activation(int activation, float* out, int64_t out_stride, const float* x, int64_t x_stride,
                    int64_t num_rows, int64_t dim);

    void scale(float* x, int64_t x_stride, int64_t num_rows, int64_t dim, float factor);

    void soft_cap(float* x, int64_t x_stride, int64_t num_rows, int64_t dim, float cap);
    void token_bitmask(float* logits, int64_t logits_stride, int64_t vocab_size, const int64_t* rows,
                       const uint32_t* masks, int64_t masks_stride, int64_t num_masked);

    void add(float* x, int64_t x_stride, const float* y, int64_t y_stride, int64_t num_rows, int64_t dim);

    void embedding(float* out, int64_t out_stride, const void* table, int64_t table_stride, int dtype,
                   const int64_t* row_ids, int64_t num_rows, int64_t dim);

    void write_kv(const ps_kv_cache& kv_cache, const float* key, int64_t key_stride, const float* value,
                  int64_t value_stride, const int64_t* slot_mapping, int64_t num_tokens);

    void sample(const float* logits, int64_t logits_stride, int64_t num_rows, int64_t vocab, const float* temperature,
                const float* min_p, const int64_t* top_k, const double* top_p, const double* uniform,
                int64_t* token_ids, int* status);

    void paged_attention(float* out, int64_t out_stride, const float* query, int64_t query_stride,
                         int64_t num_heads, const ps_kv_cache& kv_cache, const ps_attention_rows& rows,
                         float scale, int64_t window, float soft_cap, int* status);)

}  // namespace ps
