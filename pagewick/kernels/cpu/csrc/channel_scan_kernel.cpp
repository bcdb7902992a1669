// The scan of channels in fp32. Compiled once per instruction set. A channel's sum goes over its state in one order,
// and each step of S is rounded to fp32: a token's bits are the same in any chunk of a prompt.
#include "channel_scan.h"

#include "parallel.h"
#include "rows.h"
#include "vec_math.h"

namespace pagewick {
namespace PW_ISA {
namespace {

// Memory of a unit. S and its speeds are [vectors of channels, N, kLanes].
struct Memory {
  float* state;
  float* speed;
  float* key;    // [N], of one token
  float* query;  // [N]
};

Memory memory_for(const ChannelScanArgs& args, int64_t num_channels) {
  const int64_t row = (args.state_dim + kLanes - 1) / kLanes * kLanes;
  const int64_t size = (num_channels + kLanes - 1) / kLanes * kLanes * args.state_dim;
  float* const memory = static_cast<float*>(
      thread_scratch(Scratch::kKernel, static_cast<size_t>(2 * size + 2 * row) * sizeof(float)));
  return {memory, memory + size, memory + 2 * size, memory + 2 * size + row};
}

template <class T>
const T* row_of(const void* rows, int64_t token, int64_t stride) {
  return static_cast<const T*>(rows) + token * stride;
}

void load_state(const ChannelScanArgs& args, const StateSequence& sequence, const Memory& m, int64_t first,
                int64_t end) {
  for_vectors(first, end, [&](int64_t channel, auto count) {
    for (int64_t n = 0; n < args.state_dim; ++n) {
      const int64_t place = n * args.num_channels + channel, own = (channel - first) * args.state_dim + n * kLanes;
      const Vec earlier = sequence.source == nullptr
                              ? zero()
                              : load_count(sequence.source + args.state_offset + place, count());
      store(m.state + own, earlier);
      store(m.speed + own, exp(min(set1(88.0f), load_count(args.log_decay + place, count()))));
    }
  });
}

void store_state(const ChannelScanArgs& args, const StateSequence& sequence, const Memory& m, int64_t first,
                 int64_t end) {
  for_vectors(first, end, [&](int64_t channel, auto count) {
    for (int64_t n = 0; n < args.state_dim; ++n)
      store_count(sequence.target + args.state_offset + n * args.num_channels + channel,
                  load(m.state + (channel - first) * args.state_dim + n * kLanes), count());
  });
}

template <class T>
void advance_typed(const ChannelScanArgs& args, const StateSequence& sequence, int64_t first, int64_t end) {
  const int64_t rows = args.state_dim;
  const Memory m = memory_for(args, end - first);
  load_state(args, sequence, m, first, end);
  for (int64_t token = sequence.first_token; token < sequence.first_token + sequence.num_tokens; ++token) {
    const T *const keys = row_of<T>(args.keys, token, args.key_stride),
            *const queries = row_of<T>(args.queries, token, args.query_stride);
    for_vectors(0, rows, [&](int64_t n, auto count) {
      store(m.key + n, load_count(keys + n, count())), store(m.query + n, load_count(queries + n, count()));
    });
    const T *const values = row_of<T>(args.x, token, args.x_stride),
            *const gates = row_of<T>(args.gate, token, args.gate_stride),
            *const steps = row_of<T>(args.dt, token, args.dt_stride);
    T* const out = static_cast<T*>(args.out) + token * args.num_channels;
    for_vectors(first, end, [&](int64_t channel, auto count) {
      const Vec step = softplus(load_count(steps + channel, count()) + load_count(args.dt_bias + channel, count()));
      const Vec x = load_count(values + channel, count()), added = step * x;
      float* const state = m.state + (channel - first) * rows;
      const float* const speed = m.speed + (channel - first) * rows;
      Vec sum = zero();
      for (int64_t n = 0; n < rows; ++n) {
        const Vec kept = exp(-load(speed + n * kLanes) * step);
        const Vec value = madd(set1(m.key[n]), added, load(state + n * kLanes) * kept);
        store(state + n * kLanes, value);
        sum = madd(set1(m.query[n]), value, sum);
      }
      const Vec read = madd(load_count(args.skip + channel, count()), x, sum);
      const Vec result = read * silu(load_count(gates + channel, count()));
      count() == kLanes ? store_result(out + channel, result) : store_part(out + channel, result, count());
    });
    if (token + 1 == sequence.first_token + sequence.num_stored) store_state(args, sequence, m, first, end);
  }
}

void advance(const ChannelScanArgs& args, const StateSequence& sequence, int64_t first, int64_t end) {
  with_type(args.dtype, [&](auto* type) { advance_typed<Element<decltype(type)>>(args, sequence, first, end); });
}

}  // namespace

extern const ChannelScanKernels kChannelScan;
const ChannelScanKernels kChannelScan = {advance};

}  // namespace PW_ISA
}  // namespace pagewick
