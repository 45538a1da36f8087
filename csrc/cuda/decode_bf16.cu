#include "decode_mma_launch.cuh"

namespace ps {

DecodeKernel find_decode_bf16(int head_dim, int row_tile) { return find_decode<BFloat16, Same<BFloat16>>(head_dim, row_tile); }

}  // namespace ps
