// Failures: a code to the caller, a text for ps_last_error().
#pragma once

namespace ps {

// Sets this thread's error text (printf style) and returns `status`.
int fail(int status, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace ps
