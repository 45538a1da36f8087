// Failures: a code to the caller, a text for ps_cuda_last_error().
#pragma once

#include "device.cuh"
#include "pagedserve_cuda.h"

namespace ps {

// Sets this thread's error text (printf style) and returns `status`.
int fail(int status, const char* format, ...) __attribute__((format(printf, 2, 3)));

// The status of what the CUDA runtime returned; a machine without a card gets its own.
int check(cudaError_t error, const char* what);

}  // namespace ps
