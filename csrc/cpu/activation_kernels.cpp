// Activations: SiLU (Elfwing et al. 2018), GELU (Hendrycks and Gimpel 2016), ReLU; alone, or times the other half.
#include "kernels.h"
#include "thread_pool.h"
#include "vec.h"

namespace ps {
namespace PS_ISA {
namespace {

constexpr int64_t kGrainElements = 8192;

struct Silu {
  PS_INLINE Vec apply(Vec x) { return x / (set1(1.f) + exp(zero() - x)); }
};

struct GeluTanh {
  // 0.5 x (1 + tanh(u)) = x / (1 + e^(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3)
  PS_INLINE Vec apply(Vec x) {
    const Vec u = set1(0.7978845608f) * fma(set1(0.044715f) * x * x, x, x);
    return x / (set1(1.f) + exp(set1(-2.f) * u));
  }
};

struct GeluErf {
  // erfc by Abramowitz and Stegun 7.1.26, |error| < 1.5e-7
  PS_INLINE Vec apply(Vec x) {
    const Vec z = abs(x) * set1(0.70710678118f);
    const Vec t = set1(1.f) / fma(set1(0.3275911f), z, set1(1.f));
    Vec p = set1(1.061405429f);
    p = fma(p, t, set1(-1.453152027f));
    p = fma(p, t, set1(1.421413741f));
    p = fma(p, t, set1(-0.284496736f));
    p = fma(p, t, set1(0.254829592f));
    const Vec erf = set1(1.f) - p * t * exp(zero() - z * z);
    return set1(0.5f) * x * (set1(1.f) + copy_sign(erf, x));
  }
};

struct Relu {
  PS_INLINE Vec apply(Vec x) { return max(zero(), x); }  // x where it is NaN
};

// Elements [first, last) of one row; up is the other half of a gated activation, or null.
template <class Activation, bool kGated>
PS_INLINE void run_piece(float* out, const float* x, const float* up, int64_t first, int64_t last) {
  int64_t i = first;
  for (; i + kWidth <= last; i += kWidth) {
    const Vec y = Activation::apply(load(x + i));
    store(out + i, kGated ? y * load(up + i) : y);
  }
  if (i < last) {
    const int tail = static_cast<int>(last - i);
    const Vec y = Activation::apply(load_partial(x + i, tail));
    store_partial(out + i, kGated ? y * load_partial(up + i, tail) : y, tail);
  }
}

template <class Activation, bool kGated>
void run(float* out, int64_t out_stride, const float* x, int64_t x_stride, int64_t num_rows, int64_t dim) {
  const int64_t num_pieces = (dim + kGrainElements - 1) / kGrainElements;  // of one row
  const int64_t grain = dim >= kGrainElements ? 1 : kGrainElements / dim;
  parallel_for(num_rows * num_pieces, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t row = piece / num_pieces;
      const int64_t first = piece % num_pieces * kGrainElements;
      const int64_t last = first + kGrainElements < dim ? first + kGrainElements : dim;
      const float* from = x + row * x_stride;
      run_piece<Activation, kGated>(out + row * out_stride, from, from + dim, first, last);
    }
  });
}

template <bool kGated>
void choose(int activation, float* out, int64_t out_stride, const float* x, int64_t x_stride, int64_t num_rows,
            int64_t dim) {
  switch (activation) {
    case PS_SILU: return run<Silu, kGated>(out, out_stride, x, x_stride, num_rows, dim);
    case PS_GELU_TANH: return run<GeluTanh, kGated>(out, out_stride, x, x_stride, num_rows, dim);
    case PS_RELU: return run<Relu, kGated>(out, out_stride, x, x_stride, num_rows, dim);
    default: return run<GeluErf, kGated>(out, out_stride, x, x_stride, num_rows, dim);
  }
}

}  // namespace

void gated_activation(int activation, float* out, int64_t out_stride, const float* x, int64_t x_stride,
                      int64_t num_rows, int64_t dim) {
  choose<true>(activation, out, out_stride, x, x_stride, num_rows, dim);
}

void activation(int activation, float* out, int64_t out_stride, const float* x, int64_t x_stride, int64_t num_rows,
                int64_t dim) {
  choose<false>(activation, out, out_stride, x, x_stride, num_rows, dim);
}

}  // namespace PS_ISA
}  // namespace ps
