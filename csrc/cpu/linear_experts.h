// Experts of a mixture: products of few rows each, taken by the threads as one pile of small pieces.
// Part of linear_kernels.cpp.
//
// The rows of an expert are cut into blocks. A block's activations are arranged once; a piece of work is then a block
// times a few panels. The tiles are those of single products, so that a row gets the bits that those would give it.
#pragma once

#include "experts.h"

namespace ps {

namespace PS_BASE_ISA {

// In activation_kernels.cpp; kernels.h declares it to those who call by instruction set.
void gated_activation(int activation, float* out, int64_t out_stride, const float* x, int64_t x_stride,
                      int64_t num_rows, int64_t dim);

}  // namespace PS_BASE_ISA

namespace PS_ISA {
namespace {

constexpr int64_t kPieceColumns = 4 * kPanel;
constexpr int64_t kSumColumns = 1024;  // of a row, in one piece of the last sum

PS_INLINE int64_t rounded_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Some rows of one expert as activations of a matrix of `depth` columns.
struct Block {
  const float* const* rows;
  int64_t num_rows;
  int64_t depth;
  uint8_t* memory;  // what the rows become
};

Call call_of(const Block& block, const ps_linear_weight& weight, int max_height, float* out, int64_t out_stride) {
  Call call{};
  call.args.out = out;
  call.args.out_stride = out_stride;
  call.args.num_rows = block.num_rows;
  call.args.weight = weight;
  call.data = static_cast<const uint8_t*>(weight.data);
  call.panel_bytes = panel_bytes(kLinearFormats[weight.format], weight.in_features);
  call.last_panel = (weight.out_features - 1) / kPanel;
  call.num_tiles = (block.num_rows + max_height - 1) / max_height;
  return call;
}

template <class Tile, int MR, int NV>
void multiply_tiles(const Call& call) {
  for (int64_t column = 0; column < call.args.weight.out_features; column += NV * kWidth) {
    for (int64_t tile = 0; tile < call.num_tiles; ++tile) {
      const int64_t row = call.first_row(tile);
      run_tile<Tile, MR, NV>(call, row, call.first_row(tile + 1) - row, column);
    }
  }
}

template <class Values>
struct FloatBlocks {
  static int max_height(const Block& block) { return block.num_rows <= kFewRows ? kFewRows : kRows; }

  static int64_t num_bytes(const Block& block) { return block.num_rows * block.depth * 4; }

  static void prepare(const Block& block, int format) {
    auto* out = reinterpret_cast<float*>(block.memory);
    const Call tiles = call_of(block, {nullptr, 1, block.depth, format}, max_height(block), nullptr, 0);
    for (int64_t tile = 0; tile < tiles.num_tiles; ++tile) {
      const int64_t row = tiles.first_row(tile), height = tiles.first_row(tile + 1) - row;
      for (int64_t i = 0; i < height; ++i) {
        const float* x = block.rows[row + i];
        for (int64_t k = 0; k < block.depth; ++k) out[k * height + i] = x[k];
      }
      out += height * block.depth;
    }
  }

  static void multiply(const Block& block, const ps_linear_weight& weight, float* out, int64_t out_stride, uint8_t*) {
    Call call = call_of(block, weight, max_height(block), out, out_stride);
    call.values = reinterpret_cast<const float*>(block.memory);
    if (block.num_rows <= kFewRows) {
      multiply_tiles<FloatTile<Values>, kFewRows, kManyVecs>(call);
    } else {
      multiply_tiles<FloatTile<Values>, kRows, kVecs>(call);
    }
  }
};

template <class Codes, class Scale, bool kHasMin, int kHalves>
struct IntBlocks {
  static constexpr int kHeight = Codes::kDepth == Nibbles::kDepth ? kIntRows : kByteRows;
  static constexpr int kPieceBytes = Codes::kWide ? 8 : 4;
  static constexpr int64_t kWords = 1 + kHalves;  // of meta, a row and group

  static int64_t code_bytes(const Block& block) { return rounded_up(block.num_rows * block.depth * kPlanes); }

  static int64_t num_bytes(const Block& block) {
    return code_bytes(block) + block.num_rows * (block.depth / kGroup) * kWords * 4;
  }

