// Paged causal attention: prefill, chunked prefill and decode of any mix of rows in one pass, with the online
// softmax of FlashAttention (Dao et al. 2022, arXiv 2205.14135) and its split over context for long decodes.
//
// Shape of the work. A work item is one KV head of some query tokens of one row; the query heads that share the
// KV head ride along, so K and V are read once for all of them: item rows = query tokens x heads per KV head.
// Context is walked in tiles of kTile tokens and splits of kSplit tokens, both counted from position 0.
//
// Same bits whatever the batch, the chunks and the threads: every item row has registers of its own, its sums
// run in the order of d (scores), of positions (values), of tiles and of splits, and a tile or split that a row
// cannot see changes nothing (p = 0, factor 1). Which rows share a register tile, and whether K and V were
// widened beforehand, does not enter. Of an 8-bit cache the codes are multiplied, and a token's scale enters once:
// into its score, and into its weight where values are summed.
#include "attention_tile.h"
#include "kernels.h"
#include "scratch.h"
#include "status.h"
#include "thread_pool.h"
#include "vec.h"

namespace ps {
namespace PS_ISA {
namespace {

// ---- one item ------------------------------------------------------------------------------------------------

void load_query(const Problem& problem, const Item& item, float* to) {
  const int64_t first_token = problem.rows->query_start_loc[item.seq] + item.first_query;
  const int64_t count = problem.group * problem.head_dim;
  for (int64_t i = 0; i < item.num_queries; ++i) {
    const float* from = problem.query + (first_token + i) * problem.query_stride + item.kv_head * count;
    for (int64_t j = 0; j < count; ++j) to[i * count + j] = from[j] * problem.scale;
  }
}

template <class T>
void attend_split(const Problem& problem, const Item& item, const Scratch& scratch, int64_t split, Stream& stream) {
  clear(scratch.split, item.num_rows, problem.head_dim);
  const int64_t begin = max_of(split * kSplit, item.seen_begin / kTile * kTile);
  const int64_t end = min_of((split + 1) * kSplit, item.seen_end);
  for (int64_t start = begin; start < end; start += kTile) attend_tile<T>(problem, item, scratch, start, stream);
}

// Adds a split to the splits before it.
void merge(const State& total, const State& split, int64_t rows, int64_t head_dim) {
  for (int64_t row = 0; row < rows; ++row) {
    const float a = total.maximum[row], b = split.maximum[row];
    const float maximum = a > b ? a : b;
    const float keep = exp_of(a - maximum), add = exp_of(b - maximum);
    total.maximum[row] = maximum;
    total.sum[row] = total.sum[row] * keep + split.sum[row] * add;
    float* to = total.values + row * head_dim;
    const float* from = split.values + row * head_dim;
    for (int64_t d = 0; d < head_dim; ++d) to[d] = to[d] * keep + from[d] * add;
  }
}

void write_out(const Problem& problem, const Item& item, const State& state) {
  const int64_t first_token = problem.rows->query_start_loc[item.seq] + item.first_query;
  for (int64_t row = 0; row < item.num_rows; ++row) {
    const int64_t token = first_token + row / problem.group;
    const int64_t head = item.kv_head * problem.group + row % problem.group;
    float* to = problem.out + token * problem.out_stride + head * problem.head_dim;
    const float* from = state.values + row * problem.head_dim;
    const float inverse = 1.f / state.sum[row];
    for (int64_t d = 0; d < problem.head_dim; ++d) to[d] = from[d] * inverse;
  }
}

template <class T>
void attend_item(const Problem& problem, const Item& item, const Scratch& scratch, Stream& stream) {
  load_query(problem, item, scratch.query);
  const int64_t first = first_split(item), end = end_split(item);
  attend_split<T>(problem, item, scratch, first, stream);
  if (end - first == 1) return write_out(problem, item, scratch.split);
  clear(scratch.total, item.num_rows, problem.head_dim);
  merge(scratch.total, scratch.split, item.num_rows, problem.head_dim);
  for (int64_t split = first + 1; split < end; ++split) {
    attend_split<T>(problem, item, scratch, split, stream);
    merge(scratch.total, scratch.split, item.num_rows, problem.head_dim);
  }
  write_out(problem, item, scratch.total);
}

// ---- the whole batch -----------------------------------------------------------------------------------------

template <class T>
void attend_items(const Problem& problem, const Plan& plan, int64_t max_rows, Stream* streams, int* status) {
  const int64_t grain = max_of(1, min_of(8, plan.num_items() / (8 * num_threads())));
  parallel_for(plan.num_items(), grain, [&](int64_t begin, int64_t end, int thread) {
    Scratch scratch;
    if (!carve(scratch, problem, max_rows)) {
      __atomic_store_n(status, PS_OUT_OF_MEMORY, __ATOMIC_RELAXED);
      return;
    }
    Stream& stream = streams[thread];
    stream.go_on(begin, end, scratch.pieces);
    for (int64_t i = begin; i < end; ++i) attend_item<T>(problem, item_at(problem, plan, i), scratch, stream);
  });
}

// Each unit is a piece of work, its state kept until all are there.
template <class T>
void attend_units(const Problem& problem, const Plan& plan, int64_t max_rows, Stream* streams, float* states,
                  int* status) {
  const int64_t floats = state_floats(max_rows, problem.head_dim);
  const auto state_of = [&](int64_t unit) {
    Carver carver{states + unit * floats};
    return carve_state(carver, max_rows, problem.head_dim);
  };
  parallel_for(plan.num_units(), 1, [&](int64_t begin, int64_t end, int thread) {
    Scratch scratch;
    if (!carve(scratch, problem, max_rows)) {
      __atomic_store_n(status, PS_OUT_OF_MEMORY, __ATOMIC_RELAXED);
      return;
    }
    Stream& stream = streams[thread];
    stream.go_on(begin, end, scratch.pieces);
    for (int64_t unit = begin; unit < end; ++unit) {
      const Span span = span_at(problem, plan, unit);
      if (span.first_split >= span.end_split) continue;
      load_query(problem, span.item, scratch.query);
      scratch.split = state_of(unit);
      attend_split<T>(problem, span.item, scratch, span.first_split, stream);
    }
  });
  if (*status != PS_OK) return;
  parallel_for(plan.num_items(), 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t seq = find(plan.first_item, plan.num_seqs, i);
      const int64_t within = i - plan.first_item[seq];
      const Item item = nth_item(problem, seq, within);
      const int64_t unit = plan.first_unit[seq] + within * splits_of(problem, seq);
      const State total = state_of(unit);
      for (int64_t split = 1; split < end_split(item) - first_split(item); ++split) {
        merge(total, state_of(unit + split), item.num_rows, problem.head_dim);
      }
      write_out(problem, item, total);
    }
  });
}

template <class T>
void attend(const Problem& problem, int* status) {
  const int64_t num_seqs = problem.rows->num_seqs;
  int64_t num_units = 0, max_queries = 0, max_splits = 0;
  for (int64_t seq = 0; seq < num_seqs; ++seq) {
    const int64_t query_len = problem.rows->query_start_loc[seq + 1] - problem.rows->query_start_loc[seq];
    if (query_len == 0) continue;
    const int64_t splits = splits_of(problem, seq);
    num_units += query_tiles(problem, seq) * problem.num_kv_heads * splits;
    max_queries = max_of(max_queries, min_of(query_len, problem.item_tokens));
    max_splits = max_of(max_splits, splits);
  }
  if (num_units == 0) return;
  const int64_t max_rows = max_queries * problem.group;
  // Whole items need no second pass; units, where the longest item would keep the other threads waiting.
  const bool by_unit = max_splits > 1 && num_threads() > 1 && 2 * num_threads() * max_splits > num_units;
  const int64_t plan_bytes = (2 * (num_seqs + 1) * 8 + 63) / 64 * 64;
  const PoolRegion region;  // the number of threads stays what it is
  const int64_t stream_bytes = num_threads() * int64_t{sizeof(Stream)};
  const int64_t state_bytes = by_unit ? num_units * state_floats(max_rows, problem.head_dim) * 4 : 0;
  char* memory = static_cast<char*>(thread_scratch(kScratchCall, plan_bytes + stream_bytes + state_bytes));
  if (memory == nullptr) {
    *status = PS_OUT_OF_MEMORY;
    return;
  }
  Plan plan{reinterpret_cast<int64_t*>(memory), reinterpret_cast<int64_t*>(memory) + num_seqs + 1, num_seqs, by_unit};
  plan.first_item[0] = plan.first_unit[0] = 0;
  for (int64_t seq = 0; seq < num_seqs; ++seq) {
    const int64_t items = query_tiles(problem, seq) * problem.num_kv_heads;
    plan.first_item[seq + 1] = plan.first_item[seq] + items;
    plan.first_unit[seq + 1] = plan.first_unit[seq] + items * (items > 0 ? splits_of(problem, seq) : 0);
  }
  Stream* streams = reinterpret_cast<Stream*>(memory + plan_bytes);
  for (int i = 0; i < num_threads(); ++i) streams[i].open(problem, plan, by_unit ? num_units : plan.num_items());
  if (by_unit) {
    float* states = reinterpret_cast<float*>(memory + plan_bytes + stream_bytes);
    attend_units<T>(problem, plan, max_rows, streams, states, status);
  } else {
    attend_items<T>(problem, plan, max_rows, streams, status);
  }
}

}  // namespace

