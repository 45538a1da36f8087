// Scatters this step's keys and values into their blocks; K is kept transposed within a block, so that the
// scores of neighbouring tokens lie in one register (see attention_kernels.cpp).
#include "kernels.h"
#include "thread_pool.h"
#include "vec.h"

namespace ps {
namespace PS_ISA {
namespace {

constexpr int64_t kGrain = 16;  // (token, KV head) pairs

template <class T>
void write(const ps_kv_cache& kv, const float* key, int64_t key_stride, const float* value, int64_t value_stride,
           const int64_t* slot_mapping, int64_t num_tokens) {
  const int64_t head_size = kv.head_dim * kv.block_size;
  parallel_for(num_tokens * kv.num_kv_heads, kGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t token = item / kv.num_kv_heads, head = item % kv.num_kv_heads;
      const int64_t slot = slot_mapping[token];
      if (slot < 0) continue;
      const int64_t block = slot / kv.block_size, offset = slot % kv.block_size;
      T* k = static_cast<T*>(kv.data) + block * kv.block_stride + head * head_size;
      T* v = k + kv.num_kv_heads * head_size;
      const float* from_k = key + token * key_stride + head * kv.head_dim;
      const float* from_v = value + token * value_stride + head * kv.head_dim;
      for (int64_t d = 0; d < kv.head_dim; ++d) from_float(from_k[d], &k[d * kv.block_size + offset]);
      for (int64_t d = 0; d < kv.head_dim; ++d) from_float(from_v[d], &v[offset * kv.head_dim + d]);
    }
  });
}

}  // namespace

void write_kv(const ps_kv_cache& kv_cache, const float* key, int64_t key_stride, const float* value,
              int64_t value_stride, const int64_t* slot_mapping, int64_t num_tokens) {
  switch (kv_cache.dtype) {
    case PS_F32: return write<float>(kv_cache, key, key_stride, value, value_stride, slot_mapping, num_tokens);
    case PS_BF16: return write<bf16>(kv_cache, key, key_stride, value, value_stride, slot_mapping, num_tokens);
    default: return write<f16>(kv_cache, key, key_stride, value, value_stride, slot_mapping, num_tokens);
  }
}

}  // namespace PS_ISA
}  // namespace ps
