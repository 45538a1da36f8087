// The C ABI: checks what a kernel cannot survive, then calls the current instruction set's kernel.
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "pagedserve.h"
#include "status.h"
#include "thread_pool.h"

using ps::fail;

namespace {

// A copied piece: large enough to be worth a hand-over, small enough to share one block among threads.
constexpr int64_t kCopyBytes = 64 * 1024;

int check_kv_cache(const ps_kv_cache* kv_cache) {
  if (kv_cache->dtype < PS_F32 || kv_cache->dtype > PS_I8) {
    return fail(PS_INVALID_ARGUMENT, "unknown KV cache dtype %d", kv_cache->dtype);
  }
  if (kv_cache->block_size < 1 || kv_cache->head_dim < 1 || kv_cache->num_kv_heads < 1) {
    return fail(PS_INVALID_ARGUMENT, "block_size, head_dim and num_kv_heads must be positive");
  }
  if ((kv_cache->block_size & (kv_cache->block_size - 1)) != 0) {
    return fail(PS_UNSUPPORTED, "block_size is %lld: it must be a power of two", (long long)kv_cache->block_size);
  }
  const bool aligned = reinterpret_cast<uintptr_t>(kv_cache->data) % 4 == 0 && kv_cache->block_stride % 4 == 0;
  if (kv_cache->dtype == PS_I8 && !(aligned && kv_cache->head_dim % 4 == 0)) {
    return fail(PS_UNSUPPORTED, "an 8-bit KV cache needs head_dim, block_stride and address in multiples of 4");
  }
  return PS_OK;
}

int check_activation(int activation) {
  if (activation >= PS_SILU && activation <= PS_RELU) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "unknown activation %d", activation);
}

int check_slots(const int64_t* slots, int64_t num_tokens, int64_t num_slots) {
  for (int64_t i = 0; i < num_tokens; ++i) {
    if (slots[i] < -1 || slots[i] >= num_slots) {
      return fail(PS_INVALID_ARGUMENT, "slot_mapping[%lld] is %lld, the pool has %lld slots", (long long)i,
                  (long long)slots[i], (long long)num_slots);
    }
  }
  return PS_OK;
}

int check_rows(const ps_attention_rows* rows, const ps_kv_cache* kv_cache, int64_t window) {
  for (int64_t i = 0; i < rows->num_seqs; ++i) {
    const int64_t query_len = int64_t{rows->query_start_loc[i + 1]} - rows->query_start_loc[i];
    const int64_t seq_len = rows->seq_lens[i];
    if (query_len < 0 || rows->query_start_loc[i] < 0 || seq_len < query_len) {
      return fail(PS_INVALID_ARGUMENT, "row %lld has %lld query tokens and %lld tokens of context", (long long)i,
                  (long long)query_len, (long long)seq_len);
    }
    if (query_len == 0) continue;
    if (rows->query_start_loc[i + 1] > rows->num_tokens) {
      return fail(PS_INVALID_ARGUMENT, "query_start_loc[%lld] is %d, query has %lld tokens", (long long)(i + 1),
                  rows->query_start_loc[i + 1], (long long)rows->num_tokens);
    }
    const int64_t num_blocks = (seq_len + kv_cache->block_size - 1) / kv_cache->block_size;
    if (num_blocks > rows->block_tables_stride) {
      return fail(PS_INVALID_ARGUMENT, "row %lld needs %lld blocks, its table has room for %lld", (long long)i,
                  (long long)num_blocks, (long long)rows->block_tables_stride);
    }
    const int32_t* table = rows->block_tables + i * rows->block_tables_stride;
    // Blocks that have left the sliding window are not read and may hold any number.
    const int64_t seen = window > 0 && seq_len - query_len + 1 > window ? seq_len - query_len + 1 - window : 0;
    for (int64_t j = seen / kv_cache->block_size; j < num_blocks; ++j) {
      if (table[j] < 0 || table[j] >= kv_cache->num_blocks) {
        return fail(PS_INVALID_ARGUMENT, "block_tables[%lld, %lld] is %d, the pool has %lld blocks", (long long)i,
                    (long long)j, table[j], (long long)kv_cache->num_blocks);
      }
    }
  }
  return PS_OK;
}

}  // namespace

