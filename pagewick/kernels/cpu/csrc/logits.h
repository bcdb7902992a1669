// What is asked of whole rows of logits. A row is divided into the same pieces whatever else is asked, and what they
// give is put together in order.
#pragma once

#include "kernels.h"

namespace pagewick {

// token_ids = where the greatest lies: the first NaN, else the first of the equal ones.
struct ArgmaxArgs {
  const float* logits;  // [num_rows, vocab_size], rows `stride` elements apart
  int64_t* token_ids;   // [num_rows]
  int64_t num_rows;
  int64_t vocab_size;  // at least 1
  int64_t stride;
};

// log_sum = log(sum(exp(logits - max))).
struct LogSoftmaxArgs {
  const float* logits;  // [num_rows, vocab_size], rows `stride` elements apart
  float* max;           // [num_rows]
  float* log_sum;       // [num_rows]
  int64_t num_rows;
  int64_t vocab_size;  // at least 1
  int64_t stride;
};

struct Greatest {
  float value;
  int64_t index;
};

struct ExpSum {
  float max;  // NaN if there is a NaN
  float sum;  // of exp(x - max)
};

struct LogitsKernels {
  Greatest (*find_greatest)(const float* x, int64_t size);
  ExpSum (*sum_exp)(const float* x, int64_t size);
};

Status argmax_rows(const Kernels& kernels, const ArgmaxArgs& args);

Status log_softmax_stats(const Kernels& kernels, const LogSoftmaxArgs& args);

}  // namespace pagewick