  static void prepare(const Block& block, int format) {
    const int64_t words = block.depth / kGroup * kWords;
    auto* codes = reinterpret_cast<int8_t*>(block.memory);
    auto* meta = reinterpret_cast<float*>(block.memory + code_bytes(block));
    const Call tiles = call_of(block, {nullptr, 1, block.depth, format}, kHeight, nullptr, 0);
    for (int64_t tile = 0; tile < tiles.num_tiles; ++tile) {
      const int64_t row = tiles.first_row(tile), height = tiles.first_row(tile + 1) - row;
      for (int64_t i = 0; i < height; ++i) {
        quantize_row<4, Codes::kWide>(block.rows[row + i], block.depth, kLinearFormats[format], height * kPieceBytes,
                                      codes + row * block.depth * kPlanes + i * kPieceBytes, 1, height * kWords,
                                      meta + row * words + i * kWords);
      }
    }
  }

  static void multiply(const Block& block, const ps_linear_weight& weight, float* out, int64_t out_stride, uint8_t*) {
    Call call = call_of(block, weight, kHeight, out, out_stride);
    call.codes = reinterpret_cast<const int8_t*>(block.memory);
    call.meta = reinterpret_cast<const float*>(block.memory + code_bytes(block));
    multiply_tiles<IntTiles<Codes, Scale, kHasMin, kHalves>, kHeight, kIntVecs>(call);
  }
};

#ifdef PS_ISA_AMX

// How many of a block's rows come in tiles, as far as that pays; the others follow them as in IntBlocks.
int64_t rows_in_tiles(int64_t num_rows) {
  const int64_t rest = num_rows % kAmxRows;
  return rest < kAmxMinRows ? num_rows - rest : num_rows;
}

// The rows of a block from one on.
Block rest_of(const Block& block, int64_t first, int64_t bytes_before) {
  return {block.rows + first, block.num_rows - first, block.depth, block.memory + bytes_before};
}

template <class Codes, class Scale, bool kHasMin>
struct ByteBlocks {
  using Rest = IntBlocks<Codes, Scale, kHasMin, 1>;

  static int64_t num_groups(const Block& block) {  // of all tiles
    return (rows_in_tiles(block.num_rows) + kAmxRows - 1) / kAmxRows * (block.depth / kGroup);
  }
  static int64_t tile_bytes(const Block& block) { return num_groups(block) * (kAmxGroup + kAmxWords * kAmxRows * 4); }
  static Block rest(const Block& block) { return rest_of(block, rows_in_tiles(block.num_rows), tile_bytes(block)); }
  static float* meta(const Block& block) { return reinterpret_cast<float*>(block.memory + num_groups(block) * kAmxGroup); }

  static int64_t num_bytes(const Block& block) { return tile_bytes(block) + Rest::num_bytes(rest(block)); }

  static void prepare(const Block& block, int format) {
    const int64_t depth = block.depth, groups = depth / kGroup, num_rows = rows_in_tiles(block.num_rows);
    auto* codes = reinterpret_cast<int8_t*>(block.memory);
    if (num_rows % kAmxRows != 0) {  // rows that the last tile lacks count as zero
      std::memset(block.memory, 0, static_cast<size_t>(tile_bytes(block)));
    }
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t first_group = row / kAmxRows * groups;
      quantize_amx_row(block.rows[row], depth, kLinearFormats[format], row % kAmxRows, codes + first_group * kAmxGroup,
                       meta(block) + first_group * kAmxWords * kAmxRows);
    }
    Rest::prepare(rest(block), format);
  }

