// What is to be attended, and in which order: items, their splits, and the spans of context that a thread walks.
// Part of attention_kernels.cpp, whose head explains items and splits.
#pragma once

#include "kernels.h"

namespace ps {
namespace PS_ISA {
namespace {

constexpr int kTile = 64;
constexpr int kSplit = 512;
// Rows of an item, if one token has no more: many, for K and V are widened once for all of them; fewer where threads would
// get less than kItemsPerThread.
constexpr int kItemRows = 96, kFewItemRows = 48;
constexpr int kItemsPerThread = 8;

struct Problem {
  float* out;
  int64_t out_stride;
  const float* query;
  int64_t query_stride;
  int64_t num_heads, num_kv_heads, group, head_dim, block_size, block_stride;
  int64_t head_size, num_codes;  // what a block holds of one head's K or V: elements in all, and without scales
  int64_t element_bytes;
  const void* kv_data;
  const ps_attention_rows* rows;
  float scale;
  int64_t window;
  float soft_cap;
  int64_t item_tokens;
};

struct Item {
  int64_t seq, kv_head, first_query, num_queries;  // queries counted within the row
  int64_t num_rows;
  int64_t seen_begin, seen_end;  // positions that at least one of its queries sees
};

int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

Item make_item(const Problem& problem, int64_t seq, int64_t kv_head, int64_t query_tile) {
  const int32_t* starts = problem.rows->query_start_loc + seq;
  const int64_t query_len = starts[1] - starts[0];
  Item item;
  item.seq = seq;
  item.kv_head = kv_head;
  item.first_query = query_tile * problem.item_tokens;
  item.num_queries = min_of(problem.item_tokens, query_len - item.first_query);
  item.num_rows = item.num_queries * problem.group;
  const int64_t first_position = problem.rows->seq_lens[seq] - query_len + item.first_query;
  item.seen_begin = problem.window > 0 ? max_of(0, first_position + 1 - problem.window) : 0;
  item.seen_end = first_position + item.num_queries;
  return item;
}

int64_t first_split(const Item& item) { return item.seen_begin / kSplit; }
int64_t end_split(const Item& item) { return ceil_div(item.seen_end, kSplit); }

// Prefix sums over the sequences: items of each, and units (an item's split; every item of a sequence counts as many
// as its last one has).
struct Plan {
  int64_t* first_item;  // [num_seqs + 1]
  int64_t* first_unit;  // [num_seqs + 1]
  int64_t num_seqs;
  bool by_unit;  // what threads take: units, or whole items
  int64_t num_items() const { return first_item[num_seqs]; }
  int64_t num_units() const { return first_unit[num_seqs]; }
};

int64_t query_tiles(const Problem& problem, int64_t seq) {
  const int32_t* starts = problem.rows->query_start_loc + seq;
  return ceil_div(starts[1] - starts[0], problem.item_tokens);
}

int64_t splits_of(const Problem& problem, int64_t seq) {
  const int32_t* starts = problem.rows->query_start_loc + seq;
  const int64_t seq_len = problem.rows->seq_lens[seq];
  const int64_t first_position = seq_len - (starts[1] - starts[0]);
  const int64_t seen = problem.window > 0 ? max_of(0, first_position + 1 - problem.window) : 0;
  return ceil_div(seq_len, kSplit) - seen / kSplit;
}

// The sequence that `index` belongs to: first[seq] <= index < first[seq + 1].
int64_t find(const int64_t* first, int64_t num_seqs, int64_t index) {
  int64_t low = 0, high = num_seqs;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (first[middle] <= index) low = middle; else high = middle;
  }
  return low;
}

Item nth_item(const Problem& problem, int64_t seq, int64_t index) {
  const int64_t tiles = query_tiles(problem, seq);
  // Late tiles see most context: they go first, so that no thread is left with a long one at the end.
  return make_item(problem, seq, index / tiles, tiles - 1 - index % tiles);
}

Item item_at(const Problem& problem, const Plan& plan, int64_t index) {
  const int64_t seq = find(plan.first_item, plan.num_seqs, index);
  return nth_item(problem, seq, index - plan.first_item[seq]);
}

// An item and the splits of it that are one piece of work: all of them, or a unit's one. May be none.
struct Span {
  Item item;
  int64_t first_split, end_split;
  int64_t begin() const { return max_of(first_split * kSplit, item.seen_begin); }
  int64_t end() const { return min_of(end_split * kSplit, item.seen_end); }
};

Span span_at(const Problem& problem, const Plan& plan, int64_t index) {
  if (!plan.by_unit) {
    const Item item = item_at(problem, plan, index);
    return {item, first_split(item), end_split(item)};
  }
  const int64_t seq = find(plan.first_unit, plan.num_seqs, index);
  const int64_t within = index - plan.first_unit[seq], splits = splits_of(problem, seq);
  const Item item = nth_item(problem, seq, within / splits);
  const int64_t split = first_split(item) + within % splits;
  return {item, split, min_of(split + 1, end_split(item))};
}

}  // namespace
}  // namespace PS_ISA
}  // namespace ps
