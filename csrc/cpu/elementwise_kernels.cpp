// What models do to single numbers between their layers: scale, cap, add; and rows of an embedding table.
#include "kernels.h"
#include "thread_pool.h"
#include "vec.h"

namespace ps {
namespace PS_ISA {
namespace {

constexpr int64_t kGrainElements = 16384;

// x[row, i] = f(x[row, i], y[row, i]); y may be null where f does not look at it.
template <class F>
void for_each(float* x, int64_t x_stride, const float* y, int64_t y_stride, int64_t num_rows, int64_t dim, F f) {
  const int64_t num_pieces = (dim + kGrainElements - 1) / kGrainElements;  // of one row
  const int64_t grain = dim >= kGrainElements ? 1 : kGrainElements / dim;
  parallel_for(num_rows * num_pieces, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t row = piece / num_pieces;
      const int64_t first = piece % num_pieces * kGrainElements;
      const int64_t last = first + kGrainElements < dim ? first + kGrainElements : dim;
      float* to = x + row * x_stride;
      const float* other = y != nullptr ? y + row * y_stride : to;
      int64_t i = first;
      for (; i + kWidth <= last; i += kWidth) store(to + i, f(load(to + i), load(other + i)));
      if (i < last) {
        const int tail = static_cast<int>(last - i);
        store_partial(to + i, f(load_partial(to + i, tail), load_partial(other + i, tail)), tail);
      }
    }
  });
}

// Inlined with a constant count it becomes vector code without branches.
inline void forbid(float* logits, uint32_t allowed, int count) {
  for (int bit = 0; bit < count; ++bit) {
    const float value = logits[bit];
    logits[bit] = (allowed & (1u << bit)) != 0 ? value : -__builtin_inff();
  }
}

template <class T>
void copy_rows(float* out, int64_t out_stride, const T* table, int64_t table_stride, const int64_t* row_ids,
               int64_t num_rows, int64_t dim) {
  const int64_t grain = dim >= kGrainElements ? 1 : kGrainElements / dim;
  const int64_t whole = dim - dim % kWidth;
  const int tail = static_cast<int>(dim - whole);
  parallel_for(num_rows, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      const T* from = table + row_ids[row] * table_stride;
      float* to = out + row * out_stride;
      for (int64_t i = 0; i < whole; i += kWidth) store(to + i, load(from + i));
      if (tail > 0) store_partial(to + whole, load_partial(from + whole, tail), tail);
    }
  });
}

}  // namespace

void scale(float* x, int64_t x_stride, int64_t num_rows, int64_t dim, float factor) {
  const Vec by = set1(factor);
  for_each(x, x_stride, nullptr, 0, num_rows, dim, [&](Vec a, Vec) { return a * by; });
}

void token_bitmask(float* logits, int64_t logits_stride, int64_t vocab_size, const int64_t* rows,
                   const uint32_t* masks, int64_t masks_stride, int64_t num_masked) {
  constexpr int64_t kGrainWords = kGrainElements / 32;
  const int64_t num_words = (vocab_size + 31) / 32;
  const int64_t num_pieces = (num_words + kGrainWords - 1) / kGrainWords;  // of one row
  parallel_for(num_masked * num_pieces, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t i = piece / num_pieces;
      const int64_t first = piece % num_pieces * kGrainWords;
      const int64_t last = first + kGrainWords < num_words ? first + kGrainWords : num_words;
      float* row = logits + rows[i] * logits_stride;
      for (int64_t word = first; word < last; ++word) {
        const uint32_t bits = masks[i * masks_stride + word];
        float* to = row + 32 * word;
        const int64_t count = vocab_size - 32 * word;
        if (bits == 0xffffffffu) continue;
        if (count >= 32) {
          forbid(to, bits, 32);
        } else {
          forbid(to, bits, static_cast<int>(count));
        }
      }
    }
  });
}

void soft_cap(float* x, int64_t x_stride, int64_t num_rows, int64_t dim, float cap) {
  // tanh(u) = 1 - 2 / (1 + e^(2u))
  const Vec one = set1(1.f), two = set1(2.f), limit = set1(cap), twice = set1(2.f / cap);
  for_each(x, x_stride, nullptr, 0, num_rows, dim,
           [&](Vec a, Vec) { return limit * (one - two / (one + exp(twice * a))); });
}

void add(float* x, int64_t x_stride, const float* y, int64_t y_stride, int64_t num_rows, int64_t dim) {
  for_each(x, x_stride, y, y_stride, num_rows, dim, [](Vec a, Vec b) { return a + b; });
}

void embedding(float* out, int64_t out_stride, const void* table, int64_t table_stride, int dtype,
               const int64_t* row_ids, int64_t num_rows, int64_t dim) {
  switch (dtype) {
    case PS_BF16:
      return copy_rows(out, out_stride, static_cast<const bf16*>(table), table_stride, row_ids, num_rows, dim);
    case PS_F16:
      return copy_rows(out, out_stride, static_cast<const f16*>(table), table_stride, row_ids, num_rows, dim);
    default:
      return copy_rows(out, out_stride, static_cast<const float*>(table), table_stride, row_ids, num_rows, dim);
  }
}

}  // namespace PS_ISA
}  // namespace ps
