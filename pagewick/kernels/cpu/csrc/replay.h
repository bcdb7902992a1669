// Replays lists of recorded calls, and begins with the next replay while the host still handles the results of the last.
#pragma once

#include "kernels.h"

namespace pagewick {

struct Operation {
  const char* name;
  size_t args_size;
  Status (*run)(const Kernels& kernels, const void* args);
  void (*expect)(const void* args);  // announces that it runs soon; null: that would gain nothing
  bool is_repeatable;                // whether it may run ahead, and once more if that was in vain
};

// One call of an operation. Its arguments must live as long as the list of calls.
struct Call {
  int64_t operation;
  const void* args;
};

struct Copy {
  const void* source;
  void* target;
  int64_t num_bytes;
};

// Integers that grow by one.
struct Increment {
  void* integers;
  int64_t count;
  int64_t num_bytes;  // of an integer: 4 or 8
};

// How the inputs of the next replay come from the results of the last one, and where these are kept.
struct NextInputs {
  const Copy* copies;
  int64_t num_copies;
  const Increment* increments;
  int64_t num_increments;
};

// Runs the calls in order up to the first that fails; returns its Status. `progress`, unless null, is increased by one
// after each call.
Status replay(const Operation* operations, const Kernels& kernels, const Call* calls, int64_t num_calls,
              volatile uint64_t* progress);

// Sets the inputs of the next replay and begins to run the calls on a worker, for a few milliseconds at most, in place
// of a replay that runs ahead already. Only sets the inputs if start_task refuses, another thread's replay runs ahead by
// now, or this is a child process, which has no workers.
void replay_ahead(const Operation* operations, const Kernels& kernels, const Call* calls, int64_t num_calls,
                  const NextInputs& next);

// Stops the replay that runs ahead, if there is one, after the call that it is at; the calling thread helps with that.
// Returns how many of its calls have run if they are `calls`, else 0.
int64_t stop_replay_ahead(const Call* calls = nullptr);

}  // namespace pagewick
