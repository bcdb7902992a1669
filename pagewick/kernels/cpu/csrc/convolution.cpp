// Divides gated short convolutions among the threads.
#include "convolution.h"

#include <algorithm>

#include "parallel.h"

namespace pagewick {
namespace {

// Channels and tokens of a unit. Wide units read rows in long pieces, which the processor's prefetchers follow.
constexpr int64_t kChannels = 1024, kTokens = 64;

}  // namespace

Status short_convolution(const Kernels& kernels, const ConvolutionArgs& args) {
  if (const Status status = check_sequences(args); status != kOk) return status;
  const ConvolutionKernels& convolution = *kernels.convolution;
  const int64_t channels = args.num_channels, stride = ceil_div(channels, kTapsUnit) * kTapsUnit;
  const size_t num_bytes = static_cast<size_t>(args.conv_width * stride) * sizeof(float);
  float* const taps = static_cast<float*>(thread_scratch(Scratch::kPrepared, num_bytes));
  parallel_ranges(channels, kChannels,
                  [&](int64_t first, int64_t end) { convolution.turn(args, first, end, taps + first, stride); });
  int64_t longest = 0;
  for (int64_t seq = 0; seq < args.num_seqs; ++seq)
    longest = std::max<int64_t>(longest, args.cu_seqlens_q[seq + 1] - args.cu_seqlens_q[seq]);
  const int64_t pieces = ceil_div(longest, kTokens), parts = ceil_div(channels, kChannels);
  parallel_for(args.num_seqs * pieces * parts, [&](int64_t index) {
    const StateSequence sequence = sequence_at(args, index / (pieces * parts));
    const int64_t begin = index / parts % pieces * kTokens, first = index % parts * kChannels;
    if (begin >= sequence.num_tokens) return;
    const ConvolutionUnit unit = {first, std::min(channels, first + kChannels), begin,
                                  std::min(sequence.num_tokens, begin + kTokens)};
    convolution.advance(args, sequence, unit, taps, stride);
  });
  // A source that is the target, too, is read until now.
  parallel_elements(args.num_seqs, channels, 2 * kChannels, [&](int64_t seq, int64_t first, int64_t end) {
    const StateSequence sequence = sequence_at(args, seq);
    if (sequence.num_tokens > 0) convolution.keep_inputs(args, sequence, first, end);
  });
  return kOk;
}

}  // namespace pagewick
