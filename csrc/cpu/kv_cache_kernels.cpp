// Scatters this step's keys and values into their blocks; K is kept transposed within a block, so that the
// scores of neighbouring tokens lie in one register (see attention_kernels.cpp). An 8-bit cache holds
// codes of one scale per token and head: x ~ scale * code, scale = largest magnitude / 127. An fp16 cache is held within
// the range of fp16: an infinite key or value would turn every later answer of its sequence into NaN.
#include "kernels.h"
#include "thread_pool.h"
#include "vec.h"

namespace ps {
namespace PS_ISA {
namespace {

constexpr int64_t kGrain = 16;  // (token, KV head) pairs

constexpr int kPiece = 16;  // numbers that are narrowed at once

// kPiece numbers, fewer at the end of a head, as the cache holds them.
void narrow(const float* x, int count, float* out) { std::memcpy(out, x, count * sizeof(float)); }

void narrow(const float* x, int count, bf16* out) {
  for (int i = 0; i < count; ++i) from_float(x[i], &out[i]);
}

void narrow(const float* x, int count, f16* out) {
  const Vec lowest = set1(-65504.f), highest = set1(65504.f);
  int i = 0;
  for (; i + kWidth <= count; i += kWidth) store(out + i, min(highest, max(lowest, load(x + i))));
  if (i < count) {
    alignas(64) float rest[kWidth];
    store(rest, min(highest, max(lowest, load_partial(x + i, count - i))));
    for (int j = 0; i < count; ++i, ++j) from_float(rest[j], &out[i]);
  }
}

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
      for (int64_t d = 0; d < kv.head_dim; d += kPiece) {
        const int count = static_cast<int>(kv.head_dim - d < kPiece ? kv.head_dim - d : kPiece);
        T piece[kPiece];
        narrow(from_k + d, count, piece);
        for (int i = 0; i < count; ++i) k[(d + i) * kv.block_size + offset] = piece[i];
        narrow(from_v + d, count, v + offset * kv.head_dim + d);
      }
    }
  });
}

// The codes of one token's head, `stride` apart, and their scale. NaN or inf gives the scale NaN; numbers that are
// all below 1e-33 count as zero, for 127 / limit would overflow.
void write_codes(const float* x, int64_t head_dim, int8_t* codes, int64_t stride, float* scale) {
  uint32_t bits = 0;
  for (int64_t d = 0; d < head_dim; ++d) {
    const uint32_t magnitude = bits_of(x[d]) & 0x7fffffff;
    bits = magnitude > bits ? magnitude : bits;
  }
  const float limit = float_of(bits);
  const bool finite = bits < 0x7f800000, some = finite && limit > 1e-33f;
  *scale = some ? limit / 127.f : finite ? 0.f : __builtin_nanf("");
  const float inverse = some ? 127.f / limit : 0.f;
  for (int64_t d = 0; d < head_dim; ++d) {
    const float rounded = some ? (x[d] * inverse + 12582912.f) - 12582912.f : 0.f;  // to nearest even
    codes[d * stride] = static_cast<int8_t>(static_cast<int32_t>(rounded));
  }
}

void write_int8(const ps_kv_cache& kv, const float* key, int64_t key_stride, const float* value, int64_t value_stride,
                const int64_t* slot_mapping, int64_t num_tokens) {
  const int64_t num_codes = kv.head_dim * kv.block_size;
  const int64_t head_size = num_codes + kv.block_size * static_cast<int64_t>(sizeof(float));
  parallel_for(num_tokens * kv.num_kv_heads, kGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t token = item / kv.num_kv_heads, head = item % kv.num_kv_heads;
      const int64_t slot = slot_mapping[token];
      if (slot < 0) continue;
      const int64_t block = slot / kv.block_size, offset = slot % kv.block_size;
      int8_t* k = static_cast<int8_t*>(kv.data) + block * kv.block_stride + head * head_size;
      int8_t* v = k + kv.num_kv_heads * head_size;
      write_codes(key + token * key_stride + head * kv.head_dim, kv.head_dim, k + offset, kv.block_size,
                  reinterpret_cast<float*>(k + num_codes) + offset);
      write_codes(value + token * value_stride + head * kv.head_dim, kv.head_dim, v + offset * kv.head_dim, 1,
                  reinterpret_cast<float*>(v + num_codes) + offset);
    }
  });
}

}  // namespace

void write_kv(const ps_kv_cache& kv_cache, const float* key, int64_t key_stride, const float* value,
              int64_t value_stride, const int64_t* slot_mapping, int64_t num_tokens) {
  switch (kv_cache.dtype) {
    case PS_F32: return write<float>(kv_cache, key, key_stride, value, value_stride, slot_mapping, num_tokens);
    case PS_BF16: return write<bf16>(kv_cache, key, key_stride, value, value_stride, slot_mapping, num_tokens);
    case PS_I8: return write_int8(kv_cache, key, key_stride, value, value_stride, slot_mapping, num_tokens);
    default: return write<f16>(kv_cache, key, key_stride, value, value_stride, slot_mapping, num_tokens);
  }
}

}  // namespace PS_ISA
}  // namespace ps
