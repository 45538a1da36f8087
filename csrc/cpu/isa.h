// Which instruction set's kernels run. Kernels are declared once per set by PS_FOR_EACH_ISA and called by PS_CALL.
// Some sets differ from another one in their products of integer weights alone: they have builds of the packed linears, and the
// kernels of that other set, their base, for all else. PS_FOR_EACH_DOT_ISA and PS_CALL_DOT know these too.
#pragma once

namespace ps {

enum class Isa { kScalar, kAvx2, kAvx512, kNeon };
enum class DotIsa { kOfBase, kAmx, kAvx2Vnni, kNeonDotprod, kNeonI8mm };

Isa current_isa();
DotIsa current_dot_isa();

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

#ifdef PS_HAVE_AMX
#define PS_IF_AMX(...) __VA_ARGS__
#else
#define PS_IF_AMX(...)
#endif
#ifdef PS_HAVE_AVX2_VNNI
#define PS_IF_AVX2_VNNI(...) __VA_ARGS__
#else
#define PS_IF_AVX2_VNNI(...)
#endif
#ifdef PS_HAVE_NEON_DOTPROD
#define PS_IF_NEON_DOTPROD(...) __VA_ARGS__
#else
#define PS_IF_NEON_DOTPROD(...)
#endif
#ifdef PS_HAVE_NEON_I8MM
#define PS_IF_NEON_I8MM(...) __VA_ARGS__
#else
#define PS_IF_NEON_I8MM(...)
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

#define PS_FOR_EACH_DOT_ISA(...)                        \
  PS_FOR_EACH_ISA(__VA_ARGS__)                          \
  PS_IF_AMX(namespace amx{__VA_ARGS__})                   \
  PS_IF_AVX2_VNNI(namespace avx2_vnni{__VA_ARGS__})       \
  PS_IF_NEON_DOTPROD(namespace neon_dotprod{__VA_ARGS__}) \
  PS_IF_NEON_I8MM(namespace neon_i8mm{__VA_ARGS__})

#define PS_CALL_DOT(function, ...)                                                                     \
  do {                                                                                                 \
    switch (::ps::current_dot_isa()) {                                                                 \
      PS_IF_AMX(case ::ps::DotIsa::kAmx : ::ps::amx::function(__VA_ARGS__); break;)                           \
      PS_IF_AVX2_VNNI(case ::ps::DotIsa::kAvx2Vnni : ::ps::avx2_vnni::function(__VA_ARGS__); break;)          \
      PS_IF_NEON_DOTPROD(case ::ps::DotIsa::kNeonDotprod : ::ps::neon_dotprod::function(__VA_ARGS__); break;) \
      PS_IF_NEON_I8MM(case ::ps::DotIsa::kNeonI8mm : ::ps::neon_i8mm::function(__VA_ARGS__); break;)          \
      default: PS_CALL(function, __VA_ARGS__);                                                         \
    }                                                                                                  \
  } while (false)
