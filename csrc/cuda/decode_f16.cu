#include "decode_mma_launch.cuh"

namespace ps {

DecodeKernel find_decode_f16(int head_dim, int row_tile) { return find_decode<Half, Same<Half>>(head_dim, row_tile); }

}  // namespace ps
