#include "decode_mma_launch.cuh"

namespace ps {

DecodeKernel find_decode_f16_f8(int head_dim, int row_tile) { return find_decode<Half, Float8E4M3<Half>>(head_dim, row_tile); }

}  // namespace ps
