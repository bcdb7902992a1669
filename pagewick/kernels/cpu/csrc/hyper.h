// Streams of hyper-connections (arXiv:2409.19606; mHC, arXiv:2512.24880). ../../reference_hyper.py has the definitions.
//
// Dimensions: T tokens, S streams of H elements, N products of a token: S, 2 * S or (2 + S) * S.
#pragma once

#include "kernels.h"

namespace pagewick {

struct StreamWeightsArgs {
  const float* products;  // [T, N], rows product_stride elements apart
  const void* streams;    // [T, S, H]
  const float* biases;    // [N]
  const float* scales;    // one for each kind of weights
  float* before;          // [T, S]
  float* after;           // [T, S], or null where N is S
  float* mixing;          // [T, S, S], or null unless N is (2 + S) * S
  int64_t num_tokens;
  int64_t num_streams;
  int64_t size;  // H
  int64_t product_stride;
  int64_t num_iterations;
  double eps;
  double norm_eps;
  double magnitude;  // factor of `after`
  DType dtype;  // of streams
};

// out = the sum over the streams of weight * stream.
struct CollapseStreamsArgs {
  const void* streams;   // [T, S, H]
  const float* weights;  // [T, S]
  void* out;             // [T, H]
  int64_t num_tokens;
  int64_t num_streams;
  int64_t size;
  DType dtype;  // of streams and out
};

// out[k] = after[k] * output + the sum over j of mixing[j][k] * stream j, or stream k without mixing.
struct ExpandStreamsArgs {
  const void* streams;  // [T, S, H]
  const void* output;   // [T, H], rows output_stride elements apart
  const float* after;   // [T, S]
  const float* mixing;  // [T, S, S], or null
  void* out;            // [T, S, H]
  int64_t num_tokens;
  int64_t num_streams;
  int64_t size;
  int64_t output_stride;
  DType dtype;  // of streams, output and out
};

struct HyperKernels {
  // Returns the sum of the squares of a token's numbers.
  double (*sum_of_squares)(const StreamWeightsArgs& args, int64_t token);
  // Both compute columns [first_col, end_col) of one token.
  void (*collapse)(const CollapseStreamsArgs& args, int64_t token, int64_t first_col, int64_t end_col);
  void (*expand)(const ExpandStreamsArgs& args, int64_t token, int64_t first_col, int64_t end_col);
};

Status stream_weights(const Kernels& kernels, const StreamWeightsArgs& args);
Status collapse_streams(const Kernels& kernels, const CollapseStreamsArgs& args);
Status expand_streams(const Kernels& kernels, const ExpandStreamsArgs& args);

}  // namespace pagewick
