// Divides the scan of channels among the threads. Channels do not depend on each other.
#include "channel_scan.h"

#include <algorithm>

#include "parallel.h"

namespace pagewick {
namespace {

// Channels of a unit: their states of 16 numbers, and the speeds of these, fit the first-level cache.
constexpr int64_t kChannels = 128;

}  // namespace

Status channel_scan(const Kernels& kernels, const ChannelScanArgs& args) {
  if (const Status status = check_sequences(args); status != kOk) return status;
  const int64_t parts = ceil_div(args.num_channels, kChannels);
  parallel_for(args.num_seqs * parts, [&](int64_t index) {
    const StateSequence sequence = sequence_at(args, index / parts);
    const int64_t first = index % parts * kChannels, end = std::min(args.num_channels, first + kChannels);
    if (sequence.num_tokens > 0) kernels.channel_scan->advance(args, sequence, first, end);
  });
  return kOk;
}

}  // namespace pagewick
