// Working memory that a thread keeps between calls.
#pragma once

#include <cstddef>

namespace ps {

// At least `bytes` bytes, aligned to 64; contents undefined; valid until this thread's next call with the same
// slot. nullptr when memory is out. A kernel that holds two at once uses two slots.
void* thread_scratch(int slot, size_t bytes);

constexpr int kScratchPiece = 0;  // inside a piece of parallel_for
constexpr int kScratchCall = 1;   // around parallel_for, shared by its pieces
constexpr int kScratchGroups = 2;  // around a call that uses the others

}  // namespace ps
