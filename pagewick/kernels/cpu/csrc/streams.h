// Operations on the parallel residual streams of AltUp (arXiv:2301.13310). A token has one active row, which the layer
// computes with, and num_others further rows.
#pragma once

#include "kernels.h"

namespace pagewick {

// The most streams, the active one included.
constexpr int64_t kMaxStreams = 8;

// Rows of active and computed lie active_stride and computed_stride elements apart; all other rows are adjacent. In what
// follows, stream 0 is the active one, and S = 1 + num_others <= kMaxStreams.
struct StreamsArgs {
  const void* active;        // [num_tokens, size]
  const void* others;        // [num_tokens, num_others, size]
  const void* computed;      // [num_tokens, size], or null where an operation does not read it
  const void* coefficients;  // [num_tokens, S * S] for mix_streams, [num_tokens, S] for correct_streams
  void* out_active;          // [num_tokens, size]
  void* out_others;          // [num_tokens, num_others, size]
  int64_t num_tokens;
  int64_t num_others;
  int64_t size;
  int64_t active_stride;
  int64_t computed_stride;
  DType dtype;  // of every tensor
};

// out = x * rms(target) / sqrt(max(mean(x^2), least)). Each row of target serves `repeat` successive rows of x.
struct MagnitudeArgs {
  const void* x;       // [num_rows, size], rows x_stride elements apart
  const void* target;  // [num_rows / repeat, size], rows target_stride elements apart
  void* out;           // [num_rows, size], contiguous
  int64_t num_rows;
  int64_t size;
  int64_t repeat;
  int64_t x_stride;
  int64_t target_stride;
  float least;
  DType dtype;  // of every tensor
};

struct StreamsKernels {
  // Both compute columns [first_col, end_col) of all streams of one token.
  // out[j] = stream[j] + sum over i of coefficients[j * S + i] * stream[i].
  void (*mix)(const StreamsArgs& args, int64_t token, int64_t first_col, int64_t end_col);
  // out[j] = stream[j] + (1 + coefficients[j]) * (computed - stream[0]).
  void (*correct)(const StreamsArgs& args, int64_t token, int64_t first_col, int64_t end_col);
  // Computes rows [first_row, end_row).
  void (*match_magnitude)(const MagnitudeArgs& args, int64_t first_row, int64_t end_row);
};

Status mix_streams(const Kernels& kernels, const StreamsArgs& args);
Status correct_streams(const Kernels& kernels, const StreamsArgs& args);
Status match_magnitude(const Kernels& kernels, const MagnitudeArgs& args);

}  // namespace pagewick
