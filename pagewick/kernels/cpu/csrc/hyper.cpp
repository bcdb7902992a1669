// The weights of streams, in double precision, and the division of their sums among the threads.
#include "hyper.h"

#include <algorithm>
#include <cmath>

#include "parallel.h"

namespace pagewick {
namespace {

// Elements that are worth handing to another thread in one go.
constexpr int64_t kGrain = 1 << 13;

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// Divides the sums of rows, or of columns, of a matrix [size, size] to 1: element j of line i lies at i * line + j * step.
void normalise(double* matrix, int64_t size, int64_t line, int64_t step, double eps) {
  for (int64_t i = 0; i < size; ++i) {
    double sum = eps;
    for (int64_t j = 0; j < size; ++j) sum += matrix[i * line + j * step];
    for (int64_t j = 0; j < size; ++j) matrix[i * line + j * step] /= sum;
  }
}

// Turns a row into its softmax plus eps.
void soften(double* row, int64_t size, double eps) {
  const double highest = *std::max_element(row, row + size);
  double sum = 0.0;
  for (int64_t i = 0; i < size; ++i) sum += row[i] = std::exp(row[i] - highest);
  for (int64_t i = 0; i < size; ++i) row[i] = row[i] / sum + eps;
}

void weigh_token(const Kernels& kernels, const StreamWeightsArgs& args, int64_t token) {
  const int64_t size = args.num_streams;
  const double mean = kernels.hyper->sum_of_squares(args, token) / static_cast<double>(size * args.size);
  const double factor = 1.0 / std::sqrt(mean + args.norm_eps);
  const float* const products = args.products + token * args.product_stride;
  const auto scaled = [&](int64_t i, int64_t kind) {
    return double{args.scales[kind]} * (double{products[i]} * factor) + double{args.biases[i]};
  };
  for (int64_t i = 0; i < size; ++i)
    args.before[token * size + i] = static_cast<float>(sigmoid(scaled(i, 0)) + args.eps);
  if (args.after == nullptr) return;
  const double eps = args.mixing == nullptr ? args.eps : 0.0;
  for (int64_t i = 0; i < size; ++i)
    args.after[token * size + i] = static_cast<float>(args.magnitude * sigmoid(scaled(size + i, 1)) + eps);
  if (args.mixing == nullptr) return;
  const int64_t count = size * size;
  double* const mixing =
      static_cast<double*>(thread_scratch(Scratch::kKernel, static_cast<size_t>(count) * sizeof(double)));
  for (int64_t i = 0; i < count; ++i) mixing[i] = scaled(2 * size + i, 2);
  for (int64_t row = 0; row < size; ++row) soften(mixing + row * size, size, args.eps);
  normalise(mixing, size, 1, size, args.eps);
  for (int64_t i = 1; i < args.num_iterations; ++i) {
    normalise(mixing, size, size, 1, args.eps);
    normalise(mixing, size, 1, size, args.eps);
  }
  std::transform(mixing, mixing + count, args.mixing + token * count, [](double x) { return static_cast<float>(x); });
}

}  // namespace

Status stream_weights(const Kernels& kernels, const StreamWeightsArgs& args) {
  parallel_for(args.num_tokens, [&](int64_t token) { weigh_token(kernels, args, token); });
  return kOk;
}

Status collapse_streams(const Kernels& kernels, const CollapseStreamsArgs& args) {
  parallel_elements(args.num_tokens, args.size, kGrain, [&](int64_t token, int64_t first_col, int64_t end_col) {
    kernels.hyper->collapse(args, token, first_col, end_col);
  });
  return kOk;
}

Status expand_streams(const Kernels& kernels, const ExpandStreamsArgs& args) {
  parallel_elements(args.num_tokens, args.size, kGrain, [&](int64_t token, int64_t first_col, int64_t end_col) {
    kernels.hyper->expand(args, token, first_col, end_col);
  });
  return kOk;
}

}  // namespace pagewick
