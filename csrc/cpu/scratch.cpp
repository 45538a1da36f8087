#include "scratch.h"

#include <cstdlib>

namespace ps {
namespace {

struct Buffer {
  void* data = nullptr;
  size_t bytes = 0;
  ~Buffer() { std::free(data); }
};

thread_local Buffer t_buffers[3];

}  // namespace

void* thread_scratch(int slot, size_t bytes) {
  Buffer& buffer = t_buffers[slot];
  if (buffer.bytes < bytes) {
    std::free(buffer.data);
    const size_t rounded = (bytes + bytes / 2 + 4095) / 4096 * 4096;
    buffer.data = std::aligned_alloc(4096, rounded);
    buffer.bytes = buffer.data != nullptr ? rounded : 0;
  }
  return buffer.data;
}

}  // namespace ps
