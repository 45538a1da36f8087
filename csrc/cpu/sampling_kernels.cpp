// From logits to tokens: greedy, or a draw after temperature, min_p, top_k and top_p.
//
// The sets that top_k and top_p keep are those of the values that reach a threshold, so tied tokens stay or go
// together. The threshold is found by selection among the likeliest tokens, which blocks' maxima lead to: no sort, and
// the vocabulary is read twice. The draw is the inverse CDF over the kept tokens in the order of their ids. One row is
// one piece of work: its sums run in one order whatever runs beside it.
#include "kernels.h"
#include "scratch.h"
#include "status.h"
#include "thread_pool.h"
#include "vec.h"

namespace ps {
namespace PS_ISA {
namespace {

constexpr int64_t kBlock = 128;
constexpr float kInfinity = __builtin_inff();
constexpr float kLargest = 1e30f;  // stands for +inf

// NaN counts as -inf, +inf as a huge number. max() drops a NaN that is its first argument.
PS_INLINE Vec usable(Vec x) { return min(max(x, set1(-kInfinity)), set1(kLargest)); }
PS_INLINE float usable(float x) { return x != x ? -kInfinity : x > kLargest ? kLargest : x; }

// How far below the best the candidates are looked for, before everywhere.
constexpr float kDepths[] = {1.f, 2.f, 4.f, 6.f, 9.f, 14.f};
constexpr int kNumDepths = sizeof kDepths / sizeof kDepths[0];
// More than what the order of additions can change in a sum of masses.
constexpr double kSlack = 1 + 1e-5;

struct Candidate {
  float value;  // scaled
  float mass;   // e^(value - maximum)
};

struct Scratch {
  float* block_max;     // [num_blocks], usable logits
  double* block_mass;   // [num_blocks]
  int32_t* ids;         // [vocab], of candidates, ascending
  Candidate* found;     // [vocab]
  Candidate* selected;  // [vocab], where selection moves them about
};

struct Row {
  const float* logits;
  int64_t vocab;
  float temperature;
  float maximum;  // scaled
  float floor;    // scaled values below it are out
};

int64_t num_blocks(int64_t vocab) { return (vocab + kBlock - 1) / kBlock; }
int64_t block_end(int64_t block, int64_t vocab) { return (block + 1) * kBlock < vocab ? (block + 1) * kBlock : vocab; }

float max_of_block(const float* logits, int64_t begin, int64_t end) {
  Vec best = set1(-kInfinity);
  int64_t i = begin;
  for (; i + kWidth <= end; i += kWidth) best = max(load(logits + i), best);
  float result = reduce_max(best);
  for (; i < end; ++i) result = logits[i] > result ? logits[i] : result;
  return result > kLargest ? kLargest : result;
}

// The place of the first largest logit, or -1; the maxima of blocks on the way if block_max is not null.
int64_t find_best(const float* logits, int64_t vocab, float* block_max, float* best) {
  *best = -kInfinity;
  int64_t best_block = -1;
  for (int64_t block = 0; block < num_blocks(vocab); ++block) {
    const float maximum = max_of_block(logits, block * kBlock, block_end(block, vocab));
    if (block_max != nullptr) block_max[block] = maximum;
    if (maximum > *best) {
      *best = maximum;
      best_block = block;
    }
  }
  if (best_block < 0) return -1;
  int64_t i = best_block * kBlock;
  while (usable(logits[i]) != *best) ++i;
  return i;
}

// ---- random rows ---------------------------------------------------------------------------------------------

PS_INLINE Vec mass_of(const Row& row, Vec logits) {
  const Vec scaled = usable(logits) / set1(row.temperature);
  return zero_where_less(scaled, set1(row.floor), exp(scaled - set1(row.maximum)));
}

// Masses of one block; what lies beyond its end is zero.
void block_masses(const Row& row, int64_t block, float* masses) {
  const int64_t begin = block * kBlock, end = block_end(block, row.vocab);
  int64_t i = begin;
  for (; i + kWidth <= end; i += kWidth) store(masses + i - begin, mass_of(row, load(row.logits + i)));
  if (i < end) {
    const int tail = static_cast<int>(end - i);
    store_partial(masses + i - begin, mass_of(row, load_partial(row.logits + i, tail)), tail);
  }
  for (i = end; i < begin + kBlock; ++i) masses[i - begin] = 0.f;
}

double sum_masses(const Row& row, const Scratch& scratch) {
  double total = 0;
  for (int64_t block = 0; block < num_blocks(row.vocab); ++block) {
    double sum = 0;
    if (scratch.block_max[block] / row.temperature >= row.floor) {
      alignas(64) float masses[kBlock];
      block_masses(row, block, masses);
      Vec sums = zero();
      for (int64_t i = 0; i < kBlock; i += kWidth) sums = sums + load(masses + i);
      sum = reduce_add(sums);
    }
    scratch.block_mass[block] = sum;
    total += sum;
  }
  return total;
}

// The mass within each of kDepths of the best, and in all.
double sum_by_depth(const Row& row, const Scratch& scratch, double (&within)[kNumDepths]) {
  for (double& sum : within) sum = 0;
  double total = 0;
  for (int64_t block = 0; block < num_blocks(row.vocab); ++block) {
    if (scratch.block_max[block] / row.temperature < row.floor) continue;
    const int64_t begin = block * kBlock, end = block_end(block, row.vocab);
    Vec sums[kNumDepths + 1];
    for (Vec& sum : sums) sum = zero();
    for (int64_t i = begin; i < end; i += kWidth) {
      const Vec logits = i + kWidth <= end ? load(row.logits + i) : load_partial(row.logits + i, static_cast<int>(end - i));
      Vec mass = mass_of(row, logits);
      if (i + kWidth > end) mass = keep_lanes(mass, 0, static_cast<int>(end - i), 0.f);
      const Vec scaled = usable(logits) / set1(row.temperature);
      for (int d = 0; d < kNumDepths; ++d) {
        sums[d] = sums[d] + zero_where_less(scaled, set1(row.maximum - kDepths[d]), mass);
      }
      sums[kNumDepths] = sums[kNumDepths] + mass;
    }
    for (int d = 0; d < kNumDepths; ++d) within[d] += reduce_add(sums[d]);
    total += reduce_add(sums[kNumDepths]);
  }
  return total;
}

// Below the total even where the product rounds up to it, so that the step that is found is one that rises.
double target_of(double uniform, double total) {
  const double target = uniform * total;
  return target < total ? target : total * (1 - 0x1p-53);
}

int64_t draw_from_all(const Row& row, double total, double uniform, const Scratch& scratch) {
  double target = target_of(uniform, total);
  int64_t block = 0, chosen = -1;
  for (; block < num_blocks(row.vocab); ++block) {
    if (scratch.block_mass[block] <= 0) continue;
    chosen = block;
    if (target < scratch.block_mass[block]) break;
    target -= scratch.block_mass[block];
  }
  alignas(64) float masses[kBlock];
  block_masses(row, chosen, masses);
  int64_t token = -1;
  for (int64_t i = 0; i < kBlock; ++i) {
    if (masses[i] <= 0) continue;
    token = chosen * kBlock + i;  // the block's last possible token, should its sum have been rounded up
    if (target < masses[i]) break;
    target -= masses[i];
  }
  return token;
}

// The tokens whose scaled value is at least `limit`, in order; returns how many.
int64_t collect(const Row& row, float limit, const Scratch& scratch) {
  int64_t count = 0;
  for (int64_t block = 0; block < num_blocks(row.vocab); ++block) {
    if (scratch.block_max[block] / row.temperature < limit) continue;
    alignas(64) float masses[kBlock];
    block_masses(row, block, masses);
    const int64_t begin = block * kBlock, end = block_end(block, row.vocab);
    for (int64_t i = begin; i < end; ++i) {
      const float value = usable(row.logits[i]) / row.temperature;
      if (!(value >= limit) || value == -kInfinity) continue;
      scratch.ids[count] = static_cast<int32_t>(i);
      scratch.found[count++] = {value, masses[i - begin]};
    }
  }
  return count;
}

// The smallest value v above which there is less than `limit` of mass (or, counting, fewer than `limit` tokens); at
// least the largest value. Moves the candidates about.
float select_threshold(Candidate* from, int64_t count, double limit, bool by_count) {
  double above = 0;  // of what is larger than all that is left
  float threshold = kInfinity;
  while (count > 0) {
    // The middle of three, to the front: [0, less) smaller than it, [less, i) equal, [i, greater) unknown.
    float a = from[0].value, b = from[count / 2].value, c = from[count - 1].value;
    const float pivot = a < b ? (b < c ? b : a < c ? c : a) : (a < c ? a : b < c ? c : b);
    int64_t less = 0, i = 0, greater = count;
    double mass_greater = 0, mass_equal = 0;
    while (i < greater) {
      const Candidate here = from[i];
      const double weight = by_count ? 1.0 : static_cast<double>(here.mass);
      if (here.value < pivot) {
        from[i++] = from[less];
        from[less++] = here;
      } else if (here.value > pivot) {
        mass_greater += weight;
        from[i] = from[--greater];
        from[greater] = here;
      } else {
        mass_equal += weight;
        ++i;
      }
    }
    if (above + mass_greater >= limit && greater < count) {
      from += greater;
      count -= greater;
      continue;
    }
    threshold = pivot;
    above += mass_greater + mass_equal;
    if (above >= limit) break;
    count = less;
  }
  return threshold;
}

double mass_from(const Candidate* found, int64_t count, float threshold) {
  double total = 0;
  for (int64_t i = 0; i < count; ++i) total += found[i].value >= threshold ? found[i].mass : 0.f;
  return total;
}

Candidate* copy_from(const Scratch& scratch, int64_t count, float threshold, int64_t* num_copied) {
  *num_copied = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (scratch.found[i].value >= threshold) scratch.selected[(*num_copied)++] = scratch.found[i];
  }
  return scratch.selected;
}

int64_t draw_truncated(const Row& row, int64_t top_k, double top_p, double uniform, const Scratch& scratch) {
  int64_t count = 0;
  double wanted = 0;
  if (top_k > 0) {
    for (int d = 0; count < top_k; ++d) {
      const bool is_all = d == kNumDepths || row.maximum - kDepths[d] <= row.floor;
      count = collect(row, is_all ? row.floor : row.maximum - kDepths[d], scratch);
      if (is_all) break;
    }
  } else {
    // Without a top_k, top_p is a share of everything.
    double within[kNumDepths];
    wanted = top_p * sum_by_depth(row, scratch, within);
    int d = 0;
    while (d < kNumDepths && within[d] <= wanted * kSlack) ++d;
    count = collect(row, d == kNumDepths || row.maximum - kDepths[d] <= row.floor ? row.floor : row.maximum - kDepths[d],
                    scratch);
  }
  int64_t num_left;
  float threshold = -kInfinity;
  double limit = wanted;
  if (top_k > 0) {
    Candidate* all = copy_from(scratch, count, threshold, &num_left);
    threshold = select_threshold(all, num_left, static_cast<double>(top_k), true);
    limit = top_p * mass_from(scratch.found, count, threshold);
  }
  if (top_p < 1) {
    Candidate* left = copy_from(scratch, count, threshold, &num_left);
    threshold = select_threshold(left, num_left, limit, false);
  }
  double target = target_of(uniform, mass_from(scratch.found, count, threshold));
  int64_t token = -1;
  for (int64_t i = 0; i < count; ++i) {
    if (scratch.found[i].value < threshold || scratch.found[i].mass <= 0) continue;
    token = scratch.ids[i];
    if (target < scratch.found[i].mass) break;
    target -= scratch.found[i].mass;
  }
  return token;
}

bool carve(Scratch& scratch, int64_t vocab) {
  const int64_t blocks = num_blocks(vocab);
  auto* memory = static_cast<char*>(thread_scratch(kScratchPiece, blocks * 16 + vocab * 20));
  if (memory == nullptr) return false;
  scratch.block_mass = reinterpret_cast<double*>(memory);
  scratch.block_max = reinterpret_cast<float*>(memory + blocks * 8);
  scratch.ids = reinterpret_cast<int32_t*>(memory + blocks * 16);
  scratch.found = reinterpret_cast<Candidate*>(memory + blocks * 16 + vocab * 4);
  scratch.selected = scratch.found + vocab;
  return true;
}

}  // namespace

void sample(const float* logits, int64_t logits_stride, int64_t num_rows, int64_t vocab, const float* temperature,
            const float* min_p, const int64_t* top_k, const double* top_p, const double* uniform, int64_t* token_ids,
            int* status) {
  parallel_for(num_rows, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      Row row{logits + i * logits_stride, vocab, temperature[i], 0.f, -kInfinity};
      float best;
      if (row.temperature <= 0) {
        token_ids[i] = find_best(row.logits, vocab, nullptr, &best);
        continue;
      }
      Scratch scratch;
      if (!carve(scratch, vocab)) {
        __atomic_store_n(status, PS_OUT_OF_MEMORY, __ATOMIC_RELAXED);
        return;
      }
      token_ids[i] = find_best(row.logits, vocab, scratch.block_max, &best);
      if (token_ids[i] < 0) continue;
      row.maximum = best / row.temperature;
      if (min_p[i] > 0) row.floor = row.maximum + __builtin_logf(min_p[i]);
      const bool is_truncated = (top_k[i] > 0 && top_k[i] < vocab) || top_p[i] < 1;
      token_ids[i] = is_truncated ? draw_truncated(row, top_k[i], top_p[i], uniform[i], scratch)
                                  : draw_from_all(row, sum_masses(row, scratch), uniform[i], scratch);
    }
  });
  if (*status == PS_OUT_OF_MEMORY) fail(PS_OUT_OF_MEMORY, "no memory to sample from %lld tokens", (long long)vocab);
}

}  // namespace PS_ISA
}  // namespace ps
