// The thread pool and scratch memory. Nothing here depends on the instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pagewick {

// Threads that parallel_for uses, the caller included. Workers start with the first job that needs them.
void set_num_threads(int num_threads);
int num_threads();

using JobBody = void (*)(const void* context, int64_t index);
void run_job(int64_t count, JobBody body, const void* context);

// Calls body(i) for every i in [0, count). Each thread takes a run of successive indices, one by one, and then helps
// the others with theirs. The calling thread works too; when another thread's job occupies the pool, it does all the
// work itself.
template <class Body>
void parallel_for(int64_t count, const Body& body) {
  run_job(
      count, [](const void* context, int64_t index) { (*static_cast<const Body*>(context))(index); }, &body);
}

// Tells the threads what one of the next jobs will read: `count` pieces of so many bytes each, piece i with index i. Who
// has to wait meanwhile brings the first of its share into its cache. Null: nothing is known.
void expect_reading(const void* memory, int64_t count, int64_t piece_bytes);

// Memory of the calling thread, 64-byte aligned, that lives until its next request of the same
// purpose; it grows and is then reused, so a steady state allocates nothing. New memory is zeroed.
enum class Scratch { kKernel, kPlan, kPartials, kPrepared };
void* thread_scratch(Scratch purpose, size_t num_bytes);

}  // namespace pagewick