  static void multiply(const Block& block, const ps_linear_weight& weight, float* out, int64_t out_stride,
                       uint8_t* memory) {
    const int64_t groups = block.depth / kGroup, num_rows = rows_in_tiles(block.num_rows);
    const Call call = call_of(block, weight, kAmxRows, out, out_stride);
    if (num_rows > 0) {
      const TileConfig config;
      for (int64_t panel = 0; panel <= call.last_panel; ++panel) {
        const uint8_t* codes = call.data + panel * call.panel_bytes;
        const auto* scales = reinterpret_cast<const Scale*>(codes + groups * kAmxCodes);
        const uint8_t* ahead = panel < call.last_panel ? codes + call.panel_bytes : nullptr;
        for (int64_t row = 0; row < num_rows; row += kAmxRows) {
          const int64_t first_group = row / kAmxRows * groups;
          Vec sum[kAmxRows];
          amx_tile<Scale, kHasMin>(reinterpret_cast<const int8_t*>(block.memory) + first_group * kAmxGroup,
                                   meta(block) + first_group * kAmxWords * kAmxRows, codes, scales, groups,
                                   row == 0 ? ahead : nullptr, (call.panel_bytes + groups - 1) / groups, sum);
          for (int64_t i = 0; i < kAmxRows && row + i < num_rows; ++i) {
            Vec one[1][1] = {{sum[i]}};
            store_tile<1, 1>(call.args, row + i, panel * kPanel, one);
          }
        }
      }
    }
    if (num_rows < block.num_rows) Rest::multiply(rest(block), weight, out + num_rows * out_stride, out_stride, memory);
  }
};

int64_t multiply_bytes(int64_t depth) { return depth <= kExactAmxDepth ? exact_piece_bytes(depth) : 0; }

template <class Scale, bool kHasMin>
struct NibbleBlocks {
  static int64_t num_bytes(const Block& block) {
    return takes_tiles(block.num_rows, block.depth) ? AmxLayout(block.num_rows, block.depth).num_bytes
                                                    : ExactLayout(block.num_rows, block.depth).num_bytes;
  }

  static void prepare(const Block& block, int format) {
    if (takes_tiles(block.num_rows, block.depth)) {
      const AmxLayout layout(block.num_rows, block.depth);
      for (int64_t row = 0; row < block.num_rows; ++row) {
        const float* next = block.rows[row + 1 < block.num_rows ? row + 1 : row];
        layout.prepare_row(block.rows[row], next, block.depth, row, block.memory);
      }
      return;
    }
    const ExactLayout layout(block.num_rows, block.depth);
    const Call tiles = call_of(block, {nullptr, 1, block.depth, format}, kExactRows, nullptr, 0);
    for (int64_t tile = 0; tile < tiles.num_tiles; ++tile) {
      const int64_t row = tiles.first_row(tile), height = tiles.first_row(tile + 1) - row;
      for (int64_t i = 0; i < height; ++i) {
        layout.prepare_row(block.rows[row + i], block.depth, kLinearFormats[format], row, height, i, block.memory);
      }
    }
  }

  static void multiply(const Block& block, const ps_linear_weight& weight, float* out, int64_t out_stride,
                       uint8_t* memory) {
    Call call = call_of(block, weight, kExactRows, out, out_stride);
    if (!takes_tiles(block.num_rows, block.depth)) {
      ExactLayout(block.num_rows, block.depth).place(block.memory, &call);
      multiply_tiles<ExactTile<Scale, kHasMin>, kExactRows, kExactVecs>(call);
      return;
    }
    const AmxLayout layout(block.num_rows, block.depth);
    ExactTiles config;
    FinishedSums finished(call.args, layout.scales(block.memory), memory);
    for (int64_t column = 0; column < weight.out_features; column += kPanel) {
      multiply_panel<Scale, kHasMin>(block.memory, layout.tile_bytes, block.num_rows, 0, column,
                                     exact_panel(call, column, column + kPanel, memory), &config, &finished);
    }
    FinishedSums::write(&finished, kPairRows);
  }
};

#else

int64_t multiply_bytes(int64_t) { return 0; }

template <class Codes, class Scale, bool kHasMin>
using ByteBlocks = IntBlocks<Codes, Scale, kHasMin, 1>;

template <class Scale, bool kHasMin>
using NibbleBlocks = IntBlocks<Nibbles, Scale, kHasMin, 1>;

#endif

// Calls f with the kind of blocks that a format takes.
template <class F>
PS_INLINE auto with_blocks(int format, const F& f) {
  switch (format) {
    case PS_LINEAR_F32: return f(FloatBlocks<F32Values>{});
    case PS_LINEAR_BF16: return f(FloatBlocks<BF16Values>{});
    case PS_LINEAR_F16: return f(FloatBlocks<F16Values>{});
    case PS_LINEAR_INT8: return f(ByteBlocks<Bytes, f16, false>{});
    case PS_LINEAR_INT8_G16: return f(IntBlocks<Bytes, float, false, 2>{});
    case PS_LINEAR_INT8_MIN: return f(ByteBlocks<LowBytes, float, true>{});
    case PS_LINEAR_INT4_SYM: return f(NibbleBlocks<f16, false>{});
    case PS_LINEAR_INT4: return f(NibbleBlocks<f16, true>{});
    default: return f(NibbleBlocks<float, true>{});  // PS_LINEAR_INT4_F32
  }
}

int64_t block_bytes(const Block& block, int format) {
  return rounded_up(with_blocks(format, [&](auto blocks) { return blocks.num_bytes(block); }));
}

void prepare_block(const Block& block, int format) {
  with_blocks(format, [&](auto blocks) { blocks.prepare(block, format); });
}

// `count` columns of the product from `first` on; out has them from its column 0 on.
void multiply_block(const Block& block, const ps_linear_weight& weight, int64_t first, int64_t count, float* out,
                    int64_t out_stride, uint8_t* memory) {
  const int64_t bytes = panel_bytes(kLinearFormats[weight.format], weight.in_features);
  const ps_linear_weight columns{static_cast<const uint8_t*>(weight.data) + first / kPanel * bytes, count,
                                 weight.in_features, weight.format};
  with_blocks(weight.format, [&](auto blocks) { blocks.multiply(block, columns, out, out_stride, memory); });
}

// A block of one expert before its three matrices; gate and up share their activations where their formats are one.
struct ExpertBlock {
  const ps_linear_weight* gate_up;  // two
  const ps_linear_weight* down;
  int64_t place;  // of the first row among the sorted pairs
  Block gate, up, inner;
};

class Experts {
 public:
  explicit Experts(const ExpertsArgs& args) : args_(args), hidden_(args.experts.hidden_size()), inner_(args.experts.expert_size()) {}

