#include "cuda_emulation.h"

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#define PS_ISA emulated
#include "../cpu/half.h"
#include "pagedserve_cuda.h"

namespace ps::emulation {

Place g_place;

namespace {

constexpr size_t kStackBytes = 128 * 1024;
constexpr int kWarpSize = 32;

enum class State { ready, waiting, done };

struct PendingCopy {
  uint64_t to;
  const void* from;
  int bytes;
  bool valid;
  int group;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  State state;
  std::vector<PendingCopy> copies;
  int groups;  // committed
};

struct Warp {
  void* operands[kWarpSize];
  void (*compute)(void* const (&operands)[kWarpSize]);
  int arrived;
};

// One grid runs at a time; all of this belongs to it.
std::mutex g_one_grid;
std::vector<std::unique_ptr<Fiber>> g_fibers;
std::vector<Warp> g_warps;
ucontext_t g_scheduler;
int g_running, g_num_threads, g_at_barrier;
unsigned char* g_shared;
const std::function<void()>* g_body;

// What a test chooses.
int g_order = 0;  // 0: ascending, 1: descending, 2: at random
bool g_copies_land_early = false;
std::mt19937 g_random{0};
int64_t g_bank_conflicts = 0;

[[noreturn]] void give_up(const char* why) {
  std::fprintf(stderr, "CUDA emulation: %s (block %u, %u, thread %d)\n", why, g_place.block.x, g_place.block.y,
               g_running);
  std::abort();
}

void yield() { swapcontext(&g_fibers[g_running]->context, &g_scheduler); }

void fiber_main() {
  (*g_body)();
  g_fibers[g_running]->state = State::done;
  yield();
}

void order_threads(std::vector<int>& order) {
  if (g_order == 2) std::shuffle(order.begin(), order.end(), g_random);
}

void run_block() {
  for (int i = 0; i < g_num_threads; ++i) {
    Fiber& fiber = *g_fibers[i];
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
    fiber.state = State::ready;
    fiber.copies.clear();
    fiber.groups = 0;
  }
  for (Warp& warp : g_warps) warp.arrived = 0;
  g_at_barrier = 0;
  std::vector<int> order(g_num_threads);
  for (int i = 0; i < g_num_threads; ++i) order[i] = g_order == 1 ? g_num_threads - 1 - i : i;
  for (int done = 0; done < g_num_threads;) {
    bool moved = false;
    order_threads(order);
    for (const int thread : order) {
      if (g_fibers[thread]->state != State::ready) continue;
      g_running = thread;
      g_place.thread = dim3(thread, 0, 0);
      swapcontext(&g_scheduler, &g_fibers[thread]->context);
      moved = true;
      if (g_fibers[thread]->state == State::done) ++done;
    }
    if (!moved) give_up("threads wait for others that never come");
  }
}

// Memory that ends at a page nobody may touch, and begins close behind another.
class Guarded {
 public:
  explicit Guarded(size_t bytes) : page_(sysconf(_SC_PAGESIZE)) {
    inner_ = (bytes + page_ - 1) / page_ * page_;
    base_ = static_cast<unsigned char*>(
        mmap(nullptr, inner_ + 2 * page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED) give_up("no memory");
    mprotect(base_, page_, PROT_NONE);
    mprotect(base_ + page_ + inner_, page_, PROT_NONE);
    data = base_ + page_ + inner_ - (bytes + 15) / 16 * 16;
  }
  ~Guarded() { munmap(base_, inner_ + 2 * page_); }
  unsigned char* data;

 private:
  size_t page_, inner_;
  unsigned char* base_;
};

void land(const PendingCopy& copy) {
  auto* const to = reinterpret_cast<void*>(copy.to);
  if (copy.valid) {
    std::memcpy(to, copy.from, copy.bytes);
  } else {
    std::memset(to, 0, copy.bytes);
  }
}

}  // namespace

unsigned char* shared_memory() { return g_shared; }

void run_grid(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& body) {
  const std::lock_guard<std::mutex> lock(g_one_grid);
  g_num_threads = block.x;
  while (g_fibers.size() < block.x) g_fibers.emplace_back(new Fiber);
  g_warps.resize((block.x + kWarpSize - 1) / kWarpSize);
  g_body = &body;
  g_place.grid = grid;
  g_place.threads = block;
  std::vector<dim3> blocks;
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) blocks.emplace_back(x, y, 0);
  }
  if (g_order == 1) std::reverse(blocks.begin(), blocks.end());
  if (g_order == 2) std::shuffle(blocks.begin(), blocks.end(), g_random);
  const Guarded shared(shared_bytes);
  g_shared = shared.data;
  for (const dim3& at : blocks) {
    std::memset(g_shared, 0xff, shared_bytes);
    g_place.block = at;
    run_block();
  }
}

