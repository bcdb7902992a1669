#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace pagewick {
namespace {

constexpr auto kSpinTime = std::chrono::microseconds(100);
constexpr int kSpinsPerClockRead = 64;

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The memory that a coming job will read. Threads look at it while they wait, without a lock: prefetching a wrong
// address does no harm.
class Expected {
 public:
  void set(const void* memory, int64_t count, int64_t piece_bytes) {
    memory_.store(static_cast<const char*>(memory), std::memory_order_relaxed);
    count_.store(count, std::memory_order_relaxed);
    piece_bytes_.store(piece_bytes, std::memory_order_relaxed);
    ++version_;
  }

  uint32_t version() const { return version_.load(std::memory_order_relaxed); }

  // Returns the beginning of a thread's share; num_bytes: how much of it fits into a second-level cache.
  const char* share(int thread, int num_threads, int64_t& num_bytes) const {
    const char* const memory = memory_.load(std::memory_order_relaxed);
    const int64_t count = count_.load(std::memory_order_relaxed);
    const int64_t piece_bytes = piece_bytes_.load(std::memory_order_relaxed);
    const int64_t first = count * thread / num_threads, end = count * (thread + 1) / num_threads;
    num_bytes = memory == nullptr ? 0 : std::min(kMostBytes, (end - first) * piece_bytes);
    return memory + first * piece_bytes;
  }

 private:
  static constexpr int64_t kMostBytes = 256 << 10;

  std::atomic<const char*> memory_{nullptr};
  std::atomic<int64_t> count_{0}, piece_bytes_{0};
  std::atomic<uint32_t> version_{0};
};

Expected& expected() {
  static Expected instance;
  return instance;
}

// Prefetches the share of one thread, a few cache lines at a time.
class ReadAhead {
 public:
  // Prefetches a few cache lines; returns false if none are left.
  bool step(int thread, int num_threads) {
    if (const uint32_t version = expected().version(); version != version_) {
      version_ = version;
      done_ = 0;
      memory_ = expected().share(thread, num_threads, num_bytes_);
    }
    if (done_ >= num_bytes_) return false;
    for (int line = 0; line < kLinesPerStep; ++line, done_ += 64) __builtin_prefetch(memory_ + done_, 0, 2);
    return true;
  }

 private:
  static constexpr int kLinesPerStep = 4;

  uint32_t version_ = 0;
  const char* memory_ = nullptr;
  int64_t done_ = 0, num_bytes_ = 0;
};

// Calls wait() until done() or kSpinTime has passed; returns done().
template <class Done, class Wait>
bool spin_until(const Done& done, const Wait& wait) {
  const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < kSpinsPerClockRead; ++i) {
      if (done()) return true;
      wait();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return done();
}

// The part of a job that is left to a thread: indices [next, end). Other threads may help with it.
struct alignas(64) Share {
  std::atomic<int64_t> next{0};
  int64_t end = 0;
};

// The number of this thread in the pool. Threads that are not workers count as the first.
thread_local int own_number = 0;

// The pool runs one job at a time. `epoch_` is odd while a job is open. A worker announces itself in `active_`
// and then looks at the epoch again; the caller closes the epoch and then waits for `active_` to be 0.
// All four accesses are sequentially consistent, so either the worker sees the closed epoch and stays
// out, or the caller sees the worker and waits. No thread touches a job after run() has returned, and a
// worker that wakes late delays nobody.
class Pool {
 public:
  void set_num_threads(int count) {
    help_with_task();
    const std::lock_guard<std::mutex> job(job_mutex_);
    stop_workers();
    num_threads_ = count < 1 ? 1 : count;
    shares_.reset(new Share[static_cast<size_t>(num_threads_)]);
  }

  int num_threads() const { return num_threads_; }

  void run(int64_t count, JobBody body, const void* context) {
    std::unique_lock<std::mutex> job(job_mutex_, std::defer_lock);
    if (count < 2 || num_threads_ < 2 || !job.try_lock()) {
      for (int64_t i = 0; i < count; ++i) body(context, i);
      return;
    }
    start_workers();
    body_ = body;
    context_ = context;
    for (int thread = 0; thread < num_threads_; ++thread) {
      shares_[thread].next = count * thread / num_threads_;
      shares_[thread].end = count * (thread + 1) / num_threads_;
    }
    ++epoch_;
    wake_sleepers();
    drain(own_number);
    ++epoch_;
    wait_until_idle();
  }

  bool start_task(void (*task)()) {
    const std::unique_lock<std::mutex> job(job_mutex_, std::try_to_lock);
    if (!job.owns_lock() || num_threads_ < 2) return false;
    start_workers();
    if (num_threads_ < 2) return false;
    is_task_open_ = true;
    task_ = task;
    wake_sleepers();
    return true;
  }

  void help_with_task() {
    uint32_t seen = 0;
    ReadAhead read_ahead;
    while (wait_for_job(0, seen, read_ahead, [this] { return !is_task_open_; })) help(0, seen);
  }

 private:
  void wake_sleepers() {
    if (sleepers_ > 0) {
      { const std::lock_guard<std::mutex> lock(sleep_mutex_); }
      wake_.notify_all();
    }
  }

