#include "replay.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>

#include "parallel.h"

namespace pagewick {
namespace {

// A replay that runs ahead stops by itself after this time: its host has other things to do, perhaps nothing at all.
constexpr auto kMostAhead = std::chrono::milliseconds(5);

// While calls run in order, announces the next call whose operation has an `expect` function.
class Lookahead {
 public:
  Lookahead(const Operation* operations, const Call* calls, int64_t num_calls)
      : operations_(operations), calls_(calls), num_calls_(num_calls) {}
  ~Lookahead() { expect_reading(nullptr, 0, 0); }

  // To be called before call i.
  void pass(int64_t i) {
    if (announced_ > i) return;
    for (announced_ = i + 1; announced_ < num_calls_; ++announced_) {
      const Call& call = calls_[announced_];
      if (const auto expect = operations_[call.operation].expect) return expect(call.args);
    }
  }

 private:
  const Operation* operations_;
  const Call* calls_;
  int64_t num_calls_;
  int64_t announced_ = 0;  // the call that was announced last
};

// The replay that runs ahead. Its fields are set before its task is started, and read after the task has ended.
struct Ahead {
  const Operation* operations = nullptr;
  const Kernels* kernels = nullptr;
  const Call* calls = nullptr;
  int64_t num_calls = 0;
  int64_t num_done = 0;
  std::atomic<bool> stop{false};
  std::atomic<bool> exists{false};
  bool is_child = false;  // Whether this process is a fork of one that had loaded the library.
  std::mutex mutex;       // Held to start a replay, to stop one, and to fork.
};

Ahead& ahead();

// The caller holds the mutex.
void stop_now(Ahead& own) {
  if (!own.exists) return;
  own.stop = true;
  help_with_task();
  own.exists = false;
}

// A child process has no workers that would finish a replay, nor a thread that would unlock the mutex.
void before_fork() {
  ahead().mutex.lock();
  stop_now(ahead());
}

void after_fork_in_parent() { ahead().mutex.unlock(); }

void after_fork_in_child() {
  ahead().is_child = true;
  ahead().mutex.unlock();
}

Ahead& ahead() {
  static Ahead* const instance = [] {
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    return new Ahead;
  }();
  return *instance;
}

template <class T>
void increment(T* integers, int64_t count) {
  for (int64_t i = 0; i < count; ++i) ++integers[i];
}

void set_inputs(const NextInputs& next) {
  for (int64_t i = 0; i < next.num_copies; ++i) {
    const Copy& copy = next.copies[i];
    std::memcpy(copy.target, copy.source, static_cast<size_t>(copy.num_bytes));
  }
  for (int64_t i = 0; i < next.num_increments; ++i) {
    const Increment& each = next.increments[i];
    if (each.num_bytes == 8) increment(static_cast<int64_t*>(each.integers), each.count);
    else increment(static_cast<int32_t*>(each.integers), each.count);
  }
}

void run_ahead() {
  Ahead& own = ahead();
  const auto deadline = std::chrono::steady_clock::now() + kMostAhead;
  Lookahead lookahead(own.operations, own.calls, own.num_calls);
  while (own.num_done < own.num_calls && !own.stop && std::chrono::steady_clock::now() < deadline) {
    const Call& call = own.calls[own.num_done];
    // A state that has advanced in its place cannot go back.
    if (!own.operations[call.operation].is_repeatable) return;
    lookahead.pass(own.num_done);
    // A call that fails runs once more when the replay is resumed, and is reported then.
    if (own.operations[call.operation].run(*own.kernels, call.args) != kOk) return;
    ++own.num_done;
  }
}

}  // namespace

Status replay(const Operation* operations, const Kernels& kernels, const Call* calls, int64_t num_calls,
              volatile uint64_t* progress) {
  Lookahead lookahead(operations, calls, num_calls);
  for (int64_t i = 0; i < num_calls; ++i) {
    lookahead.pass(i);
    const Status status = operations[calls[i].operation].run(kernels, calls[i].args);
    if (status != kOk) return status;
    if (progress != nullptr) *progress = *progress + 1;
  }
  return kOk;
}

void replay_ahead(const Operation* operations, const Kernels& kernels, const Call* calls, int64_t num_calls,
                  const NextInputs& next) {
  stop_replay_ahead();
  set_inputs(next);
  Ahead& own = ahead();
  const std::lock_guard<std::mutex> lock(own.mutex);
  if (own.is_child || own.exists) return;
  own.operations = operations, own.kernels = &kernels, own.calls = calls, own.num_calls = num_calls;
  own.num_done = 0;
  own.stop = false;
  own.exists = start_task(run_ahead);
}

int64_t stop_replay_ahead(const Call* calls) {
  Ahead& own = ahead();
  if (!own.exists) return 0;
  const std::lock_guard<std::mutex> lock(own.mutex);
  if (!own.exists) return 0;
  stop_now(own);
  return own.calls == calls ? own.num_done : 0;
}

}  // namespace pagewick
