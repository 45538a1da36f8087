#include "thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sched.h>
#include <sys/resource.h>
#endif

namespace ps {
namespace {

using Clock = std::chrono::steady_clock;

// A step is a chain of calls microseconds apart: workers stay awake that long, and no longer, because the
// API process needs the same cores.
constexpr auto kSpin = std::chrono::microseconds(20);
constexpr int kPausesPerLook = 32;
constexpr int kMaxUnwokenRegions = 32;

inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until ready() or the time is over; says which. It does not yield on the way: that would hand a whole slice of
// the CPU to whatever else runs there, for a wait of microseconds.
template <class Ready>
bool spin_until(const Ready& ready) {
  const auto deadline = Clock::now() + kSpin;
  do {
    for (int i = 0; i < kPausesPerLook; ++i) {
      if (ready()) return true;
      cpu_pause();
    }
  } while (Clock::now() < deadline);
  return ready();
}

// Keeps a worker off the CPU that the caller runs on. Where another process keeps the other CPUs busy, the system wakes
// a worker on the caller's own: the two would take turns, and the other process would have a CPU for itself.
class CpuOfCaller {
 public:
#ifdef __linux__
  CpuOfCaller() { known_ = sched_getaffinity(0, sizeof allowed_, &allowed_) == 0 && CPU_COUNT(&allowed_) > 1; }

  // By the caller.
  void note() {
    const int cpu = sched_getcpu();
    if (cpu != cpu_.load(std::memory_order_relaxed)) cpu_.store(cpu, std::memory_order_relaxed);
  }

  // By a worker; `avoided` is its own, -1 at first.
  void avoid(int* avoided) const {
    const int cpu = cpu_.load(std::memory_order_relaxed);
    if (cpu == *avoided || !known_ || cpu < 0) return;
    *avoided = cpu;
    cpu_set_t others = allowed_;
    CPU_CLR(cpu, &others);
    sched_setaffinity(0, sizeof others, &others);
  }

 private:
  cpu_set_t allowed_;  // of the process
  bool known_ = false;
  std::atomic<int> cpu_{-1};
#else
  void note() {}
  void avoid(int*) const {}
#endif
};

// A worker that shares its CPU with another process loses it every few milliseconds, most likely within a piece, and
// all others then wait for that piece. So it gives the CPU away by itself between pieces, shortly before it would be
// taken: the caller goes on alone meanwhile. Where nobody else wants the CPU nothing happens.
class Turn {
 public:
  // Asked between pieces and while waiting.
  bool is_over() {
#ifdef __linux__
    const auto now = Clock::now();
    if (now - last_look_ < kLook) return is_over_;
    const long num_losses = losses();
    if (num_losses != num_losses_) {
      // Lost since the last look: turns must be shorter than what went before.
      if (num_losses_ >= 0) length_ = std::clamp((last_look_ - began_) * 7 / 10, kShortest, kLongest);
      num_losses_ = num_losses;
      contested_until_ = now + kMemory;
      began_ = now;
    }
    last_look_ = now;
    is_over_ = now < contested_until_ && now - began_ > length_;
#endif
    return is_over_;
  }

  void give_away() {
#ifdef __linux__
    std::this_thread::yield();
    is_over_ = false;
    began_ = last_look_ = Clock::now();
    length_ = std::min<Clock::duration>(length_ * 51 / 50, kLongest);
    const long num_losses = losses();
    if (num_losses == num_losses_) contested_until_ = began_;  // nobody took it
    num_losses_ = num_losses;
#endif
  }

