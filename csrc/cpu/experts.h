// Mixtures of experts: what experts.cpp checks and groups, and the kernels take.
#pragma once

#include <cstdint>

#include "isa.h"
#include "pagedserve.h"

namespace ps {

// The matrices, as in ps_experts_sum.
struct ExpertWeights {
  const ps_linear_weight* gate_up;
  const ps_linear_weight* down;
  int64_t num_experts;

  int64_t hidden_size() const { return down->out_features; }
  int64_t expert_size() const { return down->in_features; }
};

// A row's choice of an expert is a pair; its number is row * top_k + rank.
struct ExpertsArgs {
  float* out;
  int64_t out_stride;
  const float* x;
  int64_t x_stride;
  int64_t num_rows;
  const float* weights;  // [num_rows, top_k]
  int64_t top_k;
  ExpertWeights experts;
  int activation;         // a ps_activation
  const int64_t* pairs;   // [num_rows * top_k], in the order of their experts
  const int64_t* starts;  // [num_experts + 1], where each expert's pairs begin

  int64_t num_pairs() const { return num_rows * top_k; }
};

PS_FOR_EACH_ISA(
    void route(float* weights, int64_t* experts, const float* logits, int64_t logits_stride, int64_t num_rows,
               int64_t num_experts, int64_t top_k, bool renormalize, int* status);)

PS_FOR_EACH_DOT_ISA(void experts(const ExpertsArgs& args, int* status);)

}  // namespace ps
