// The thread pool and scratch memory. Nothing here depends on the instruction set.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace pagewick {

// Sets how many threads parallel_for uses, the caller included. Workers start with the first job that needs them.
void set_num_threads(int num_threads);
int num_threads();

using JobBody = void (*)(const void* context, int64_t index);
void run_job(int64_t count, JobBody body, const void* context);

// Calls body(i) for every i in [0, count). Each thread takes a run of successive indices, one by one, and then helps
// the others with theirs. The calling thread works too; while a job of another thread occupies the pool, it does all
// the work itself.
template <class Body>
void parallel_for(int64_t count, const Body& body) {
  run_job(
      count, [](const void* context, int64_t index) { (*static_cast<const Body*>(context))(index); }, &body);
}

// Calls body(begin, end) for ranges of `chunk` indices (at least 1), which together are [0, count).
template <class Body>
void parallel_ranges(int64_t count, int64_t chunk, const Body& body) {
  const int64_t size = std::max<int64_t>(1, chunk);
  parallel_for(ceil_div(count, size),
               [&](int64_t index) { body(index * size, std::min(count, (index + 1) * size)); });
}

// Calls body(row, first_col, end_col) for all elements of num_rows rows of `size` elements, in pieces of about `grain`
// elements: several whole rows, or a part of one. grain is a multiple of the length of every vector.
template <class Body>
void parallel_elements(int64_t num_rows, int64_t size, int64_t grain, const Body& body) {
  if (size == 0) return;
  const int64_t rows = std::max<int64_t>(1, grain / size), row_chunks = ceil_div(num_rows, rows);
  const int64_t cols = std::min(size, grain), col_chunks = ceil_div(size, cols);
  parallel_for(row_chunks * col_chunks, [&](int64_t index) {
    const int64_t first_row = index / col_chunks * rows, first_col = index % col_chunks * cols;
    for (int64_t row = first_row; row < std::min(num_rows, first_row + rows); ++row)
      body(row, first_col, std::min(size, first_col + cols));
  });
}

// Lets a worker call task(), which may give jobs of its own, while the caller goes on. There is one task at a time: call
// help_with_task() before the next. Returns false, and the task is not called, if there are no workers or a job of another
// thread occupies the pool.
bool start_task(void (*task)());

// Takes part in the jobs of the task, and returns once it has ended; at once if there is none.
void help_with_task();

// Tells the threads what one of the next jobs will read: `count` pieces of piece_bytes bytes each, piece i with index
// i. A thread that waits meanwhile brings the beginning of its share into its cache. Null: nothing is known.
void expect_reading(const void* memory, int64_t count, int64_t piece_bytes);

// Memory of the calling thread, 64-byte aligned, that lives until the thread's next request for the same purpose. It
// grows and is then reused, so a steady state allocates nothing. New memory is zeroed.
enum class Scratch { kKernel, kPlan, kPartials, kPrepared };
void* thread_scratch(Scratch purpose, size_t num_bytes);

}  // namespace pagewick
