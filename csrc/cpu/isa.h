// Which instruction set's kernels run. Kernels are declared once per set by PS_FOR_EACH_ISA and called by PS_CALL.
#pragma once

namespace ps {

enum class Isa { kScalar, kAvx2, kAvx512, kNeon };

Isa current_isa();
// Whether AMX tiles may be used beside the AVX-512 kernels.
bool uses_amx();

}  // namespace ps

#ifdef PS_HAVE_AVX2
#define PS_IF_AVX2(...) __VA_ARGS__
#else
#define PS_IF_AVX2(...)
#endif
#ifdef PS_HAVE_AVX512
#define PS_IF_AVX512(...) __VA_ARGS__
#else
#define PS_IF_AVX512(...)
#endif
#ifdef PS_HAVE_NEON
#define PS_IF_NEON(...) __VA_ARGS__
#else
#define PS_IF_NEON(...)
#endif

// PS_FOR_EACH_ISA(void f(int);) declares ps::scalar::f, ps::avx2::f ... .
#define PS_FOR_EACH_ISA(...)                  \
  namespace scalar {                          \
  __VA_ARGS__                                 \
  }                                           \
  PS_IF_AVX2(namespace avx2{__VA_ARGS__})     \
  PS_IF_AVX512(namespace avx512{__VA_ARGS__}) \
  PS_IF_NEON(namespace neon{__VA_ARGS__})

// PS_CALL(f, args...) calls the f of the current instruction set.
#define PS_CALL(function, ...)                                              \
  do {                                                                      \
    switch (::ps::current_isa()) {                                          \
      PS_IF_AVX2(case ::ps::Isa::kAvx2 : ::ps::avx2::function(__VA_ARGS__); break;)       \
      PS_IF_AVX512(case ::ps::Isa::kAvx512 : ::ps::avx512::function(__VA_ARGS__); break;) \
      PS_IF_NEON(case ::ps::Isa::kNeon : ::ps::neon::function(__VA_ARGS__); break;)       \
      default: ::ps::scalar::function(__VA_ARGS__);                               \
    }                                                                       \
  } while (false)