  bool run() {
    lay_out();  // measures
    memory_ = static_cast<uint8_t*>(thread_scratch(kScratchCall, static_cast<size_t>(used_)));
    if (memory_ == nullptr) return false;
    lay_out();
    for (int64_t place = 0; place < args_.num_pairs(); ++place) {
      const int64_t pair = args_.pairs[place];
      places_[pair] = place;
      rows_[place] = args_.x + pair / args_.top_k * args_.x_stride;
      inner_rows_[place] = activated_ + place * inner_;
    }
    parallel_for(num_blocks_, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        const ExpertBlock& block = blocks_[i];
        prepare_block(block.gate, block.gate_up[0].format);
        if (block.up.memory != block.gate.memory) prepare_block(block.up, block.gate_up[1].format);
      }
    });
    for_each_piece(inner_, [&](const ExpertBlock& block, int64_t first, int64_t count, float* both, uint8_t* memory) {
      multiply_block(block.gate, block.gate_up[0], first, count, both, 2 * count, memory);
      multiply_block(block.up, block.gate_up[1], first, count, both + count, 2 * count, memory);
      PS_BASE_ISA::gated_activation(args_.activation, activated_ + block.place * inner_ + first, inner_, both,
                                    2 * count, block.gate.num_rows, count);
    });
    parallel_for(num_blocks_, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) prepare_block(blocks_[i].inner, blocks_[i].down->format);
    });
    for_each_piece(hidden_, [&](const ExpertBlock& block, int64_t first, int64_t count, float*, uint8_t* memory) {
      multiply_block(block.inner, *block.down, first, count, results_ + block.place * hidden_ + first, hidden_,
                     memory);
    });
    if (!has_memory_) return false;
    add_up();
    return true;
  }

 private:
  // Hands out the call's memory from its beginning; before there is any, it only counts.
  template <class T>
  T* take(int64_t count) {
    T* taken = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + used_);
    used_ += rounded_up(count * static_cast<int64_t>(sizeof(T)));
    return taken;
  }

  void lay_out() {
    used_ = 0;
    const int64_t num_pairs = args_.num_pairs();
    places_ = take<int64_t>(num_pairs);
    rows_ = take<const float*>(num_pairs);
    inner_rows_ = take<const float*>(num_pairs);
    activated_ = take<float>(num_pairs * inner_);
    results_ = take<float>(num_pairs * hidden_);
    blocks_ = take<ExpertBlock>(num_blocks_);  // which the first round has counted
    num_blocks_ = 0;
    for (int64_t expert = 0; expert < args_.experts.num_experts; ++expert) {
      const int64_t begin = args_.starts[expert], end = args_.starts[expert + 1];
      for (int64_t place = begin; place < end; place += kBlockRows) {
        add_block(expert, place, end - place < kBlockRows ? end - place : kBlockRows);
      }
    }
    if (memory_ == nullptr) take<ExpertBlock>(num_blocks_);
  }

  void add_block(int64_t expert, int64_t place, int64_t num_rows) {
    ExpertBlock block;
    block.gate_up = args_.experts.gate_up + 2 * expert;
    block.down = args_.experts.down + expert;
    block.place = place;
    block.gate = {rows_ + place, num_rows, hidden_, nullptr};
    block.up = block.gate;
    block.inner = {inner_rows_ + place, num_rows, inner_, nullptr};
    block.gate.memory = block.up.memory = take<uint8_t>(block_bytes(block.gate, block.gate_up[0].format));
    if (block.gate_up[1].format != block.gate_up[0].format) {
      block.up.memory = take<uint8_t>(block_bytes(block.up, block.gate_up[1].format));
    }
    block.inner.memory = take<uint8_t>(block_bytes(block.inner, block.down->format));
    if (memory_ != nullptr) blocks_[num_blocks_] = block;
    ++num_blocks_;
  }

  // Calls f(block, first column, number of columns, memory for twice that many of its rows, memory that products take).
  template <class F>
  void for_each_piece(int64_t num_columns, const F& f) {
    const int64_t num_pieces = (num_columns + kPieceColumns - 1) / kPieceColumns;  // of a block
    const int64_t items = num_blocks_ * num_pieces;
    constexpr int64_t kBothBytes = kBlockRows * 2 * kPieceColumns * 4;
    const int64_t deepest = hidden_ > inner_ ? hidden_ : inner_;
    parallel_for(items, items / (num_threads() * 16) + 1, [&](int64_t begin, int64_t end, int) {
      auto* memory = static_cast<uint8_t*>(
          thread_scratch(kScratchPiece, static_cast<size_t>(kBothBytes + multiply_bytes(deepest))));
      if (memory == nullptr) {
        __atomic_store_n(&has_memory_, false, __ATOMIC_RELAXED);
        return;
      }
      for (int64_t item = begin; item < end; ++item) {
        const int64_t first = item % num_pieces * kPieceColumns;
        const int64_t left = num_columns - first;
        f(blocks_[item / num_pieces], first, left < kPieceColumns ? left : kPieceColumns,
          reinterpret_cast<float*>(memory), memory + kBothBytes);
      }
    });
  }

  void add_up() {
    const int64_t num_pieces = (hidden_ + kSumColumns - 1) / kSumColumns;  // of a row
    parallel_for(args_.num_rows * num_pieces, 4, [&](int64_t begin, int64_t end, int) {
      for (int64_t item = begin; item < end; ++item) {
        const int64_t row = item / num_pieces, first = item % num_pieces * kSumColumns;
        const int64_t last = first + kSumColumns < hidden_ ? first + kSumColumns : hidden_;
        const float* weights = args_.weights + row * args_.top_k;
        const int64_t* places = places_ + row * args_.top_k;
        float* out = args_.out + row * args_.out_stride;
        for (int64_t column = first; column < last; column += kWidth) {
          const bool whole = column + kWidth <= last;
          const int n = static_cast<int>(last - column);
          Vec sum = zero();
          for (int64_t rank = 0; rank < args_.top_k; ++rank) {
            const float* result = results_ + places[rank] * hidden_ + column;
            sum = fma(set1(weights[rank]), whole ? load(result) : load_partial(result, n), sum);
          }
          if (whole) {
            store(out + column, sum);
          } else {
            store_partial(out + column, sum, n);
          }
        }
      }
    });
  }

  const ExpertsArgs& args_;
  const int64_t hidden_, inner_;
  uint8_t* memory_ = nullptr;
  int64_t used_ = 0;
  int64_t* places_ = nullptr;         // [pair]: where it is among the sorted ones
  const float** rows_ = nullptr;      // [place]: of x
  const float** inner_rows_ = nullptr;  // [place]: of activated_
  float* activated_ = nullptr;        // [place, expert_size]
  float* results_ = nullptr;          // [place, hidden_size]
  ExpertBlock* blocks_ = nullptr;
  int64_t num_blocks_ = 0;
  bool has_memory_ = true;
};

}  // namespace

void experts(const ExpertsArgs& args, int* status) {
  if (!Experts(args).run()) *status = PS_OUT_OF_MEMORY;
}

}  // namespace PS_ISA
}  // namespace ps
