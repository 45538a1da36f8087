// RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467) and LayerNorm (Ba et al. 2016, arXiv 1607.06450), alone or with the
// residual add before it.
#include "kernels.h"
#include "thread_pool.h"
#include "vec.h"

namespace ps {
namespace PS_ISA {
namespace {

// Rows a thread takes at once: about 16k elements, a few microseconds.
int64_t grain_for(int64_t dim) { return dim >= 16384 ? 1 : 16384 / dim; }

// residual += x
PS_INLINE void add_row(float* residual, const float* x, int64_t whole, int tail) {
  for (int64_t i = 0; i < whole; i += kWidth) store(residual + i, load(residual + i) + load(x + i));
  if (tail > 0) {
    store_partial(residual + whole, load_partial(residual + whole, tail) + load_partial(x + whole, tail), tail);
  }
}

void rms_norm_row(float* out, const float* x, float* residual, const float* weight, int64_t dim, float eps) {
  const int64_t whole = dim - dim % kWidth;
  const int tail = static_cast<int>(dim - whole);
  Vec sum0 = zero(), sum1 = zero();
  if (residual != nullptr) {
    add_row(residual, x, whole, tail);
    x = residual;
  }
  int64_t i = 0;
  for (; i + 2 * kWidth <= whole; i += 2 * kWidth) {
    const Vec a = load(x + i), b = load(x + i + kWidth);
    sum0 = fma(a, a, sum0);
    sum1 = fma(b, b, sum1);
  }
  if (i < whole) {
    const Vec a = load(x + i);
    sum0 = fma(a, a, sum0);
  }
  if (tail > 0) {
    const Vec a = load_partial(x + whole, tail);
    sum1 = fma(a, a, sum1);
  }
  const float mean = reduce_add(sum0 + sum1) / static_cast<float>(dim);
  const Vec scale = set1(1.f / __builtin_sqrtf(mean + eps));
  for (i = 0; i < whole; i += kWidth) store(out + i, load(x + i) * scale * load(weight + i));
  if (tail > 0) {
    store_partial(out + whole, load_partial(x + whole, tail) * scale * load_partial(weight + whole, tail), tail);
  }
}

void layer_norm_row(float* out, const float* x, float* residual, const float* weight, const float* bias, int64_t dim,
                    float eps) {
  const int64_t whole = dim - dim % kWidth;
  const int tail = static_cast<int>(dim - whole);
  if (residual != nullptr) {
    add_row(residual, x, whole, tail);
    x = residual;
  }
  Vec sum = zero();
  for (int64_t i = 0; i < whole; i += kWidth) sum = sum + load(x + i);
  if (tail > 0) sum = sum + load_partial(x + whole, tail);
  const Vec mean = set1(reduce_add(sum) / static_cast<float>(dim));
  // Around the mean in a second pass: sums of squares of large numbers would cancel.
  Vec squares = zero();
  for (int64_t i = 0; i < whole; i += kWidth) {
    const Vec centred = load(x + i) - mean;
    squares = fma(centred, centred, squares);
  }
  if (tail > 0) {
    const Vec centred = keep_lanes(load_partial(x + whole, tail) - mean, 0, tail, 0.f);
    squares = fma(centred, centred, squares);
  }
  const Vec scale = set1(1.f / __builtin_sqrtf(reduce_add(squares) / static_cast<float>(dim) + eps));
  for (int64_t i = 0; i < whole; i += kWidth) {
    const Vec offset = bias != nullptr ? load(bias + i) : zero();
    store(out + i, fma((load(x + i) - mean) * scale, load(weight + i), offset));
  }
  if (tail > 0) {
    const Vec offset = bias != nullptr ? load_partial(bias + whole, tail) : zero();
    const Vec centred = (load_partial(x + whole, tail) - mean) * scale;
    store_partial(out + whole, fma(centred, load_partial(weight + whole, tail), offset), tail);
  }
}

}  // namespace

void layer_norm(float* out, int64_t out_stride, const float* x, int64_t x_stride, float* residual,
                int64_t residual_stride, const float* weight, const float* bias, int64_t num_rows, int64_t dim,
                float eps) {
  parallel_for(num_rows, grain_for(dim), [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      layer_norm_row(out + row * out_stride, x + row * x_stride,
                     residual != nullptr ? residual + row * residual_stride : nullptr, weight, bias, dim, eps);
    }
  });
}

void rms_norm(float* out, int64_t out_outer_stride, int64_t out_inner_stride, const float* x,
              int64_t x_outer_stride, int64_t x_inner_stride, float* residual, int64_t residual_stride,
              const float* weight, int64_t num_outer, int64_t num_inner, int64_t dim, float eps) {
  parallel_for(num_outer * num_inner, grain_for(dim), [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t outer = row / num_inner, inner = row % num_inner;
      rms_norm_row(out + outer * out_outer_stride + inner * out_inner_stride,
                   x + outer * x_outer_stride + inner * x_inner_stride,
                   residual != nullptr ? residual + outer * residual_stride : nullptr, weight, dim, eps);
    }
  });
}

}  // namespace PS_ISA
}  // namespace ps
