// Keys and values are brought into a thread's cache some way before it reads them: where blocks lie stands in the block
// table, so the processor cannot guess it. Part of attention_kernels.cpp.
//
// Measured on the decode step of 32 rows x 192 tokens, 30 layers, weights streaming in between: nothing fetched 8.3 ms;
// a tile ahead, in four bursts a tile 7.6; without bursts, pages looked up before 6.5. Reading alone would take 5.2.
#pragma once

#include "attention_plan.h"

namespace ps {
namespace PS_ISA {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kLead = 256;    // lines: what memory delivers to a thread in a microsecond
constexpr int64_t kPageLead = 2;  // blocks: a line of each is fetched that much before all, to find its page

struct Piece {
  const char* line;  // the next to be fetched
  const char* end;
};

// What a thread's spans hold, in the order of blocks. A few lines are fetched at a time between the parts of a tile, as
// many as are read: many at once keep the arithmetic waiting.
class alignas(64) Stream {
 public:
  // The most pieces that a tile may ask for: four a block; blocks of the lead and, where the stream is behind, of the tile,
  // which may be followed by twice as many that hold few values.
  static int64_t capacity(const Problem& problem) {
    return 4 * (kLead / lines_of_keys(problem) + 2 * max_of(1, kTile / problem.block_size) + 2);
  }

  void open(const Problem& problem, const Plan& plan, int64_t num_spans) {
    problem_ = &problem;
    plan_ = &plan;
    num_spans_ = num_spans;
    num_key_lines_ = lines_of_keys(problem);
    reads_next_ = -1;
  }

  // The thread goes on to spans [begin, end): where it does not continue, the stream starts afresh.
  // `pieces`: room for capacity() of them.
  void go_on(int64_t begin, int64_t end, Piece* pieces) {
    pieces_ = pieces;
    num_pieces_ = piece_ = 0;
    if (begin != reads_next_) {
      span_ = begin - 1;
      block_ = end_block_ = 0;
      lead_ = 0;
    }
    reads_next_ = end;
  }

  // Before the tile at `start` is read: chooses what is fetched meanwhile, at `pauses` calls of pause().
  void begin_tile(const Item& item, int64_t start, int64_t pauses) {
    lead_ -= lines_of_tile(item, start);
    num_pieces_ = piece_ = 0;
    const int64_t lead = lead_;
    while (lead_ < kLead && take_block()) {
    }
    rate_ = ceil_div(lead_ - lead, pauses);
  }

  bool is_done() const { return piece_ == num_pieces_; }

  inline __attribute__((always_inline)) void pause() {
    if (!is_done()) fetch(rate_);
  }

  void end_tile() {
    while (!is_done()) fetch(kLead);
  }

 private:
  static int64_t lines_of_keys(const Problem& problem) {
    return ceil_div(problem.head_size * problem.element_bytes, kLine);
  }

  inline __attribute__((always_inline)) void fetch(int64_t num_lines) {
    Piece piece = pieces_[piece_];
    for (;;) {
      __builtin_prefetch(piece.line, 0, 2);
      piece.line += kLine;
      --num_lines;
      if (piece.line >= piece.end) {
        if (++piece_ == num_pieces_) return;
        piece = pieces_[piece_];
      }
      if (num_lines == 0) break;
    }
    pieces_[piece_].line = piece.line;
  }

  void take(const char* start, int64_t num_lines) { pieces_[num_pieces_++] = {start, start + num_lines * kLine}; }

  // Of a block's values only what is seen is read; scales stand behind all of its codes.
  int64_t lines_of_values(int64_t num_tokens) const {
    if (problem_->head_size != problem_->num_codes) return num_key_lines_;
    return ceil_div(min_of(num_tokens, problem_->block_size) * problem_->head_dim * problem_->element_bytes, kLine);
  }

  int64_t lines_of_block(int64_t block, int64_t end) const {
    return num_key_lines_ + lines_of_values(end - block * problem_->block_size);
  }

  // Of blocks that begin in the tile, or with the item in it.
  int64_t lines_of_tile(const Item& item, int64_t start) const {
    const int64_t size = problem_->block_size;
    const int64_t end = min_of(start + kTile, item.seen_end);
    int64_t lines = 0;
    const int64_t first = start <= item.seen_begin ? item.seen_begin / size : ceil_div(start, size);
    for (int64_t block = first; block * size < end; ++block) lines += lines_of_block(block, item.seen_end);
    return lines;
  }

  const char* address(int64_t block) const { return head_ + table_[block] * block_bytes_; }

  bool take_block() {
    while (block_ == end_block_) {
      if (span_ + 1 >= num_spans_) return false;
      enter(++span_);
    }
    const char* keys = address(block_);
    const char* values = keys + values_offset_;
    if (block_ + kPageLead < end_block_) {
      const char* later = address(block_ + kPageLead);
      take(later, 1);
      take(later + values_offset_, 1);
    }
    const int64_t num_value_lines = lines_of_values(end_ - block_ * problem_->block_size);
    take(keys, num_key_lines_);
    take(values, num_value_lines);
    lead_ += num_key_lines_ + num_value_lines;
    ++block_;
    return true;
  }

  void enter(int64_t index) {
    const Span span = span_at(*problem_, *plan_, index);
    const int64_t bytes = problem_->element_bytes;
    table_ = problem_->rows->block_tables + span.item.seq * problem_->rows->block_tables_stride;
    head_ = static_cast<const char*>(problem_->kv_data) + span.item.kv_head * problem_->head_size * bytes;
    values_offset_ = problem_->num_kv_heads * problem_->head_size * bytes;
    block_bytes_ = problem_->block_stride * bytes;
    end_ = span.end();
    block_ = span.begin() / problem_->block_size;
    end_block_ = span.begin() < end_ ? ceil_div(end_, problem_->block_size) : block_;
  }

  const Problem* problem_;
  const Plan* plan_;
  int64_t num_spans_, reads_next_;
  int64_t span_, block_, end_block_, end_;
  const int32_t* table_;
  const char* head_;
  int64_t values_offset_, block_bytes_;
  int64_t num_key_lines_;
  int64_t lead_;  // lines that have been chosen and not yet read
  Piece* pieces_;
  int64_t num_pieces_, piece_, rate_;
};

}  // namespace
}  // namespace PS_ISA
}  // namespace ps
