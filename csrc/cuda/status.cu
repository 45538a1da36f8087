#include "status.h"

#include <cstdarg>
#include <cstdio>

namespace ps {
namespace {
thread_local char t_error[256] = "";
}

int fail(int status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(t_error, sizeof t_error, format, arguments);
  va_end(arguments);
  return status;
}

int check(cudaError_t error, const char* what) {
  switch (error) {
    case cudaSuccess:
      return PS_CUDA_OK;
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
      return fail(PS_CUDA_NO_DEVICE, "no CUDA device: %s", cudaGetErrorString(error));
    case cudaErrorMemoryAllocation:
      return fail(PS_CUDA_OUT_OF_MEMORY, "%s: %s", what, cudaGetErrorString(error));
    default:
      return fail(PS_CUDA_FAILED, "%s: %s", what, cudaGetErrorString(error));
  }
}

}  // namespace ps

extern "C" {

int ps_cuda_abi_version(void) { return PS_CUDA_ABI_VERSION; }

const char* ps_cuda_last_error(void) { return ps::t_error; }

int ps_cuda_device_count(void) {
  int count = 0;
  return ps::check(cudaGetDeviceCount(&count), "counting the devices") == PS_CUDA_OK ? count : 0;
}

}  // extern "C"