extern "C" {

int ps_set_num_threads(int num_threads) {
  if (num_threads < 1 || num_threads > 1024) {
    return fail(PS_INVALID_ARGUMENT, "num_threads is %d, it must be 1 .. 1024", num_threads);
  }
  ps::set_num_threads(num_threads);
  return PS_OK;
}

int ps_num_threads(void) { return ps::num_threads(); }

int ps_rms_norm(float* out, int64_t out_outer_stride, int64_t out_inner_stride, const float* x,
                int64_t x_outer_stride, int64_t x_inner_stride, float* residual, int64_t residual_stride,
                const float* weight, int64_t num_outer, int64_t num_inner, int64_t dim, float eps) {
  if (residual != nullptr && num_inner != 1) {
    return fail(PS_INVALID_ARGUMENT, "a residual goes with rows, not with heads");
  }
  PS_CALL(rms_norm, out, out_outer_stride, out_inner_stride, x, x_outer_stride, x_inner_stride, residual,
          residual_stride, weight, num_outer, num_inner, dim, eps);
  return PS_OK;
}

int ps_layer_norm(float* out, int64_t out_stride, const float* x, int64_t x_stride, float* residual,
                  int64_t residual_stride, const float* weight, const float* bias, int64_t num_rows, int64_t dim,
                  float eps) {
  PS_CALL(layer_norm, out, out_stride, x, x_stride, residual, residual_stride, weight, bias, num_rows, dim, eps);
  return PS_OK;
}

int ps_rotary_embedding(const int64_t* positions, float* query, int64_t query_stride, int64_t num_heads, float* key,
                        int64_t key_stride, int64_t num_kv_heads, const float* cos_sin, int64_t max_position,
                        int64_t num_tokens, int64_t head_dim, int64_t rotary_dim) {
  if (rotary_dim < 2 || rotary_dim % 2 != 0 || rotary_dim > head_dim) {
    return fail(PS_INVALID_ARGUMENT, "rotary_dim is %lld: it must be even and at most head_dim %lld",
                (long long)rotary_dim, (long long)head_dim);
  }
  for (int64_t i = 0; i < num_tokens; ++i) {
    if (positions[i] < 0 || positions[i] >= max_position) {
      return fail(PS_INVALID_ARGUMENT, "positions[%lld] is %lld, the cos/sin table ends at %lld", (long long)i,
                  (long long)positions[i], (long long)max_position);
    }
  }
  PS_CALL(rotary_embedding, positions, query, query_stride, num_heads, key, key_stride, num_kv_heads, cos_sin,
          num_tokens, head_dim, rotary_dim);
  return PS_OK;
}

int ps_gated_activation(int activation, float* out, int64_t out_stride, const float* x, int64_t x_stride,
                        int64_t num_rows, int64_t dim) {
  if (const int status = check_activation(activation)) return status;
  PS_CALL(gated_activation, activation, out, out_stride, x, x_stride, num_rows, dim);
  return PS_OK;
}

int ps_activation(int activation, float* out, int64_t out_stride, const float* x, int64_t x_stride, int64_t num_rows,
                  int64_t dim) {
  if (const int status = check_activation(activation)) return status;
  PS_CALL(activation, activation, out, out_stride, x, x_stride, num_rows, dim);
  return PS_OK;
}

int ps_scale(float* x, int64_t x_stride, int64_t num_rows, int64_t dim, float factor) {
  PS_CALL(scale, x, x_stride, num_rows, dim, factor);
  return PS_OK;
}

int ps_soft_cap(float* x, int64_t x_stride, int64_t num_rows, int64_t dim, float cap) {
  if (!(cap > 0)) return fail(PS_INVALID_ARGUMENT, "cap must be above 0");
  PS_CALL(soft_cap, x, x_stride, num_rows, dim, cap);
  return PS_OK;
}

int ps_token_bitmask(float* logits, int64_t logits_stride, int64_t num_rows, int64_t vocab_size, const int64_t* rows,
                     const uint32_t* masks, int64_t masks_stride, int64_t num_masked) {
  for (int64_t i = 0; i < num_masked; ++i) {
    if (rows[i] < 0 || rows[i] >= num_rows) {
      return fail(PS_INVALID_ARGUMENT, "rows[%lld] is %lld of %lld", (long long)i, (long long)rows[i],
                  (long long)num_rows);
    }
  }
  PS_CALL(token_bitmask, logits, logits_stride, vocab_size, rows, masks, masks_stride, num_masked);
  return PS_OK;
}

int ps_add(float* x, int64_t x_stride, const float* y, int64_t y_stride, int64_t num_rows, int64_t dim) {
  PS_CALL(add, x, x_stride, y, y_stride, num_rows, dim);
  return PS_OK;
}

int ps_embedding(float* out, int64_t out_stride, const void* table, int64_t table_stride, int64_t table_rows,
                 int dtype, const int64_t* row_ids, int64_t num_rows, int64_t dim) {
  if (dtype < PS_F32 || dtype > PS_F16) return fail(PS_INVALID_ARGUMENT, "unknown dtype %d", dtype);
  for (int64_t i = 0; i < num_rows; ++i) {
    if (row_ids[i] < 0 || row_ids[i] >= table_rows) {
      return fail(PS_INVALID_ARGUMENT, "row_ids[%lld] is %lld, the table has %lld rows", (long long)i,
                  (long long)row_ids[i], (long long)table_rows);
    }
  }
  PS_CALL(embedding, out, out_stride, table, table_stride, dtype, row_ids, num_rows, dim);
  return PS_OK;
}

int ps_write_kv(const ps_kv_cache* kv_cache, const float* key, int64_t key_stride, const float* value,
                int64_t value_stride, const int64_t* slot_mapping, int64_t num_tokens) {
  if (const int status = check_kv_cache(kv_cache)) return status;
  if (const int status = check_slots(slot_mapping, num_tokens, kv_cache->num_blocks * kv_cache->block_size)) {
    return status;
  }
  PS_CALL(write_kv, *kv_cache, key, key_stride, value, value_stride, slot_mapping, num_tokens);
  return PS_OK;
}

int ps_paged_attention(float* out, int64_t out_stride, const float* query, int64_t query_stride, int64_t num_heads,
                       const ps_kv_cache* kv_cache, const ps_attention_rows* rows, float scale, int64_t window,
                       float soft_cap) {
  if (const int status = check_kv_cache(kv_cache)) return status;
  if (num_heads < 1 || num_heads % kv_cache->num_kv_heads != 0) {
    return fail(PS_INVALID_ARGUMENT, "%lld query heads cannot share %lld KV heads", (long long)num_heads,
                (long long)kv_cache->num_kv_heads);
  }
  if (window < 0 || !(soft_cap >= 0)) return fail(PS_INVALID_ARGUMENT, "window and soft_cap must not be negative");
  if (const int status = check_rows(rows, kv_cache, window)) return status;
  int status = PS_OK;
  PS_CALL(paged_attention, out, out_stride, query, query_stride, num_heads, *kv_cache, *rows, scale, window,
          soft_cap, &status);
  return status;
}

int ps_rotary_attention(float* out, int64_t out_stride, float* qkv, int64_t qkv_stride, int64_t num_heads,
                        const int64_t* positions, const float* cos_sin, int64_t max_position, int64_t rotary_dim,
                        const int64_t* slot_mapping, const ps_kv_cache* kv_cache, const ps_attention_rows* rows,
                        float scale, int64_t window, float soft_cap) {
  float* key = qkv + num_heads * kv_cache->head_dim;
  const float* value = key + kv_cache->num_kv_heads * kv_cache->head_dim;
  int status = ps_rotary_embedding(positions, qkv, qkv_stride, num_heads, key, qkv_stride, kv_cache->num_kv_heads,
                                   cos_sin, max_position, rows->num_tokens, kv_cache->head_dim, rotary_dim);
  if (status != PS_OK) return status;
  status = ps_write_kv(kv_cache, key, qkv_stride, value, qkv_stride, slot_mapping, rows->num_tokens);
  if (status != PS_OK) return status;
  return ps_paged_attention(out, out_stride, qkv, qkv_stride, num_heads, kv_cache, rows, scale, window, soft_cap);
}

int ps_sample(const float* logits, int64_t logits_stride, int64_t num_rows, int64_t vocab, const float* temperature,
              const float* min_p, const int64_t* top_k, const double* top_p, const double* uniform,
              int64_t* token_ids) {
  if (vocab < 1 || vocab > INT32_MAX) return fail(PS_INVALID_ARGUMENT, "a vocabulary of %lld", (long long)vocab);
  int status = PS_OK;
  PS_CALL(sample, logits, logits_stride, num_rows, vocab, temperature, min_p, top_k, top_p, uniform, token_ids,
          &status);
  return status;
}

int ps_copy_blocks(void* dst_pool, int64_t dst_num_blocks, const void* src_pool, int64_t src_num_blocks,
                   int64_t block_bytes, const int64_t* pairs, int64_t num_pairs) {
  for (int64_t i = 0; i < num_pairs; ++i) {
    const int64_t src = pairs[2 * i], dst = pairs[2 * i + 1];
    if (src < 0 || src >= src_num_blocks || dst < 0 || dst >= dst_num_blocks) {
      return fail(PS_INVALID_ARGUMENT, "pair %lld copies block %lld of %lld to block %lld of %lld", (long long)i,
                  (long long)src, (long long)src_num_blocks, (long long)dst, (long long)dst_num_blocks);
    }
  }
  // Each thread copies its slice of every pair, in order: a later pair may read what an earlier one wrote.
  const int64_t num_slices = (block_bytes + kCopyBytes - 1) / kCopyBytes;
  ps::parallel_for(num_slices, 1, [&](int64_t begin, int64_t end, int) {
    const int64_t first = begin * kCopyBytes;
    const int64_t last = end * kCopyBytes < block_bytes ? end * kCopyBytes : block_bytes;
    for (int64_t i = 0; i < num_pairs; ++i) {
      std::memmove(static_cast<char*>(dst_pool) + pairs[2 * i + 1] * block_bytes + first,
                   static_cast<const char*>(src_pool) + pairs[2 * i] * block_bytes + first, last - first);
    }
  });
  return PS_OK;
}

}  // extern "C"
