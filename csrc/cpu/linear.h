// out = x @ weight.T + bias + residual over packed weights: what linear.cpp checks and the kernels take.
#pragma once

#include <cstdint>

#include "isa.h"
#include "linear_format.h"
#include "pagedserve.h"

namespace ps {

struct LinearArgs {
  float* out;
  int64_t out_stride;
  const float* x;
  int64_t x_stride;
  int64_t num_rows;
  ps_linear_weight weight;
  const float* bias;      // may be null
  const float* residual;  // may be null, may be out
  int64_t residual_stride;

  void skip_rows(int64_t count) {
    out += count * out_stride;
    x += count * x_stride;
    if (residual != nullptr) residual += count * residual_stride;
    num_rows -= count;
  }
};

// A quant type of GGUF files: blocks of block_len numbers in block_bytes bytes; they fit `format` without loss.
struct GgmlType {
  int id;
  int format;
  int block_len;
  int block_bytes;
};

static constexpr GgmlType kGgmlTypes[] = {
    {2, PS_LINEAR_INT4_SYM, 32, 18},      // Q4_0
    {3, PS_LINEAR_INT4, 32, 20},          // Q4_1
    {6, PS_LINEAR_INT8, 32, 22},          // Q5_0
    {7, PS_LINEAR_INT8_MIN, 32, 24},      // Q5_1
    {8, PS_LINEAR_INT8, 32, 34},          // Q8_0
    {11, PS_LINEAR_INT8_G16, 256, 110},   // Q3_K
    {12, PS_LINEAR_INT4_F32, 256, 144},   // Q4_K
    {13, PS_LINEAR_INT8_MIN, 256, 176},   // Q5_K
    {14, PS_LINEAR_INT8_G16, 256, 210},   // Q6_K
    {20, PS_LINEAR_INT8, 32, 18},         // IQ4_NL
    {23, PS_LINEAR_INT8_G16, 256, 136},   // IQ4_XS
    {39, PS_LINEAR_INT8_G16, 32, 17},     // MXFP4
};

static inline const GgmlType* find_ggml_type(int id) {
  for (const GgmlType& type : kGgmlTypes) {
    if (type.id == id) return &type;
  }
  return nullptr;
}

// In linear.cpp: PS_OK, or the status of a failure.
int check_weight(const ps_linear_weight* weight);

PS_FOR_EACH_DOT_ISA(void linear(const LinearArgs& args, int* status);)

PS_FOR_EACH_ISA(
    void linear_pack(const ps_linear_weight& weight, int64_t first_row, int64_t num_rows, const void* rows,
                     int64_t row_stride, int dtype);

    void linear_pack_ggml(const ps_linear_weight& weight, int64_t first_row, int64_t num_rows, const void* rows,
                          int64_t row_bytes, const GgmlType& type);

    void linear_rows(float* out, int64_t out_stride, const ps_linear_weight& weight, const int64_t* row_ids,
                     int64_t num_rows);

    void ggml_rows(float* out, int64_t out_stride, const void* rows, int64_t row_bytes, int64_t in_features,
                   const GgmlType& type, const int64_t* row_ids, int64_t num_rows);)

}  // namespace ps
