#include "decode_fma.cuh"
#include "decode_launch.cuh"

namespace ps {

DecodeKernel find_decode_f32([[maybe_unused]] int head_dim) {
#if PS_HEAD_DIM_64
  if (head_dim == 64) return decode_kernel<decode_fma<64>, FmaDecode<64>::kSharedBytes>();
#endif
#if PS_HEAD_DIM_80
  if (head_dim == 80) return decode_kernel<decode_fma<80>, FmaDecode<80>::kSharedBytes>();
#endif
#if PS_HEAD_DIM_96
  if (head_dim == 96) return decode_kernel<decode_fma<96>, FmaDecode<96>::kSharedBytes>();
#endif
#if PS_HEAD_DIM_128
  if (head_dim == 128) return decode_kernel<decode_fma<128>, FmaDecode<128>::kSharedBytes>();
#endif
#if PS_HEAD_DIM_256
  if (head_dim == 256) return decode_kernel<decode_fma<256>, FmaDecode<256>::kSharedBytes>();
#endif
  return {};
}

}  // namespace ps
