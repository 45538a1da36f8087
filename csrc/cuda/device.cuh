// What kernels need of the machine: each function is one or a few PTX instructions in an nvcc build, and an exact
// stand-in where the same sources are compiled for the CPU (tests/cuda_emulation.h).
#pragma once

#include <stdint.h>

#ifdef PS_CUDA_EMULATION
#include "cuda_emulation.h"
#else
#include <cuda_runtime.h>

namespace ps::device {

using SharedAddress = uint32_t;

__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ __align__(128) unsigned char memory[];
  return memory;
}

__device__ __forceinline__ SharedAddress shared_address(const void* pointer) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory, past L1; zeros where !valid (nothing is read then).
__device__ __forceinline__ void copy_async_16(SharedAddress to, const void* from, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_async_4(SharedAddress to, const void* from, bool valid) {
  const int bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` of this thread's groups are on their way.
template <int pending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Four (two) 8x8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8; it gets elements
// 2 * (l % 4) and the next of row l / 4 of each.
__device__ __forceinline__ void load_matrix_x4(uint32_t (&r)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

__device__ __forceinline__ void load_matrix_x2(uint32_t (&r)[2], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(row)
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t (&r)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

__device__ __forceinline__ void load_matrix_x2_transposed(uint32_t (&r)[2], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(row)
               : "memory");
}

// An 8x8 matrix of 16-bit elements, held as load_matrix gives it, transposed.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// d += a @ b: a [16, 16], b [16, 8] of 16-bit floats, d [16, 8] fp32.
__device__ __forceinline__ void multiply_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void multiply_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two floats, rounded to nearest even; `low` in the lower half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}

__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
  uint32_t x;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}

// Pairs of 16-bit floats: x - y and x * y, each half for itself.
__device__ __forceinline__ uint32_t subtract_f16(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

__device__ __forceinline__ uint32_t multiply_pair_f16(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

__device__ __forceinline__ uint32_t multiply_pair_bf16(uint32_t x, uint32_t y) {
  uint32_t z;
  // A product plus -0: sm_80 has no bf16 multiplication of its own.
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(0x80008000u));
  return z;
}

// Bytes of x (0-3) and y (4-7), chosen by the four nibbles of `selector`, lowest first.
__device__ __forceinline__ uint32_t pick_bytes(uint32_t x, uint32_t y, uint32_t selector) {
  return __byte_perm(x, y, selector);
}

__device__ __forceinline__ float as_float(uint32_t x) { return __uint_as_float(x); }
__device__ __forceinline__ uint32_t as_bits(float x) { return __float_as_uint(x); }

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
__device__ __forceinline__ int shuffle_xor(int x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
__device__ __forceinline__ int shuffle(int x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
__device__ __forceinline__ int shuffle_up(int x, int delta) { return __shfl_up_sync(0xffffffffu, x, delta); }
__device__ __forceinline__ void sync_warp() { __syncwarp(); }
__device__ __forceinline__ void sync_block() { __syncthreads(); }
__device__ __forceinline__ void fence_device() { __threadfence(); }
__device__ __forceinline__ int atomic_add(int* where, int value) { return atomicAdd(where, value); }

// Memory that other CTAs wrote within this launch: past L1, which is not coherent.
__device__ __forceinline__ float4 load_past_l1(const float4* from) { return __ldcg(from); }
__device__ __forceinline__ float2 load_past_l1(const float2* from) { return __ldcg(from); }

template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                   Arguments... arguments) {
  kernel<<<grid, block, shared_bytes, stream>>>(arguments...);
  return cudaGetLastError();
}

}  // namespace ps::device
#endif  // PS_CUDA_EMULATION
