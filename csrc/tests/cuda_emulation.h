// csrc/cuda on a CPU: the same sources, compiled by a C++ compiler. Each CUDA thread is a fiber; what a warp or a block
// does together happens when its last thread arrives. The order in which threads run between two such points can be
// chosen, copies by cp.async land as late (or as early) as they may, and what is read too early reads as NaN: races show
// as different numbers. Everything a kernel may ask of the machine is in cuda/device.cuh; this is its other half.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float max(float a, float b) { return std::fmax(a, b); }
using std::fmaxf;

// ---- the parts of the CUDA runtime that csrc/cuda calls ----

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoDevice = 100
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
enum cudaMemcpyKind { cudaMemcpyDefault };
using cudaStream_t = void*;

inline const char* cudaGetErrorString(cudaError_t) { return "an emulated failure"; }
inline cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 2, cudaSuccess; }
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* ctas, const void*, int, size_t) {
  return *ctas = 2, cudaSuccess;
}
inline cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int bytes) {
  return bytes <= 232448 ? cudaSuccess : cudaErrorInvalidValue;  // 227 KiB, an H100's most
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

// ---- threads ----

namespace ps::emulation {

// Where the running fiber is.
struct Place {
  dim3 thread, block, grid, threads;
};
extern Place g_place;

// Runs `body` once for each thread of a CTA, for each CTA of the grid, with exactly `shared_bytes` of poisoned memory.
void run_grid(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& body);
unsigned char* shared_memory();

// Hands `operands` in; when all 32 lanes have, `compute` gets those of lanes 0 .. 31 and everyone goes on. Ends the
// process where the lanes of a warp do not do the same.
void together(void* operands, void (*compute)(void* const (&operands)[32]));
void sync_block();

void copy_async(uint64_t to, const void* from, int bytes, bool valid);
void copy_async_commit();
void copy_async_wait(int pending);

}  // namespace ps::emulation

#define threadIdx (ps::emulation::g_place.thread)
#define blockIdx (ps::emulation::g_place.block)
#define gridDim (ps::emulation::g_place.grid)

namespace ps::device {

using SharedAddress = uint64_t;

inline unsigned char* shared_memory() { return emulation::shared_memory(); }
inline SharedAddress shared_address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }
inline void copy_async_16(SharedAddress to, const void* from, bool valid) { emulation::copy_async(to, from, 16, valid); }
inline void copy_async_4(SharedAddress to, const void* from, bool valid) { emulation::copy_async(to, from, 4, valid); }
inline void copy_async_commit() { emulation::copy_async_commit(); }
template <int pending>
void copy_async_wait() {
  emulation::copy_async_wait(pending);
}

void load_matrix_x4(uint32_t (&r)[4], SharedAddress row);
void load_matrix_x2(uint32_t (&r)[2], SharedAddress row);
void load_matrix_x4_transposed(uint32_t (&r)[4], SharedAddress row);
void load_matrix_x2_transposed(uint32_t (&r)[2], SharedAddress row);
uint32_t transpose_matrix(uint32_t x);
void multiply_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
void multiply_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
uint32_t pack_bf16(float low, float high);
uint32_t pack_f16(float low, float high);
uint32_t subtract_f16(uint32_t x, uint32_t y);
uint32_t multiply_pair_f16(uint32_t x, uint32_t y);
uint32_t multiply_pair_bf16(uint32_t x, uint32_t y);
uint32_t pick_bytes(uint32_t x, uint32_t y, uint32_t selector);
int shuffle_from(int x, int lane);  // the x of that lane

inline float as_float(uint32_t bits) {
  float x;
  return std::memcpy(&x, &bits, 4), x;
}
inline uint32_t as_bits(float x) {
  uint32_t bits;
  return std::memcpy(&bits, &x, 4), bits;
}
inline float exp2_approx(float x) { return std::exp2(x); }
inline float reciprocal_approx(float x) { return 1.0f / x; }
inline int lane() { return threadIdx.x % 32; }
inline int shuffle_xor(int x, int mask) { return shuffle_from(x, lane() ^ mask); }
inline float shuffle_xor(float x, int mask) { return as_float(shuffle_from(static_cast<int>(as_bits(x)), lane() ^ mask)); }
inline int shuffle(int x, int from) { return shuffle_from(x, from % 32); }
inline int shuffle_up(int x, int delta) { return shuffle_from(x, lane() < delta ? lane() : lane() - delta); }
inline void sync_warp() { shuffle_from(0, 0); }
inline void sync_block() { emulation::sync_block(); }
inline void fence_device() {}
inline int atomic_add(int* where, int value) {
  const int before = *where;
  return *where = before + value, before;
}
inline float4 load_past_l1(const float4* from) { return *from; }
inline float2 load_past_l1(const float2* from) { return *from; }

template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t,
                   Arguments... arguments) {
  emulation::run_grid(grid, block, shared_bytes, [&] { kernel(arguments...); });
  return cudaSuccess;
}

}  // namespace ps::device
