// Which experts a token goes to: the largest logits, and their shares of a softmax over all.
#include "experts.h"
#include "scratch.h"
#include "thread_pool.h"
#include "vec.h"

namespace ps {
namespace PS_ISA {
namespace {

constexpr int64_t kGrainLogits = 1024;

// Larger logits have larger keys, of equal ones the first; NaN has the largest.
static inline uint64_t key_of(float logit, int64_t expert) {
  const uint32_t bits = bits_of(logit + 0.f);  // one zero, not two
  uint32_t order = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  if ((bits & 0x7fffffffu) > 0x7f800000u) order = 0xffffffffu;
  return static_cast<uint64_t>(order) << 32 | (0xffffffffu - static_cast<uint32_t>(expert));
}

// keys and shares: working memory of num_experts.
void route_row(float* weights, int64_t* chosen, const float* logits, int64_t num_experts, int64_t top_k,
               bool renormalize, uint64_t* keys, float* shares) {
  for (int64_t i = 0; i < num_experts; ++i) keys[i] = key_of(logits[i], i);
  for (int64_t rank = 0; rank < top_k; ++rank) {
    uint64_t best = 0;
    for (int64_t i = 0; i < num_experts; ++i) best = keys[i] > best ? keys[i] : best;
    chosen[rank] = static_cast<int64_t>(0xffffffffu - static_cast<uint32_t>(best));
    keys[chosen[rank]] = 0;
  }
  const Vec largest = set1(logits[chosen[0]]);
  Vec sums = zero();
  int64_t i = 0;
  for (; i + kWidth <= num_experts; i += kWidth) {
    const Vec share = exp(load(logits + i) - largest);
    store(shares + i, share);
    sums = sums + share;
  }
  if (i < num_experts) {
    const int tail = static_cast<int>(num_experts - i);
    const Vec share = keep_lanes(exp(load_partial(logits + i, tail) - largest), 0, tail, 0.f);
    store_partial(shares + i, share, tail);
    sums = sums + share;
  }
  float total = reduce_add(sums);
  if (renormalize) {
    total = 0.f;
    for (int64_t rank = 0; rank < top_k; ++rank) total += shares[chosen[rank]];
  }
  for (int64_t rank = 0; rank < top_k; ++rank) weights[rank] = shares[chosen[rank]] / total;
}

}  // namespace

void route(float* weights, int64_t* chosen, const float* logits, int64_t logits_stride, int64_t num_rows,
           int64_t num_experts, int64_t top_k, bool renormalize, int* status) {
  const int64_t grain = kGrainLogits / num_experts + 1;
  parallel_for(num_rows, grain, [&](int64_t begin, int64_t end, int) {
    auto* keys = static_cast<uint64_t*>(thread_scratch(kScratchPiece, static_cast<size_t>(num_experts) * 12));
    if (keys == nullptr) {
      __atomic_store_n(status, PS_OUT_OF_MEMORY, __ATOMIC_RELAXED);
      return;
    }
    for (int64_t row = begin; row < end; ++row) {
      route_row(weights + row * top_k, chosen + row * top_k, logits + row * logits_stride, num_experts, top_k,
                renormalize, keys, reinterpret_cast<float*>(keys + num_experts));
    }
  });
}

}  // namespace PS_ISA
}  // namespace ps
