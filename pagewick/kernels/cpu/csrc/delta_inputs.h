// Computes the inputs of the gated delta rule for each token: the convolution of its channels, queries and keys of one
// length, and the factors of S. Also where a unit's memory lies.
#pragma once

#include "convolve.h"
#include "delta.h"
#include "parallel.h"
#include "vec_math.h"

namespace pagewick {
namespace PW_ISA {
namespace {

constexpr float kL2Eps = 1e-6f;
// Memory of a unit. Rows of tokens, and rows of S, begin at multiples of a vector and have no gaps between their
// blocks.
struct Memory {
  float* taps;     // [K, width], the weights of the unit's channels
  float* inputs;   // [K, longest segment], the newest inputs of the convolution
  float* x;        // [kChunk, width]: the query, the key, the values
  float* decayed;  // [kChunk, 3, padded DK], if channels decay: the factors of rows of S; the query and the key
                   // times these
  float* common;   // [kChunk]: the product of the query and the key
  float* factors;  // [heads, 2, kChunk]: what S keeps, and how much of the difference it takes in
  float* reads;    // [kChunk, columns]
  float* state;    // [DK, columns], block of columns by block of columns
  int64_t key_begin, value_begin, width, longest, heads, columns, decayed_width;
};

Memory memory_for(const DeltaArgs& args, const DeltaUnit& unit) {
  Memory m = {};
  // A unit with whole heads has a block of its own for the last columns of each.
  m.heads = (unit.end_column - 1) / args.value_dim - unit.first_column / args.value_dim + 1;
  m.columns = m.heads * padded(minimum(args.value_dim, unit.end_column - unit.first_column));
  m.key_begin = padded(args.key_dim), m.value_begin = 2 * m.key_begin, m.width = m.value_begin + m.columns;
  m.longest = maximum(m.key_begin, m.columns / m.heads);
  m.decayed_width = args.has_channel_decay ? 3 * m.key_begin : 0;
  const int64_t taps = args.conv_width * m.width, inputs = args.conv_width * m.longest;
  const int64_t per_token = m.width + m.decayed_width + 1 + 2 * m.heads + m.columns;
  const int64_t total = taps + inputs + kChunk * per_token + args.key_dim * m.columns;
  m.taps = static_cast<float*>(thread_scratch(Scratch::kKernel, static_cast<size_t>(total) * sizeof(float)));
  m.inputs = m.taps + taps, m.x = m.inputs + inputs;
  m.decayed = m.x + kChunk * m.width, m.common = m.decayed + kChunk * m.decayed_width;
  m.factors = m.common + kChunk, m.reads = m.factors + 2 * m.heads * kChunk, m.state = m.reads + kChunk * m.columns;
  return m;
}

// Calls f(first channel, offset in a row, number of channels) for the query, the key and each head's values.
template <class F>
void for_segments(const DeltaArgs& args, const DeltaUnit& unit, const Memory& m, const F& f) {
  const int64_t keys = args.num_key_heads * args.key_dim, size = (unit.end_column - unit.first_column) / m.heads;
  f(unit.key_head * args.key_dim, int64_t{0}, args.key_dim);
  f(keys + unit.key_head * args.key_dim, m.key_begin, args.key_dim);
  for (int64_t head = 0; head < m.heads; ++head)
    f(2 * keys + unit.first_column + head * size, m.value_begin + head * padded(size), size);
}

template <class T>
Inputs<T> inputs_of(const DeltaArgs& args, const StateSequence& sequence) {
  const T* const rows = static_cast<const T*>(args.qkv) + sequence.first_token * args.qkv_stride;
  return {rows, args.qkv_stride, sequence.source, args.conv_width - 1, num_channels(args)};
}

// Prefetches what a unit reads and writes of a token.
template <class T>
void prefetch_token(const DeltaArgs& args, const StateSequence& sequence, const DeltaUnit& unit, const Memory& m,
                    int64_t place, bool has_outputs) {
  const T* const row = inputs_of<T>(args, sequence).token(place, 0).row;
  for_segments(args, unit, m, [&](int64_t channel, int64_t, int64_t size) { prefetch(row + channel, size); });
  const int64_t token = sequence.first_token + place, first = unit.first_column, count = unit.end_column - first;
  if (args.has_channel_decay)
    prefetch(static_cast<const T*>(args.decay) + token * args.decay_stride + unit.key_head * args.key_dim,
             args.key_dim);
  if (!has_outputs) return;
  prefetch(static_cast<const T*>(args.gate) + token * args.gate_stride + first, count);
  prefetch(static_cast<const T*>(args.out) + token * args.num_value_heads * args.value_dim + first, count);
}

void load_taps(const DeltaArgs& args, const DeltaUnit& unit, const Memory& m) {
  for_segments(args, unit, m, [&](int64_t channel, int64_t offset, int64_t size) {
    turn_taps(args.conv_weight + channel * args.conv_width, args.conv_width, size, m.taps + offset, m.width);
  });
}

// Computes all segments of x for tokens [begin, begin + count).
template <class T, int kTaps>
void convolve_segments(const DeltaArgs& args, const StateSequence& sequence, const DeltaUnit& unit, const Memory& m,
                       int64_t begin, int64_t count) {
  const Inputs<T> inputs = inputs_of<T>(args, sequence);
  for_segments(args, unit, m, [&](int64_t channel, int64_t offset, int64_t size) {
    const Taps taps = {m.taps + offset, m.width, args.conv_width, m.inputs, m.longest};
    convolve_taps<kTaps>(inputs, taps, channel, size, begin, count,
                         [x = m.x + offset, width = m.width](int64_t n, int64_t i, auto, Vec sum) {
                           store(x + n * width + i, silu(sum));
                         });
  });
}

template <class T>
void convolve(const DeltaArgs& args, const StateSequence& sequence, const DeltaUnit& unit, const Memory& m,
              int64_t begin, int64_t count) {
  const auto run = args.conv_width == 4 ? convolve_segments<T, 4> : convolve_segments<T, 0>;
  run(args, sequence, unit, m, begin, count);
}

// Scales queries to length 1 / sqrt(DK) and keys to length 1. The roots of all tokens are computed together.
void set_lengths(const DeltaArgs& args, const Memory& m, int64_t count) {
  const int64_t size = args.key_dim;
  float scales[2][kChunk];
  for (int64_t n = 0; n < count; ++n)
    for (int i = 0; i < 2; ++i) scales[i][n] = sum_of_squares(m.x + n * m.width + i * m.key_begin, size) + kL2Eps;
  const float lengths[] = {1.0f / __builtin_sqrtf(static_cast<float>(size)), 1.0f};
  for (int64_t n = 0; n < count; n += kLanes)
    for (int i = 0; i < 2; ++i) store(scales[i] + n, set1(lengths[i]) / sqrt(load(scales[i] + n)));
  for (int64_t n = 0; n < count; ++n) {
    float *const query = m.x + n * m.width, *const key = query + m.key_begin;
    m.common[n] = sum_vectors(size, [&](Vec& sum, int64_t i, auto) {
      const Vec scaled_query = load(query + i) * scales[0][n], scaled_key = load(key + i) * scales[1][n];
      store(query + i, scaled_query), store(key + i, scaled_key);
      sum = madd(scaled_key, scaled_query, sum);
    });
  }
}

// In one unit of time, S decays to exp(-speed) times its numbers.
inline Vec decay_speed(const DeltaArgs& args, int64_t head) {
  return exp(min(set1(88.0f), set1(args.log_decay[head])));
}

// Returns the factors of rows of S by what the projection and its bias give.
inline Vec row_factors(const DeltaArgs& args, Vec speed, Vec x) {
  if (args.decay_bound < 0.0f) return exp(times_sigmoid(set1(args.decay_bound), speed * x));
  return exp(-speed * softplus(x));
}

// Computes the factors of a head's rows of S, and the query and the key times these.
template <class T>
void set_row_factors(const DeltaArgs& args, const StateSequence& sequence, int64_t head, const Memory& m, int64_t begin,
                     int64_t count) {
  const Vec speed = decay_speed(args, head);
  const float* const bias = args.dt_bias + head * args.key_dim;
  for (int64_t n = 0; n < count; ++n) {
    const int64_t token = sequence.first_token + begin + n;
    const T* const decays = static_cast<const T*>(args.decay) + token * args.decay_stride + head * args.key_dim;
    const float *const query = m.x + n * m.width, *const key = query + m.key_begin;
    float* const kept = m.decayed + n * m.decayed_width;
    for_vectors(0, args.key_dim, [&](int64_t i, auto part) {
      const Vec factor = row_factors(args, speed, load_count(decays + i, part()) + load_count(bias + i, part()));
      store(kept + i, factor);
      store(kept + m.key_begin + i, load(query + i) * factor);
      store(kept + 2 * m.key_begin + i, load(key + i) * factor);
    });
  }
}

// Computes the factors of a head, for many tokens at a time. If channels decay, S is not kept by a factor of the head.
template <class T>
void set_factors(const DeltaArgs& args, const StateSequence& sequence, int64_t head, int64_t begin, int64_t count,
                 float* kept, float* taken) {
  T betas[kChunk], decays[kChunk];
  const int64_t first = sequence.first_token + begin;
  const int64_t row = args.has_channel_decay ? head * args.key_dim : head;
  for (int64_t n = 0; n < count; ++n) {
    betas[n] = static_cast<const T*>(args.beta)[(first + n) * args.beta_stride + head];
    decays[n] = static_cast<const T*>(args.decay)[(first + n) * args.decay_stride + row];
  }
  const Vec speed = decay_speed(args, head);
  for_vectors(0, count, [&](int64_t n, auto part) {
    const Vec time = softplus(load_count(decays + n, part()) + args.dt_bias[row]);
    store(kept + n, args.has_channel_decay ? set1(1.0f) : exp(-speed * time));
    store(taken + n, times_sigmoid(set1(args.strength), load_count(betas + n, part())));
  });
}

// Computes x, common and factors of tokens [begin, begin + count).
template <class T>
void prepare(const DeltaArgs& args, const StateSequence& sequence, const DeltaUnit& unit, const Memory& m,
             int64_t begin, int64_t count) {
  convolve<T>(args, sequence, unit, m, begin, count);
  set_lengths(args, m, count);
  const int64_t first_head = unit.first_column / args.value_dim;
  for (int64_t head = 0; head < m.heads; ++head) {
    float* const kept = m.factors + head * 2 * kChunk;
    set_factors<T>(args, sequence, first_head + head, begin, count, kept, kept + kChunk);
    if (args.has_channel_decay) set_row_factors<T>(args, sequence, first_head + head, m, begin, count);
  }
}

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick
