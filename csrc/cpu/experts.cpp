// The C ABI of mixtures of experts: checks, then rows brought together by their experts, then the kernels.
#include "experts.h"

#include <algorithm>

#include "linear.h"
#include "scratch.h"
#include "status.h"

using ps::fail;

namespace {

// Working memory of one pass, about; more rows take several, each of which reads the experts' weights again.
constexpr int64_t kPassBytes = int64_t{96} << 20;

int check_matrix(const ps_linear_weight& weight, int64_t out_features, int64_t in_features, int64_t expert) {
  if (const int status = ps::check_weight(&weight)) return status;
  if (weight.out_features == out_features && weight.in_features == in_features) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "a matrix of expert %lld is %lld x %lld, not %lld x %lld", (long long)expert,
              (long long)weight.out_features, (long long)weight.in_features, (long long)out_features,
              (long long)in_features);
}

int check_expert(const ps::ExpertWeights& experts, int64_t expert) {
  const int64_t hidden = experts.hidden_size(), inner = experts.expert_size();
  for (int64_t part = 0; part < 2; ++part) {
    if (const int status = check_matrix(experts.gate_up[2 * expert + part], inner, hidden, expert)) return status;
  }
  return check_matrix(experts.down[expert], hidden, inner, expert);
}

// Fills starts [num_experts + 1] and pairs [num_pairs]; those of one expert stay in their order.
int group_by_expert(const int64_t* chosen, int64_t num_pairs, const ps::ExpertWeights& experts, int64_t* starts,
                    int64_t* pairs) {
  std::fill(starts, starts + experts.num_experts + 1, 0);
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    if (chosen[pair] < 0 || chosen[pair] >= experts.num_experts) {
      return fail(PS_INVALID_ARGUMENT, "a token has expert %lld, there are %lld", (long long)chosen[pair],
                  (long long)experts.num_experts);
    }
    ++starts[chosen[pair] + 1];
  }
  for (int64_t expert = 0; expert < experts.num_experts; ++expert) {
    if (starts[expert + 1] > 0) {
      if (const int status = check_expert(experts, expert)) return status;
    }
    starts[expert + 1] += starts[expert];
  }
  for (int64_t pair = 0; pair < num_pairs; ++pair) pairs[starts[chosen[pair]]++] = pair;
  // Each start has moved to its expert's end, where the next one begins.
  for (int64_t expert = experts.num_experts; expert > 0; --expert) starts[expert] = starts[expert - 1];
  starts[0] = 0;
  return PS_OK;
}

}  // namespace

extern "C" {

int ps_route(float* weights, int64_t* chosen, const float* logits, int64_t logits_stride, int64_t num_rows,
             int64_t num_experts, int64_t top_k, int renormalize) {
  if (top_k < 1 || top_k > num_experts) {
    return fail(PS_INVALID_ARGUMENT, "top_k is %lld of %lld experts", (long long)top_k, (long long)num_experts);
  }
  int status = PS_OK;
  PS_CALL(route, weights, chosen, logits, logits_stride, num_rows, num_experts, top_k, renormalize != 0, &status);
  return status;
}

int ps_experts_sum(float* out, int64_t out_stride, const float* x, int64_t x_stride, int64_t num_rows,
                   const float* weights, const int64_t* chosen, int64_t top_k, const ps_linear_weight* gate_up,
                   const ps_linear_weight* down, int64_t num_experts, int activation) {
  if (num_experts < 1 || top_k < 1) {
    return fail(PS_INVALID_ARGUMENT, "top_k is %lld of %lld experts", (long long)top_k, (long long)num_experts);
  }
  if (activation < PS_SILU || activation > PS_RELU) {
    return fail(PS_INVALID_ARGUMENT, "unknown activation %d", activation);
  }
  const ps::ExpertWeights experts{gate_up, down, num_experts};
  if (const int status = check_expert(experts, 0)) return status;
  const int64_t pair_bytes = 6 * (experts.hidden_size() + experts.expert_size());
  const int64_t pass_rows = std::max<int64_t>(kPassBytes / (pair_bytes * top_k), 1);
  const int64_t most_pairs = std::min(pass_rows, num_rows) * top_k;
  auto* starts = static_cast<int64_t*>(
      ps::thread_scratch(ps::kScratchGroups, static_cast<size_t>(num_experts + 1 + most_pairs) * 8));
  if (starts == nullptr) return fail(PS_OUT_OF_MEMORY, "no memory for the experts of %lld rows", (long long)num_rows);
  int64_t* pairs = starts + num_experts + 1;
  for (int64_t first = 0; first < num_rows; first += pass_rows) {
    const int64_t rows = std::min(pass_rows, num_rows - first);
    if (const int status = group_by_expert(chosen + first * top_k, rows * top_k, experts, starts, pairs)) return status;
    ps::ExpertsArgs args{};
    args.out = out + first * out_stride;
    args.out_stride = out_stride;
    args.x = x + first * x_stride;
    args.x_stride = x_stride;
    args.num_rows = rows;
    args.weights = weights + first * top_k;
    args.top_k = top_k;
    args.experts = experts;
    args.activation = activation;
    args.pairs = pairs;
    args.starts = starts;
    int status = PS_OK;
    PS_CALL_DOT(experts, args, &status);
    if (status != PS_OK) return fail(status, "no memory for the activations of %lld rows", (long long)rows);
  }
  return PS_OK;
}

}  // extern "C"