void paged_attention(float* out, int64_t out_stride, const float* query, int64_t query_stride, int64_t num_heads,
                     const ps_kv_cache& kv, const ps_attention_rows& rows, float scale, int64_t window,
                     float soft_cap, int* status) {
  Problem problem;
  problem.out = out;
  problem.out_stride = out_stride;
  problem.query = query;
  problem.query_stride = query_stride;
  problem.num_heads = num_heads;
  problem.num_kv_heads = kv.num_kv_heads;
  problem.group = num_heads / kv.num_kv_heads;
  problem.head_dim = kv.head_dim;
  problem.block_size = kv.block_size;
  problem.block_stride = kv.block_stride;
  problem.num_codes = kv.head_dim * kv.block_size;
  problem.head_size = problem.num_codes + (kv.dtype == PS_I8 ? kv.block_size * int64_t{sizeof(float)} : 0);
  problem.element_bytes = kv.dtype == PS_F32 ? 4 : kv.dtype == PS_I8 ? 1 : 2;
  problem.kv_data = kv.data;
  problem.rows = &rows;
  problem.scale = scale;
  problem.window = window;
  problem.soft_cap = soft_cap;
  const bool are_many = rows.num_tokens * num_heads >= int64_t{kItemsPerThread} * num_threads() * kItemRows;
  problem.item_tokens = max_of(1, (are_many ? kItemRows : kFewItemRows) / problem.group);
  switch (kv.dtype) {
    case PS_F32: attend<float>(problem, status); break;
    case PS_BF16: attend<bf16>(problem, status); break;
    case PS_I8: attend<int8_t>(problem, status); break;
    default: attend<f16>(problem, status); break;
  }
  if (*status == PS_OUT_OF_MEMORY) fail(PS_OUT_OF_MEMORY, "no memory for the attention working set");
}

}  // namespace PS_ISA
}  // namespace ps
