// Rotary position embedding (Su et al. 2021, arXiv 2104.09864), the half-against-half pairing of GPT-NeoX.
#include "kernels.h"
#include "thread_pool.h"
#include "vec.h"

namespace ps {
namespace PS_ISA {
namespace {

constexpr int64_t kGrain = 16;  // tokens

void rotate_heads(float* token, int64_t num_heads, int64_t head_dim, const float* cos, const float* sin,
                  int64_t half) {
  const int64_t whole = half - half % kWidth;
  const int tail = static_cast<int>(half - whole);
  for (int64_t head = 0; head < num_heads; ++head) {
    float* first = token + head * head_dim;
    float* second = first + half;
    for (int64_t i = 0; i < whole; i += kWidth) {
      const Vec c = load(cos + i), s = load(sin + i), a = load(first + i), b = load(second + i);
      store(first + i, a * c - b * s);
      store(second + i, b * c + a * s);
    }
    if (tail > 0) {
      const Vec c = load_partial(cos + whole, tail), s = load_partial(sin + whole, tail);
      const Vec a = load_partial(first + whole, tail), b = load_partial(second + whole, tail);
      store_partial(first + whole, a * c - b * s, tail);
      store_partial(second + whole, b * c + a * s, tail);
    }
  }
}

}  // namespace

void rotary_embedding(const int64_t* positions, float* query, int64_t query_stride, int64_t num_heads, float* key,
                      int64_t key_stride, int64_t num_kv_heads, const float* cos_sin, int64_t num_tokens,
                      int64_t head_dim, int64_t rotary_dim) {
  const int64_t half = rotary_dim / 2;
  parallel_for(num_tokens, kGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t token = begin; token < end; ++token) {
      const float* cos = cos_sin + positions[token] * rotary_dim;
      const float* sin = cos + half;
      rotate_heads(query + token * query_stride, num_heads, head_dim, cos, sin, half);
      if (key != nullptr) rotate_heads(key + token * key_stride, num_kv_heads, head_dim, cos, sin, half);
    }
  });
}

}  // namespace PS_ISA
}  // namespace ps
