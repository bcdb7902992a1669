// A separate program for the thread sanitizer: the thread pool with jobs of all sizes, several callers at the same
// time, and a number of threads that changes between the jobs.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "parallel.h"

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

}  // namespace

int main() {
  for (const int threads : {1, 4, 2, 3}) {
    set_num_threads(threads);
    require(num_threads() == threads, "the number of threads");
    run_jobs(300);
    run_nested_jobs();
    use_scratch();
    std::vector<std::thread> callers;
    for (int i = 0; i < 3; ++i) callers.emplace_back([] { run_jobs(200); });
    for (std::thread& caller : callers) caller.join();
    // Long enough for the workers to fall asleep.
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    run_jobs(5);
  }
  set_num_threads(-3);
  require(num_threads() == 1, "at least one thread");
  std::printf("all tests passed\n");
}
