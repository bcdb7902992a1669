// Sums over the streams of hyper-connections, in fp32 and rounded once. Compiled once per instruction set.
#include "hyper.h"

#include "rows.h"

namespace pagewick {
namespace PW_ISA {
namespace {

// Streams are added one after the other, and products are rounded, as in the definition.
template <class T>
void collapse(const CollapseStreamsArgs& args, int64_t token, int64_t first_col, int64_t end_col) {
  const T* const streams = static_cast<const T*>(args.streams) + token * args.num_streams * args.size;
  const float* const weights = args.weights + token * args.num_streams;
  T* const out = static_cast<T*>(args.out) + token * args.size;
  for_vectors(first_col, end_col, [&](int64_t i, auto count) {
    Vec sum = load_count(streams + i, count()) * weights[0];
    for (int64_t stream = 1; stream < args.num_streams; ++stream)
      sum = sum + load_count(streams + stream * args.size + i, count()) * weights[stream];
    store_count(out + i, sum, count());
  });
}

template <class T>
void expand(const ExpandStreamsArgs& args, int64_t token, int64_t first_col, int64_t end_col) {
  const int64_t num_streams = args.num_streams;
  const T* const streams = static_cast<const T*>(args.streams) + token * num_streams * args.size;
  const T* const output = static_cast<const T*>(args.output) + token * args.output_stride;
  const float* const after = args.after + token * num_streams;
  const float* const mixing = args.mixing == nullptr ? nullptr : args.mixing + token * num_streams * num_streams;
  T* const out = static_cast<T*>(args.out) + token * num_streams * args.size;
  for (int64_t target = 0; target < num_streams; ++target)
    for_vectors(first_col, end_col, [&](int64_t i, auto count) {
      Vec sum = load_count(output + i, count()) * after[target];
      if (mixing == nullptr) sum = sum + load_count(streams + target * args.size + i, count());
      else
        for (int64_t stream = 0; stream < num_streams; ++stream)
          sum = sum + load_count(streams + stream * args.size + i, count()) * mixing[stream * num_streams + target];
      store_count(out + target * args.size + i, sum, count());
    });
}

double sum_of_squares_any(const StreamWeightsArgs& args, int64_t token) {
  return with_type(args.dtype, [&](auto* type) {
    const auto streams = static_cast<decltype(type)>(const_cast<void*>(args.streams)) + token * args.num_streams * args.size;
    double sum = 0.0;
    for (int64_t stream = 0; stream < args.num_streams; ++stream)
      sum += double{sum_of_squares(streams + stream * args.size, args.size)};
    return sum;
  });
}

void collapse_any(const CollapseStreamsArgs& args, int64_t token, int64_t first_col, int64_t end_col) {
  with_type(args.dtype, [&](auto* type) { collapse<Element<decltype(type)>>(args, token, first_col, end_col); });
}

void expand_any(const ExpandStreamsArgs& args, int64_t token, int64_t first_col, int64_t end_col) {
  with_type(args.dtype, [&](auto* type) { expand<Element<decltype(type)>>(args, token, first_col, end_col); });
}

}  // namespace

extern const HyperKernels kHyper;
const HyperKernels kHyper = {sum_of_squares_any, collapse_any, expand_any};

}  // namespace PW_ISA
}  // namespace pagewick