  // Works on the thread's own share first, from front to back, and then on the rest of the other threads' shares.
  void drain(int thread) {
    for (int turn = 0; turn < num_threads_; ++turn) {
      Share& share = shares_[(thread + turn) % num_threads_];
      for (int64_t i = share.next++; i < share.end; i = share.next++) body_(context_, i);
    }
  }

  void wait_a_little(int thread, ReadAhead& read_ahead) {
    if (!read_ahead.step(thread, num_threads_)) relax();
  }

  void wait_until_idle() {
    if (spin_until([this] { return active_ == 0; }, [this] { wait_a_little(own_number, read_ahead_); })) return;
    std::unique_lock<std::mutex> lock(sleep_mutex_);
    caller_sleeps_ = true;
    idle_.wait(lock, [this] { return active_ == 0; });
    caller_sleeps_ = false;
  }

  // Takes part in the job of this epoch, unless it is closed by now.
  void help(int thread, uint32_t epoch) {
    ++active_;
    if (epoch_ == epoch) drain(thread);
    if (--active_ == 0 && caller_sleeps_) {
      { const std::lock_guard<std::mutex> lock(sleep_mutex_); }
      idle_.notify_one();
    }
  }

  void work(int thread) {
    own_number = thread;
    uint32_t seen = 0;
    ReadAhead read_ahead;
    for (;;) {
      const auto is_over = [&] { return stop_ || (thread == kTaskThread && task_ != nullptr); };
      if (wait_for_job(thread, seen, read_ahead, is_over)) help(thread, seen);
      else if (stop_) return;
      else run_task();
    }
  }

  void run_task() {
    task_.exchange(nullptr)();
    is_task_open_ = false;
    wake_sleepers();
  }

  // Waits for a job other than `seen` and stores its epoch there; false once is_over().
  template <class IsOver>
  bool wait_for_job(int thread, uint32_t& seen, ReadAhead& read_ahead, const IsOver& is_over) {
    uint32_t epoch = 0;
    bool ends = false;
    const auto ready = [&] {
      epoch = epoch_;
      return (ends = is_over()) || (epoch % 2 == 1 && epoch != seen);
    };
    if (!spin_until(ready, [&] { wait_a_little(thread, read_ahead); })) {
      std::unique_lock<std::mutex> lock(sleep_mutex_);
      ++sleepers_;
      wake_.wait(lock, ready);
      --sleepers_;
    }
    seen = epoch;
    return !ends;
  }

  void start_workers() {
    while (static_cast<int>(workers_.size()) < num_threads_ - 1) {
      const int thread = static_cast<int>(workers_.size()) + 1;
      try {
        workers_.emplace_back([this, thread] { work(thread); });
      } catch (const std::system_error&) {
        num_threads_ = thread;  // the system gives us no more threads
        return;
      }
    }
  }

  void stop_workers() {
    {
      const std::lock_guard<std::mutex> lock(sleep_mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    stop_ = false;
    if (task_.exchange(nullptr) == nullptr) return;
    is_task_open_ = false;  // no worker has taken it
    wake_sleepers();
  }

  static constexpr int kTaskThread = 1;

  std::mutex job_mutex_;
  std::atomic<int> num_threads_{1};
  std::vector<std::thread> workers_;

  JobBody body_ = nullptr;
  const void* context_ = nullptr;
  // One for each thread, the caller's first.
  std::unique_ptr<Share[]> shares_;
  ReadAhead read_ahead_;  // of the thread that has given the job
  std::atomic<uint32_t> epoch_{0};
  std::atomic<int> active_{0};

  std::mutex sleep_mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::atomic<int> sleepers_{0};
  std::atomic<bool> caller_sleeps_{false};
  std::atomic<bool> stop_{false};

  std::atomic<void (*)()> task_{nullptr};  // until a worker takes it
  std::atomic<bool> is_task_open_{false};  // until it has run
};

// Never destroyed: workers may still sleep in it when the process exits.
Pool& pool() {
  static Pool* const instance = new Pool;
  return *instance;
}

constexpr size_t kAlignment = 64;

struct Buffer {
  void* data = nullptr;
  size_t size = 0;

  ~Buffer() { std::free(data); }

  void* reserve(size_t num_bytes) {
    if (num_bytes > size) {
      std::free(data);
      size = (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
      data = std::aligned_alloc(kAlignment, size);
      if (data == nullptr) std::abort();
      std::memset(data, 0, size);
    }
    return data;
  }
};

}  // namespace

void set_num_threads(int num_threads) { pool().set_num_threads(num_threads); }

int num_threads() { return pool().num_threads(); }

void run_job(int64_t count, JobBody body, const void* context) { pool().run(count, body, context); }

bool start_task(void (*task)()) { return pool().start_task(task); }

void help_with_task() { pool().help_with_task(); }

void expect_reading(const void* memory, int64_t count, int64_t piece_bytes) {
  expected().set(memory, count, piece_bytes);
}

void* thread_scratch(Scratch purpose, size_t num_bytes) {
  thread_local Buffer buffers[4];
  return buffers[static_cast<int>(purpose)].reserve(num_bytes);
}

}  // namespace pagewick