void together(void* operands, void (*compute)(void* const (&operands)[kWarpSize])) {
  Warp& warp = g_warps[g_running / kWarpSize];
  const int first = g_running / kWarpSize * kWarpSize;
  if (warp.arrived == 0) warp.compute = compute;
  if (warp.compute != compute) give_up("the lanes of a warp do different things");
  warp.operands[g_running % kWarpSize] = operands;
  if (++warp.arrived < kWarpSize) {
    g_fibers[g_running]->state = State::waiting;
    yield();
    return;
  }
  warp.arrived = 0;
  compute(warp.operands);
  for (int lane = 0; lane < kWarpSize; ++lane) g_fibers[first + lane]->state = State::ready;
}

void sync_block() {
  if (++g_at_barrier < g_num_threads) {
    g_fibers[g_running]->state = State::waiting;
    yield();
    return;
  }
  g_at_barrier = 0;
  for (int i = 0; i < g_num_threads; ++i) {
    if (g_fibers[i]->state == State::done) give_up("a barrier after a thread has ended");
    g_fibers[i]->state = State::ready;
  }
}

void copy_async(uint64_t to, const void* from, int bytes, bool valid) {
  if (to % bytes != 0 || reinterpret_cast<uint64_t>(from) % bytes != 0) give_up("a copy that is not aligned");
  Fiber& fiber = *g_fibers[g_running];
  const PendingCopy copy = {to, from, bytes, valid, fiber.groups};
  if (g_copies_land_early) return land(copy);
  std::memset(reinterpret_cast<void*>(to), 0xff, bytes);
  fiber.copies.push_back(copy);
}

void copy_async_commit() { ++g_fibers[g_running]->groups; }

void copy_async_wait(int pending) {
  Fiber& fiber = *g_fibers[g_running];
  size_t landed = 0;
  while (landed < fiber.copies.size() && fiber.copies[landed].group < fiber.groups - pending) {
    land(fiber.copies[landed++]);
  }
  fiber.copies.erase(fiber.copies.begin(), fiber.copies.begin() + landed);
}

}  // namespace ps::emulation

namespace ps::device {
namespace {

float from_f16(uint32_t bits) { return emulated::to_float(f16{static_cast<uint16_t>(bits)}); }
float from_bf16(uint32_t bits) { return emulated::to_float(bf16{static_cast<uint16_t>(bits)}); }

template <typename T>
uint32_t pack(float low, float high) {
  T halves[2];
  emulated::from_float(low, &halves[0]);
  emulated::from_float(high, &halves[1]);
  return halves[0].bits | static_cast<uint32_t>(halves[1].bits) << 16;
}

struct Matrices {
  uint64_t row;
  uint32_t* out;
};

template <int count, bool transposed>
void load_matrices(void* const (&operands)[32]) {
  for (int m = 0; m < count; ++m) {
    uint16_t matrix[8][8];
    unsigned groups = 0;
    for (int r = 0; r < 8; ++r) {
      const uint64_t row = static_cast<Matrices*>(operands[m * 8 + r])->row;
      if (row % 16 != 0) emulation::give_up("a matrix row that is not aligned");
      std::memcpy(matrix[r], reinterpret_cast<void*>(row), 16);
      groups |= 1u << (row / 16 % 8);
    }
    if (groups != 0xff) ++emulation::g_bank_conflicts;
    for (int lane = 0; lane < 32; ++lane) {
      const int r = lane / 4, c = lane % 4 * 2;
      const uint32_t low = transposed ? matrix[c][r] : matrix[r][c];
      const uint32_t high = transposed ? matrix[c + 1][r] : matrix[r][c + 1];
      static_cast<Matrices*>(operands[lane])->out[m] = low | high << 16;
    }
  }
}

struct Product {
  float* d;
  const uint32_t *a, *b;
};

template <float (*widen)(uint32_t)>
void multiply(void* const (&operands)[32]) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& product = *static_cast<Product*>(operands[lane]);
    const int r = lane / 4, c = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      a[r + i % 2 * 8][c + i / 2 * 8] = widen(product.a[i] & 0xffff);
      a[r + i % 2 * 8][c + i / 2 * 8 + 1] = widen(product.a[i] >> 16);
    }
    for (int i = 0; i < 2; ++i) {
      b[c + i * 8][r] = widen(product.b[i] & 0xffff);
      b[c + i * 8 + 1][r] = widen(product.b[i] >> 16);
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    float* const d = static_cast<Product*>(operands[lane])->d;
    for (int i = 0; i < 4; ++i) {
      const int r = lane / 4 + i / 2 * 8, c = lane % 4 * 2 + i % 2;
      double sum = d[i];
      for (int k = 0; k < 16; ++k) sum += static_cast<double>(a[r][k]) * b[k][c];
      d[i] = static_cast<float>(sum);
    }
  }
}

struct Transposed {
  uint32_t in, out;
};

void transpose(void* const (&operands)[32]) {
  uint16_t matrix[8][8];
  for (int lane = 0; lane < 32; ++lane) {
    const uint32_t x = static_cast<Transposed*>(operands[lane])->in;
    matrix[lane / 4][lane % 4 * 2] = static_cast<uint16_t>(x);
    matrix[lane / 4][lane % 4 * 2 + 1] = static_cast<uint16_t>(x >> 16);
  }
  for (int lane = 0; lane < 32; ++lane) {
    const uint32_t low = matrix[lane % 4 * 2][lane / 4], high = matrix[lane % 4 * 2 + 1][lane / 4];
    static_cast<Transposed*>(operands[lane])->out = low | high << 16;
  }
}

struct Shuffled {
  int x, from, out;
};

void exchange(void* const (&operands)[32]) {
  for (void* const lane : operands) {
    auto& mine = *static_cast<Shuffled*>(lane);
    mine.out = static_cast<Shuffled*>(operands[mine.from])->x;
  }
}

}  // namespace

void load_matrix_x4(uint32_t (&r)[4], SharedAddress row) {
  Matrices operands = {row, r};
  emulation::together(&operands, load_matrices<4, false>);
}

void load_matrix_x2(uint32_t (&r)[2], SharedAddress row) {
  Matrices operands = {row, r};
  emulation::together(&operands, load_matrices<2, false>);
}

void load_matrix_x4_transposed(uint32_t (&r)[4], SharedAddress row) {
  Matrices operands = {row, r};
  emulation::together(&operands, load_matrices<4, true>);
}

void load_matrix_x2_transposed(uint32_t (&r)[2], SharedAddress row) {
  Matrices operands = {row, r};
  emulation::together(&operands, load_matrices<2, true>);
}

uint32_t transpose_matrix(uint32_t x) {
  Transposed operands = {x, 0};
  emulation::together(&operands, transpose);
  return operands.out;
}

void multiply_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  Product operands = {d, a, b};
  emulation::together(&operands, multiply<from_bf16>);
}

void multiply_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  Product operands = {d, a, b};
  emulation::together(&operands, multiply<from_f16>);
}

uint32_t pack_bf16(float low, float high) { return pack<bf16>(low, high); }
uint32_t pack_f16(float low, float high) { return pack<f16>(low, high); }
uint32_t subtract_f16(uint32_t x, uint32_t y) {
  return pack_f16(from_f16(x & 0xffff) - from_f16(y & 0xffff), from_f16(x >> 16) - from_f16(y >> 16));
}
uint32_t multiply_pair_f16(uint32_t x, uint32_t y) {
  return pack_f16(from_f16(x & 0xffff) * from_f16(y & 0xffff), from_f16(x >> 16) * from_f16(y >> 16));
}
uint32_t multiply_pair_bf16(uint32_t x, uint32_t y) {
  return pack_bf16(from_bf16(x & 0xffff) * from_bf16(y & 0xffff), from_bf16(x >> 16) * from_bf16(y >> 16));
}

uint32_t pick_bytes(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = x | static_cast<uint64_t>(y) << 32;
  uint32_t picked = 0;
  for (int i = 0; i < 4; ++i) {
    picked |= static_cast<uint32_t>(bytes >> (selector >> (4 * i) & 7) * 8 & 0xff) << (8 * i);
  }
  return picked;
}

int shuffle_from(int x, int lane) {
  Shuffled operands = {x, lane, 0};
  emulation::together(&operands, exchange);
  return operands.out;
}

}  // namespace ps::device

extern "C" {

// order: 0 ascending, 1 descending, 2 at random from `seed`, of threads and of CTAs.
PS_CUDA_API void ps_emulation_set(int order, int seed, int copies_land_early) {
  ps::emulation::g_order = order;
  ps::emulation::g_random.seed(seed);
  ps::emulation::g_copies_land_early = copies_land_early != 0;
}

// Eight rows of an ldmatrix that did not fall into different banks, since the last call.
PS_CUDA_API int64_t ps_emulation_bank_conflicts(void) {
  const int64_t count = ps::emulation::g_bank_conflicts;
  ps::emulation::g_bank_conflicts = 0;
  return count;
}

}  // extern "C"