 private:
#ifdef __linux__
  // How often the system took the CPU away while this thread wanted it.
  static long losses() {
    rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_nivcsw;
  }
#endif
  static constexpr Clock::duration kLook = std::chrono::microseconds(50);
  static constexpr Clock::duration kShortest = std::chrono::microseconds(400), kLongest = std::chrono::milliseconds(100);
  static constexpr Clock::duration kMemory = std::chrono::milliseconds(200);
  Clock::time_point began_{}, last_look_{}, contested_until_{};
  Clock::duration length_ = kLongest;
  long num_losses_ = -1;
  bool is_over_ = false;
};

thread_local int t_thread = -1;  // this thread's number while it runs a piece
thread_local int t_region_depth = 0;  // of this thread's PoolRegions; above 0 it holds the pool's mutex

class Pool {
 public:
  explicit Pool(int size) : size_(size), ranges_(size) {
    for (int i = 1; i < size; ++i) workers_.emplace_back([this, i] { work(i); });
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(sleep_mutex_);
      stop_.store(true);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int size() const { return size_; }

  void run(int64_t num_items, int64_t grain, RangeFunction function, const void* context) {
    cpu_of_caller_.note();
    function_ = function;
    context_ = context;
    grain_ = grain;
    const int64_t num_pieces = (num_items + grain - 1) / grain;
    for (int i = 0; i < size_; ++i) {
      ranges_[i].next.store(num_pieces * i / size_ * grain, std::memory_order_relaxed);
      ranges_[i].end = std::min(num_pieces * (i + 1) / size_ * grain, num_items);
    }
    num_joined_.store(0, std::memory_order_relaxed);
    open_.store(true);
    generation_.fetch_add(1);
    if (sleepers_.load() > 0 && ++num_unwoken_ > unwoken_limit_) {
      num_unwoken_ = 0;
      { std::lock_guard<std::mutex> lock(sleep_mutex_); }
      wake_.notify_all();
    }
    take_pieces(0, nullptr);
    open_.store(false);
    // On a busy machine a woken thread comes too late, or pushes the caller off its CPU: while nobody comes, wake
    // them for fewer and fewer regions.
    unwoken_limit_ = num_joined_.load() > 0 ? 0 : std::min(2 * unwoken_limit_ + 1, kMaxUnwokenRegions);
    // Only threads inside a piece are waited for; one that never came is not. The wait ends in sleep: a CPU that
    // goes idle pulls the held-back thread over, a CPU that spins keeps it waiting.
    const auto idle = [this] { return active_.load() == 0; };
    if (spin_until(idle)) return;
    std::unique_lock<std::mutex> lock(sleep_mutex_);
    caller_sleeps_.store(true);
    done_.wait(lock, idle);
    caller_sleeps_.store(false);
  }

 private:
  // Until none is left, or until the turn is over: first of the thread's own range, then of those of the others.
  void take_pieces(int thread, Turn* turn) {
    t_thread = thread;
    for (int i = 0; i < size_; ++i) {
      Range& range = ranges_[(thread + i) % size_];
      while (turn == nullptr || !turn->is_over()) {
        const int64_t begin = range.next.fetch_add(grain_, std::memory_order_relaxed);
        if (begin >= range.end) break;
        function_(context_, begin, std::min(begin + grain_, range.end), thread);
      }
    }
    t_thread = -1;
  }

  void work(int thread) {
    Turn turn;
    int avoided_cpu = -1;
    uint64_t seen = 0;
    for (;;) {
      const auto news = [this, seen] { return generation_.load() != seen || stop_.load(); };
      if (!spin_until(news)) {
        std::unique_lock<std::mutex> lock(sleep_mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, news);
        sleepers_.fetch_sub(1);
      }
      if (stop_.load()) return;
      cpu_of_caller_.avoid(&avoided_cpu);
      seen = generation_.load();
      // First announce, then look: run() closes the job before it reads active_, so either it waits for this
      // thread or this thread finds the job closed (or the next job open, which is as good).
      active_.fetch_add(1);
      if (open_.load()) {
        num_joined_.fetch_add(1);
        take_pieces(thread, &turn);
      }
      if (active_.fetch_sub(1) == 1 && caller_sleeps_.load()) {
        { std::lock_guard<std::mutex> lock(sleep_mutex_); }
        done_.notify_one();
      }
      if (turn.is_over()) {
        turn.give_away();
        seen = 0;  // there may be pieces left of what it turned away from
      }
    }
  }

  const int size_;
  CpuOfCaller cpu_of_caller_;
  std::vector<std::thread> workers_;
  RangeFunction function_ = nullptr;
  const void* context_ = nullptr;
  int64_t grain_ = 1;
  int num_unwoken_ = 0;    // regions since sleepers were last woken
  int unwoken_limit_ = 0;  // how many may pass
  struct alignas(64) Range {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  std::vector<Range> ranges_;  // a thread's own pieces, neighbours in memory; none is left while others have nothing
  alignas(64) std::atomic<int> active_{0};
  alignas(64) std::atomic<uint64_t> generation_{0};
  std::atomic<int> num_joined_{0};
  std::atomic<bool> open_{false};
  std::atomic<bool> stop_{false};
  std::atomic<int> sleepers_{0};
  std::mutex sleep_mutex_;
  std::condition_variable wake_;
  std::atomic<bool> caller_sleeps_{false};
  std::condition_variable done_;
};

int usable_cpus() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  const unsigned count = std::thread::hardware_concurrency();
  return count > 0 ? static_cast<int>(count) : 1;
}

// Never destroyed: threads may still compute while the process exits.
struct Shared {
  std::mutex mutex;  // held for a whole PoolRegion: callers take turns
  Pool* pool = nullptr;
  std::atomic<int> size{usable_cpus()};
};

alignas(Shared) unsigned char g_storage[sizeof(Shared)];

// A fork copies the pool but not its threads: the child forgets it (mutex included) and makes its own.
void after_fork_in_child() {
  Shared* shared = reinterpret_cast<Shared*>(g_storage);
  const int size = shared->size.load();
  shared = new (g_storage) Shared;
  shared->size.store(size);
  t_thread = -1;
  t_region_depth = 0;
}

Shared& shared() {
  static Shared* instance = [] {
    Shared* made = new (g_storage) Shared;
    pthread_atfork(nullptr, nullptr, after_fork_in_child);
    return made;
  }();
  return *instance;
}

}  // namespace

int num_threads() { return shared().size.load(); }

void set_num_threads(int num_threads) {
  Shared& state = shared();
  std::lock_guard<std::mutex> lock(state.mutex);
  state.size.store(num_threads);
  if (state.pool != nullptr && state.pool->size() != num_threads) {
    delete state.pool;
    state.pool = nullptr;
  }
}

PoolRegion::PoolRegion() {
  if (t_region_depth++ == 0) shared().mutex.lock();
}

PoolRegion::~PoolRegion() {
  if (--t_region_depth == 0) shared().mutex.unlock();
}

void parallel_for(int64_t num_items, int64_t grain, RangeFunction function, const void* context) {
  if (num_items <= 0) return;
  if (t_thread >= 0) {
    function(context, 0, num_items, t_thread);
    return;
  }
  const PoolRegion region;
  Shared& state = shared();
  if (state.size.load() == 1 || num_items <= grain) {
    t_thread = 0;
    function(context, 0, num_items, 0);
    t_thread = -1;
    return;
  }
  if (state.pool == nullptr) state.pool = new Pool(state.size.load());
  state.pool->run(num_items, grain, function, context);
}

}  // namespace ps
