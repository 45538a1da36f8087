#include "decode_mma_launch.cuh"

namespace ps {

DecodeKernel find_decode_bf16_f8(int head_dim, int row_tile) { return find_decode<BFloat16, Float8E4M3<BFloat16>>(head_dim, row_tile); }

}  // namespace ps
