// Computes the inputs of the gated delta rule for each token: the convolution of its channels, queries and keys of one
// length, and the factors of S. Also where a unit's memory lies.
#pragma once

#include "delta.h"
#include "parallel.h"
#include "rows.h"
#include "vec_math.h"

namespace pagewick {
namespace PW_ISA {
namespace {

constexpr float kL2Eps = 1e-6f;
// Tokens whose convolution is computed before the state passes over them.
constexpr int64_t kChunk = 32;
int64_t padded(int64_t size) { return (size + kLanes - 1) / kLanes * kLanes; }

// log(1 + e^x), relative error below 2^-21.
Vec softplus(Vec x) {
  // max(x, 0) + log(1 + t) with t = e^-|x|, and log(1 + t) = 2 atanh(s) with s = t / (2 + t), which is at most 1 / 3.
  const Vec t = exp(x > 0.0f ? -x : x), s = t / (t + 2.0f), square = s * s;
  Vec p = set1(1.0f / 15);
  p = madd(p, square, set1(1.0f / 13));
  p = madd(p, square, set1(1.0f / 11));
  p = madd(p, square, set1(1.0f / 9));
  p = madd(p, square, set1(1.0f / 7));
  p = madd(p, square, set1(1.0f / 5));
  p = madd(p, square, set1(1.0f / 3));
  return madd(s + s, madd(p, square, set1(1.0f)), max(zero(), x));
}

// Memory of a unit. Rows of tokens, and rows of S, begin at multiples of a vector and have no gaps between their
// blocks.
struct Memory {
  float* taps;     // [K, width], the weights of the unit's channels
  float* inputs;   // [K, longest segment], the newest inputs of the convolution
  float* x;        // [kChunk, width]: the query, the key, the values
  float* common;   // [kChunk]: the product of the query and the key
  float* factors;  // [heads, 2, kChunk]: what S keeps, and how much of the difference it takes in
  float* reads;    // [kChunk, columns]
  float* state;    // [DK, columns], block of columns by block of columns
  int64_t key_begin, value_begin, width, longest, heads, columns;
};

Memory memory_for(const DeltaArgs& args, const DeltaUnit& unit) {
  Memory m = {};
  // A unit with whole heads has a block of its own for the last columns of each.
  m.heads = (unit.end_column - 1) / args.value_dim - unit.first_column / args.value_dim + 1;
  m.columns = m.heads * padded(minimum(args.value_dim, unit.end_column - unit.first_column));
  m.key_begin = padded(args.key_dim), m.value_begin = 2 * m.key_begin, m.width = m.value_begin + m.columns;
  m.longest = maximum(m.key_begin, m.columns / m.heads);
  const int64_t taps = args.conv_width * m.width, inputs = args.conv_width * m.longest;
  const int64_t per_token = m.width + 1 + 2 * m.heads + m.columns;
  const int64_t total = taps + inputs + kChunk * per_token + args.key_dim * m.columns;
  m.taps = static_cast<float*>(thread_scratch(Scratch::kKernel, static_cast<size_t>(total) * sizeof(float)));
  m.inputs = m.taps + taps, m.x = m.inputs + inputs, m.common = m.x + kChunk * m.width;
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
const T* qkv_row(const DeltaArgs& args, const DeltaSequence& sequence, int64_t place) {
  return static_cast<const T*>(args.qkv) + (sequence.first_token + place) * args.qkv_stride;
}

// Prefetches what a unit reads and writes of a token: rows of tokens lie too far apart for the processor's own
// prefetchers.
template <class T>
void prefetch_token(const DeltaArgs& args, const DeltaSequence& sequence, const DeltaUnit& unit, const Memory& m,
                    int64_t place, bool has_outputs) {
  const auto prefetch = [](const T* memory, int64_t count) {
    asm volatile("");  // GCC removes a call of a function that only prefetches
    for (int64_t i = 0; i < count; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(memory + i, 0, 2);
  };
  const T* const row = qkv_row<T>(args, sequence, place);
  for_segments(args, unit, m, [&](int64_t channel, int64_t, int64_t size) { prefetch(row + channel, size); });
  if (!has_outputs) return;
  const int64_t token = sequence.first_token + place, first = unit.first_column, count = unit.end_column - first;
  prefetch(static_cast<const T*>(args.gate) + token * args.gate_stride + first, count);
  prefetch(static_cast<const T*>(args.out) + token * args.num_value_heads * args.value_dim + first, count);
}

// Returns inputs of the convolution at a place, counted from the sequence's first new token.
template <class T>
Vec input_at(const DeltaArgs& args, const DeltaSequence& sequence, int64_t place, int64_t channel, int64_t count) {
  if (place >= 0) return load_count(qkv_row<T>(args, sequence, place) + channel, count);
  if (sequence.source == nullptr) return zero();
  return load_count(sequence.source + (args.conv_width - 1 + place) * num_channels(args) + channel, count);
}

// Writes the weights of kLanes channels with four taps each, tap by tap. The bits of a number's index are rotated, one
// place in each stage, until those of the tap come first.
void turn_four_taps(const float* weight, float* taps, int64_t stride) {
  Vec rows[4];
  for (int i = 0; i < 4; ++i) rows[i] = load(weight + i * kLanes);
#pragma GCC unroll 4
  for (int stage = 1; stage < kLanes; stage *= 2) {
    const Vec next[4] = {interleave_low(rows[0], rows[2]), interleave_high(rows[0], rows[2]),
                         interleave_low(rows[1], rows[3]), interleave_high(rows[1], rows[3])};
    for (int i = 0; i < 4; ++i) rows[i] = next[i];
  }
  for (int i = 0; i < 4; ++i) store(taps + i * stride, rows[i]);
}

void load_taps(const DeltaArgs& args, const DeltaUnit& unit, const Memory& m) {
  for_segments(args, unit, m, [&](int64_t channel, int64_t offset, int64_t size) {
    const float* const weight = args.conv_weight + channel * args.conv_width;
    int64_t i = 0;
    if (args.conv_width == 4)
      for (; i + kLanes <= size; i += kLanes) turn_four_taps(weight + i * 4, m.taps + offset + i, m.width);
    for (; i < padded(size); ++i)
      for (int64_t tap = 0; tap < args.conv_width; ++tap)
        m.taps[tap * m.width + offset + i] = i < size ? weight[i * args.conv_width + tap] : 0.0f;
  });
}

// Computes a segment of x for tokens [begin, begin + count). kTaps: 0 means any number.
template <class T, int kTaps>
void convolve_segment(const DeltaArgs& args, const DeltaSequence& sequence, const Memory& m, int64_t channel,
                      int64_t offset, int64_t size, int64_t begin, int64_t count) {
  const int64_t num_taps = kTaps > 0 ? kTaps : args.conv_width, before = num_taps - 1;
  // The input of a token takes the place of the one that is no longer needed.
  const auto inputs_of = [&](int64_t n) { return m.inputs + n % num_taps * m.longest; };
  for (int64_t n = 0; n < before; ++n)
    for_vectors(0, size, [&](int64_t i, auto part) {
      store(inputs_of(n) + i, input_at<T>(args, sequence, begin - before + n, channel + i, part()));
    });
  const float* const taps = m.taps + offset;
  for (int64_t n = 0; n < count; ++n) {
    const T* const row = qkv_row<T>(args, sequence, begin + n) + channel;
    float* const x = m.x + n * m.width + offset;
    const float* inputs[kTaps > 0 ? kTaps : 1];
    for (int64_t tap = 0; tap < kTaps; ++tap) inputs[tap] = inputs_of(n + tap);
    float* const newest = inputs_of(n + before);
    for_vectors(0, size, [&](int64_t i, auto part) {
      const Vec input = load_count(row + i, part());
      Vec sum = zero();
      if (kTaps > 0) {
#pragma GCC unroll 4
        for (int64_t tap = 0; tap + 1 < kTaps; ++tap)
          sum = madd(load(inputs[tap] + i), load(taps + tap * m.width + i), sum);
      } else {
        for (int64_t tap = 0; tap < before; ++tap)
          sum = madd(load(inputs_of(n + tap) + i), load(taps + tap * m.width + i), sum);
      }
      store(newest + i, input);
      store(x + i, silu(madd(input, load(taps + before * m.width + i), sum)));
    });
  }
}

template <class T>
void convolve(const DeltaArgs& args, const DeltaSequence& sequence, const DeltaUnit& unit, const Memory& m,
              int64_t begin, int64_t count) {
  const auto run = args.conv_width == 4 ? convolve_segment<T, 4> : convolve_segment<T, 0>;
  for_segments(args, unit, m, [&](int64_t channel, int64_t offset, int64_t size) {
    run(args, sequence, m, channel, offset, size, begin, count);
  });
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

// Computes the factors of a head, for many tokens at a time.
template <class T>
void set_factors(const DeltaArgs& args, const DeltaSequence& sequence, int64_t head, int64_t begin, int64_t count,
                 float* kept, float* taken) {
  T betas[kChunk], decays[kChunk];
  const int64_t first = sequence.first_token + begin;
  for (int64_t n = 0; n < count; ++n) {
    betas[n] = static_cast<const T*>(args.beta)[(first + n) * args.beta_stride + head];
    decays[n] = static_cast<const T*>(args.decay)[(first + n) * args.decay_stride + head];
  }
  const Vec speed = exp(min(set1(88.0f), set1(args.log_decay[head])));
  for_vectors(0, count, [&](int64_t n, auto part) {
    const Vec time = softplus(load_count(decays + n, part()) + args.dt_bias[head]);
    store(kept + n, exp(-speed * time));
    store(taken + n, times_sigmoid(set1(1.0f), load_count(betas + n, part())));
  });
}

// Computes x, common and factors of tokens [begin, begin + count).
template <class T>
void prepare(const DeltaArgs& args, const DeltaSequence& sequence, const DeltaUnit& unit, const Memory& m,
             int64_t begin, int64_t count) {
  convolve<T>(args, sequence, unit, m, begin, count);
  set_lengths(args, m, count);
  const int64_t first_head = unit.first_column / args.value_dim;
  for (int64_t head = 0; head < m.heads; ++head) {
    float* const kept = m.factors + head * 2 * kChunk;
    set_factors<T>(args, sequence, first_head + head, begin, count, kept, kept + kChunk);
  }
}

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick
