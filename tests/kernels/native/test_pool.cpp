// A separate program for the thread sanitizer: the thread pool with jobs of all sizes, several callers at the same
// time, tasks and replays beside the caller, and a number of threads that changes between the jobs.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "parallel.h"
#include "replay.h"

using namespace pagewick;

namespace {

void require(bool condition, const char* what) {
  if (condition) return;
  std::printf("failed: %s\n", what);
  std::exit(1);
}

// Every index runs once, and all of them have run when parallel_for returns. The numbers are deliberately no atomics.
void run_jobs(int num_jobs) {
  for (int job = 0; job < num_jobs; ++job) {
    const int64_t count = job % 13 == 0 ? 0 : job * 7 % 97;
    std::vector<int> visits(static_cast<size_t>(count));
    parallel_for(count, [&](int64_t index) { ++visits[static_cast<size_t>(index)]; });
    for (const int visit : visits) require(visit == 1, "an index was not visited once");
  }
}

// A job within a job runs on the thread that starts it.
void run_nested_jobs() {
  std::atomic<int> sum{0};
  parallel_for(10, [&](int64_t) { parallel_for(10, [&](int64_t index) { sum += static_cast<int>(index); }); });
  require(sum == 450, "jobs within jobs");
}

// Scratch memory belongs to a thread and a purpose.
void use_scratch() {
  parallel_for(50, [](int64_t index) {
    const size_t size = static_cast<size_t>(100 + index * 10);
    char* const kernel = static_cast<char*>(thread_scratch(Scratch::kKernel, size));
    char* const plan = static_cast<char*>(thread_scratch(Scratch::kPlan, size));
    std::memset(kernel, static_cast<int>(index), size);
    std::memset(plan, -1, size);
    require(reinterpret_cast<uintptr_t>(kernel) % 64 == 0, "scratch memory is not aligned");
    for (size_t i = 0; i < size; ++i) require(kernel[i] == static_cast<char>(index), "scratch memory is shared");
  });
}

int num_tasks = 0;

// A task gives jobs while its caller does something else or helps, and has ended when help_with_task returns.
void run_tasks(int threads) {
  int expected = num_tasks;
  for (int task = 0; task < 30; ++task) {
    const bool is_started = start_task([] {
      run_jobs(20);
      ++num_tasks;
    });
    require(is_started == (threads > 1), "a task starts if there are workers");
    if (is_started) ++expected;
    if (task % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(task * 10));
    if (task % 3 == 1) run_jobs(3);
    if (task % 5 == 4) set_num_threads(threads);
    help_with_task();
    help_with_task();
    require(num_tasks == expected, "a task has not run once");
  }
}

// A task does not wait for another thread's job.
void start_a_task_while_the_pool_is_occupied() {
  set_num_threads(2);
  std::atomic<bool> is_running{false}, may_end{false};
  std::thread other([&] {
    parallel_for(2, [&](int64_t) {
      is_running = true;
      while (!may_end) std::this_thread::yield();
    });
  });
  while (!is_running) std::this_thread::yield();
  require(!start_task([] { ++num_tasks; }), "a task starts although the pool is occupied");
  help_with_task();
  may_end = true;
  other.join();
}

// An operation on plain numbers: each call adds the input to all of them, in parallel.
struct AddArgs {
  const int* input;
  std::vector<int>* numbers;
};

Status add(const Kernels&, const void* args) {
  const AddArgs& own = *static_cast<const AddArgs*>(args);
  parallel_for(static_cast<int64_t>(own.numbers->size()),
               [&](int64_t index) { (*own.numbers)[static_cast<size_t>(index)] += *own.input; });
  return kOk;
}

// A caller handles what one replay has left in `kept` while the next one may run ahead.
void replay_ahead_of_the_caller() {
  const Operation operation = {"add", sizeof(AddArgs), add, nullptr};
  const Kernels kernels{};
  std::vector<int> numbers(50), kept(50);
  int input = 0;
  const AddArgs args = {&input, &numbers};
  const std::vector<Call> calls(20, Call{0, &args});
  const int64_t num_calls = static_cast<int64_t>(calls.size());
  const Copy copy = {numbers.data(), kept.data(), static_cast<int64_t>(kept.size() * sizeof(int))};
  const Increment increment = {&input, 1, sizeof(int)};
  const NextInputs next = {&copy, 1, &increment, 1};
  int expected = 0;
  for (int step = 0; step < 100; ++step) {
    const int64_t num_done = stop_replay_ahead(calls.data());
    replay(&operation, kernels, calls.data() + num_done, num_calls - num_done, nullptr);
    expected += static_cast<int>(num_calls) * input;
    replay_ahead(&operation, kernels, calls.data(), num_calls, next);
    if (step % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(step));
    for (const int number : kept) require(number == expected, "a replay that runs ahead changes its result");
  }
  stop_replay_ahead();
}

// The number of threads changes while another thread waits for a replay that no worker has taken yet.
void change_the_number_of_threads_meanwhile() {
  const Operation operation = {"add", sizeof(AddArgs), add, nullptr};
  const Kernels kernels{};
  std::vector<int> numbers(50);
  const int input = 1;
  const AddArgs args = {&input, &numbers};
  const Call call = {0, &args};
  const NextInputs next = {nullptr, 0, nullptr, 0};
  std::atomic<bool> is_over{false};
  std::thread other([&] {
    while (!is_over) {
      replay_ahead(&operation, kernels, &call, 1, next);
      stop_replay_ahead();
    }
  });
  for (int change = 0; change < 3000; ++change) {
    stop_replay_ahead();
    set_num_threads(2);
  }
  is_over = true;
  other.join();
}

}  // namespace

int main() {
  for (const int threads : {1, 4, 2, 3}) {
    set_num_threads(threads);
    require(num_threads() == threads, "the number of threads");
    run_jobs(300);
    run_nested_jobs();
    use_scratch();
    run_tasks(threads);
    replay_ahead_of_the_caller();
    std::vector<std::thread> callers;
    for (int i = 0; i < 3; ++i) callers.emplace_back([] { run_jobs(200); });
    for (std::thread& caller : callers) caller.join();
    // Long enough for the workers to fall asleep.
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    run_jobs(5);
  }
  start_a_task_while_the_pool_is_occupied();
  change_the_number_of_threads_meanwhile();
  set_num_threads(-3);
  require(num_threads() == 1, "at least one thread");
  std::printf("all tests passed\n");
}
