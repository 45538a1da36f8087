// The one thread pool of the process.
#pragma once

#include <cstdint>

namespace ps {

using RangeFunction = void (*)(const void* context, int64_t begin, int64_t end, int thread);

// Calls function(context, begin, end, thread) on pieces of at most `grain` items until [0, num_items) is done.
// A thread takes pieces from its own range, in order, then from those of others: one that the system holds back keeps
// only its current piece.
// `thread` is in [0, num_threads()) and no two pieces run at once under one number, so it may index scratch.
// From inside a piece the call runs on the spot, under the number of the piece.
void parallel_for(int64_t num_items, int64_t grain, RangeFunction function, const void* context);

// While it lives, the calling thread owns the pool: its calls of parallel_for find the threads awake and nobody else's
// work between them.
class PoolRegion {
 public:
  PoolRegion();
  ~PoolRegion();
  PoolRegion(const PoolRegion&) = delete;
  PoolRegion& operator=(const PoolRegion&) = delete;
};

int num_threads();
void set_num_threads(int num_threads);

// Internal linkage on purpose: each instruction set's object gets its own copy.
template <class Body>
static inline void parallel_for(int64_t num_items, int64_t grain, const Body& body) {
  parallel_for(
      num_items, grain,
      [](const void* context, int64_t begin, int64_t end, int thread) {
        (*static_cast<const Body*>(context))(begin, end, thread);
      },
      &body);
}

}  // namespace ps
