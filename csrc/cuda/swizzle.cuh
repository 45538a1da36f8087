// Where a tile's 16-byte chunks lie in shared memory.
#pragma once

#include "device.cuh"

namespace ps {

// A row of `chunks` chunks starts wherever the row before it ends. ldmatrix reads the same chunk of eight consecutive
// rows at once and needs them in eight different groups of four banks (16 bytes each): the start of the row moves the
// group by chunks % 8, and XOR with some bits of the row does the rest without leaving the row.
template <int chunks>
struct Swizzle {
  static constexpr int kMask = chunks % 8 == 0 ? 7 : chunks % 8 == 4 ? 3 : chunks % 2 == 0 ? 1 : 0;
  static constexpr int kShift = chunks % 8 == 0 ? 0 : chunks % 8 == 4 ? 1 : 2;

  __host__ __device__ static constexpr int chunk(int row, int column) { return row * chunks + (column ^ ((row >> kShift) & kMask)); }

  __host__ __device__ static constexpr bool free_of_conflicts() {
    for (int column = 0; column < chunks; ++column) {
      unsigned seen = 0;
      for (int row = 0; row < 8; ++row) seen |= 1u << (chunk(row, column) % 8);
      if (seen != 0xff) return false;
    }
    return true;
  }
};

}  // namespace ps
