// The plan of a decode step: contexts cut into pieces so that all CTAs end at about the same time. Made on the device,
// once a step for all layers, so that a captured graph follows the lengths; grids are sized for the most pieces.
#include "decode.h"

namespace ps {
namespace {

constexpr int kWarps = 32;  // each weighs one length of piece
constexpr int kThreads = 32 * kWarps;
// What a CTA's beginning and end cost, in keys. A guess until a card has measured it.
constexpr int kOverheadKeys = 128;

struct PlanParameters {
  int4* items;
  int max_items;
  const int32_t* seq_lens;
  const int32_t* query_start_loc;
  int num_seqs;
  int grid_heads;
  int resident_ctas;
  int window;
};

// The keys that some query of the row sees, from a multiple of kPlanGranule.
__device__ __forceinline__ void find_span(const PlanParameters& p, int seq, int& begin, int& end) {
  const int query_len = p.query_start_loc == nullptr ? 1 : p.query_start_loc[seq + 1] - p.query_start_loc[seq];
  begin = 0;
  end = query_len > 0 ? p.seq_lens[seq] : 0;
  if (p.window > 0 && end > 0) {
    const int first = end - query_len + 1 - p.window;
    if (first > 0) begin = first / kPlanGranule * kPlanGranule;
  }
}

__device__ __forceinline__ int divide_up(int a, int b) { return (a + b - 1) / b; }

// 256, 384, 512, 768, ...: the last is longer than any context.
__device__ __forceinline__ int piece_length(int choice) { return (choice % 2 == 0 ? 256 : 384) << (choice / 2); }

__global__ void __launch_bounds__(kThreads) plan_decode(const PlanParameters p) {
  auto* const costs = reinterpret_cast<float*>(device::shared_memory());  // [kWarps]
  auto* const totals = reinterpret_cast<int*>(costs + kWarps);            // [kWarps]
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;

  // Each warp: what would pieces of its length cost?
  const int length = piece_length(warp);
  int pieces = 0, keys = 0, longest = 0, most = 0;  // keys: in granules, so that a batch's sum fits
  for (int seq = lane; seq < p.num_seqs; seq += 32) {
    int begin, end;
    find_span(p, seq, begin, end);
    const int span = end - begin, count = divide_up(span, length);
    pieces += count;
    keys += divide_up(span, kPlanGranule);
    longest = max(longest, min(span, length));
    most = max(most, count);
  }
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) {
    pieces += device::shuffle_xor(pieces, mask);
    keys += device::shuffle_xor(keys, mask);
    longest = max(longest, device::shuffle_xor(longest, mask));
    most = max(most, device::shuffle_xor(most, mask));
  }
  if (lane == 0) {
    const float average = static_cast<float>(keys) * kPlanGranule / max(pieces, 1);
    const int waves = divide_up(pieces * p.grid_heads, p.resident_ctas);
    const bool fits = pieces <= p.max_items && most <= kMaxPiecesPerRow;
    // Every wave takes an average piece's time, and the longest may begin last.
    costs[warp] = fits ? waves * (average + kOverheadKeys) + max(longest - average, 0.0f) : INFINITY;
  }
  device::sync_block();
  int best = kWarps - 1;  // no piece is cut: always fits
  for (int choice = kWarps - 1; choice >= 0; --choice) {
    if (costs[choice] < costs[best]) best = choice;
  }
  const int chosen = piece_length(best);

  // Where each row's pieces go: a running sum over rows.
  int before = 0;
  for (int first = 0; first < p.num_seqs; first += kThreads) {
    const int seq = first + thread;
    int begin = 0, end = 0;
    if (seq < p.num_seqs) find_span(p, seq, begin, end);
    const int count = divide_up(end - begin, chosen);
    int position = count;
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
      const int other = device::shuffle_up(position, delta);
      if (lane >= delta) position += other;
    }
    if (lane == 31) totals[warp] = position;
    device::sync_block();
    int sum = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) position += sum;
      sum += totals[w];
    }
    for (int i = 0; i < count; ++i) {
      const int from = begin + i * chosen;
      p.items[1 + before + position - count + i] =
          make_int4(seq, from, min(from + chosen, end), i | count << 16);
    }
    before += sum;
    device::sync_block();  // totals are written again
  }
  if (thread == 0) p.items[0] = make_int4(before, chosen, 0, 0);
}

}  // namespace

cudaError_t launch_plan(const ps_cuda_decode_plan& plan, const ps_cuda_rows& rows, int grid_heads, int window,
                        cudaStream_t stream) {
  PlanParameters p;
  p.items = reinterpret_cast<int4*>(plan.items);
  p.max_items = static_cast<int>(plan.max_items);
  p.seq_lens = rows.seq_lens;
  p.query_start_loc = rows.query_start_loc;
  p.num_seqs = static_cast<int>(rows.num_seqs);
  p.grid_heads = grid_heads;
  p.resident_ctas = static_cast<int>(plan.resident_ctas);
  p.window = window;
  return device::launch(plan_decode, dim3(1), dim3(kThreads), 2 * kWarps * sizeof(int), stream, p);
}

}  // namespace ps
