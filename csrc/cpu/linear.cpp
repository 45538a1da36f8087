// The C ABI of packed linear weights: checks, then the current instruction set's kernels.
#include "linear.h"

#include <cstdint>

#include "status.h"

using ps::check_weight;
using ps::fail;

namespace {

constexpr int kNumFormats = sizeof ps::kLinearFormats / sizeof ps::kLinearFormats[0];

int check_shape(int format, int64_t out_features, int64_t in_features) {
  if (format < 0 || format >= kNumFormats) return fail(PS_INVALID_ARGUMENT, "unknown linear format %d", format);
  if (out_features < 1 || in_features < 1) {
    return fail(PS_INVALID_ARGUMENT, "a matrix of %lld x %lld", (long long)out_features, (long long)in_features);
  }
  if (ps::kLinearFormats[format].code_bits > 0 && in_features % ps::kGroup != 0) {
    return fail(PS_INVALID_ARGUMENT, "in_features is %lld: integer formats need a multiple of %d",
                (long long)in_features, (int)ps::kGroup);
  }
  return PS_OK;
}

int check_part(const ps_linear_weight* weight, int64_t first_row, int64_t num_rows) {
  if (const int status = check_weight(weight)) return status;
  if (first_row < 0 || num_rows < 0 || first_row + num_rows > weight->out_features) {
    return fail(PS_INVALID_ARGUMENT, "rows %lld to %lld of a matrix of %lld rows", (long long)first_row,
                (long long)(first_row + num_rows), (long long)weight->out_features);
  }
  return PS_OK;
}

int check_ggml_rows(const ps::GgmlType& type, int64_t row_bytes, int64_t in_features) {
  if (in_features % type.block_len == 0 && row_bytes >= in_features / type.block_len * type.block_bytes) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "rows of %lld bytes do not hold %lld numbers of GGML type %d", (long long)row_bytes,
              (long long)in_features, type.id);
}

int check_row_ids(const int64_t* row_ids, int64_t num_rows, int64_t table_rows) {
  for (int64_t i = 0; i < num_rows; ++i) {
    if (row_ids[i] < 0 || row_ids[i] >= table_rows) {
      return fail(PS_INVALID_ARGUMENT, "row_ids[%lld] is %lld, the matrix has %lld rows", (long long)i,
                  (long long)row_ids[i], (long long)table_rows);
    }
  }
  return PS_OK;
}

}  // namespace

int ps::check_weight(const ps_linear_weight* weight) {
  if (const int status = check_shape(weight->format, weight->out_features, weight->in_features)) return status;
  if (weight->data == nullptr || reinterpret_cast<uintptr_t>(weight->data) % 64 != 0) {
    return fail(PS_INVALID_ARGUMENT, "packed weights must be aligned to 64 bytes");
  }
  return PS_OK;
}

extern "C" {

int64_t ps_linear_packed_bytes(int format, int64_t out_features, int64_t in_features) {
  if (check_shape(format, out_features, in_features) != PS_OK) return 0;
  return (out_features + ps::kPanel - 1) / ps::kPanel * ps::panel_bytes(ps::kLinearFormats[format], in_features);
}

int ps_linear_format_of_ggml_type(int ggml_type) {
  const ps::GgmlType* type = ps::find_ggml_type(ggml_type);
  return type == nullptr ? -1 : type->format;
}

int ps_linear_pack(const ps_linear_weight* weight, int64_t first_row, int64_t num_rows, const void* rows,
                   int64_t row_stride, int dtype) {
  if (const int status = check_part(weight, first_row, num_rows)) return status;
  if (dtype < PS_F32 || dtype > PS_F16) return fail(PS_INVALID_ARGUMENT, "unknown dtype %d", dtype);
  switch (weight->format) {
    case PS_LINEAR_INT8_G16:
    case PS_LINEAR_INT8_MIN:
    case PS_LINEAR_INT4_F32:
      return fail(PS_INVALID_ARGUMENT, "format %d is filled from GGUF rows only", weight->format);
  }
  PS_CALL(linear_pack, *weight, first_row, num_rows, rows, row_stride, dtype);
  return PS_OK;
}

int ps_linear_pack_ggml(const ps_linear_weight* weight, int64_t first_row, int64_t num_rows, const void* rows,
                        int64_t row_bytes, int ggml_type) {
  if (const int status = check_part(weight, first_row, num_rows)) return status;
  const ps::GgmlType* type = ps::find_ggml_type(ggml_type);
  if (type == nullptr || type->format != weight->format) {
    return fail(PS_INVALID_ARGUMENT, "GGML type %d does not go into format %d", ggml_type, weight->format);
  }
  if (const int status = check_ggml_rows(*type, row_bytes, weight->in_features)) return status;
  PS_CALL(linear_pack_ggml, *weight, first_row, num_rows, rows, row_bytes, *type);
  return PS_OK;
}

int ps_linear_rows(float* out, int64_t out_stride, const ps_linear_weight* weight, const int64_t* row_ids,
                   int64_t num_rows) {
  if (const int status = check_weight(weight)) return status;
  if (const int status = check_row_ids(row_ids, num_rows, weight->out_features)) return status;
  PS_CALL(linear_rows, out, out_stride, *weight, row_ids, num_rows);
  return PS_OK;
}

int ps_ggml_rows(float* out, int64_t out_stride, const void* rows, int64_t row_bytes, int64_t table_rows,
                 int64_t in_features, int ggml_type, const int64_t* row_ids, int64_t num_rows) {
  const ps::GgmlType* type = ps::find_ggml_type(ggml_type);
  if (type == nullptr) return fail(PS_UNSUPPORTED, "GGML type %d is not read here", ggml_type);
  if (const int status = check_ggml_rows(*type, row_bytes, in_features)) return status;
  if (const int status = check_row_ids(row_ids, num_rows, table_rows)) return status;
  PS_CALL(ggml_rows, out, out_stride, rows, row_bytes, in_features, *type, row_ids, num_rows);
  return PS_OK;
}

int ps_linear(float* out, int64_t out_stride, const float* x, int64_t x_stride, int64_t num_rows,
              const ps_linear_weight* weight, const float* bias, const float* residual, int64_t residual_stride) {
  if (const int status = check_weight(weight)) return status;
  if (num_rows < 1) return num_rows == 0 ? PS_OK : fail(PS_INVALID_ARGUMENT, "%lld rows", (long long)num_rows);
  int status = PS_OK;
  const ps::LinearArgs args{out, out_stride, x, x_stride, num_rows, *weight, bias, residual, residual_stride};
  PS_CALL_DOT(linear, args, &status);
  return status;
}

}  // extern "C"
