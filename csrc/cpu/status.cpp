#include "status.h"

#include <cstdarg>
#include <cstdio>

#include "pagedserve.h"

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

}  // namespace ps

extern "C" {

int ps_abi_version(void) { return PS_ABI_VERSION; }

const char* ps_last_error(void) { return ps::t_error; }

}  // extern "C"
