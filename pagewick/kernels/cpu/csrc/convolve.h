// The short convolution of channels over the tokens of a sequence, as layers that keep a state have it, and rows of
// such a state. A sum has one order: from the oldest input to the newest.
#pragma once

#include "rows.h"
#include "states.h"

namespace pagewick {
namespace PW_ISA {
namespace {

// Tokens whose convolution is computed before a state passes over them.
constexpr int64_t kChunk = 32;

inline int64_t padded(int64_t size) { return (size + kLanes - 1) / kLanes * kLanes; }

// Rows of tokens lie too far apart for the processor's own prefetchers.
template <class T>
void prefetch(const T* memory, int64_t count) {
  asm volatile("");  // GCC removes a call of a function that only prefetches
  for (int64_t i = 0; i < count; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(memory + i, 0, 2);
}

// The inputs of C channels, K for each result. Places count from the sequence's first new token.
template <class T>
struct Inputs {
  const T* rows;         // of new tokens, `stride` elements apart
  int64_t stride;
  const float* earlier;  // [K - 1, C], of the tokens before, oldest first; null: zeros
  int64_t num_earlier;   // K - 1
  int64_t num_channels;  // C

  // The inputs of a new token, from a channel on.
  struct Token {
    const T* row;
    Vec operator()(int64_t i, int64_t count) const { return load_count(row + i, count); }
  };
  Token token(int64_t place, int64_t channel) const { return {rows + place * stride + channel}; }

  Vec at(int64_t place, int64_t channel, int64_t count) const {
    if (place >= 0) return token(place, channel)(0, count);
    if (earlier == nullptr) return zero();
    return load_count(earlier + (num_earlier + place) * num_channels + channel, count);
  }
};

// Writes the weights of kLanes channels with four taps each, tap by tap. The bits of a number's index are rotated, one
// place in each stage, until those of the tap come first.
inline void turn_four_taps(const float* weight, float* taps, int64_t stride) {
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

// Writes the weights [size, num_taps] of channels tap by tap, in rows of padded(size) numbers `stride` apart.
inline void turn_taps(const float* weight, int64_t num_taps, int64_t size, float* taps, int64_t stride) {
  int64_t i = 0;
  if (num_taps == 4)
    for (; i + kLanes <= size; i += kLanes) turn_four_taps(weight + i * 4, taps + i, stride);
  for (; i < padded(size); ++i)
    for (int64_t tap = 0; tap < num_taps; ++tap)
      taps[tap * stride + i] = i < size ? weight[i * num_taps + tap] : 0.0f;
}

// Weights of channels by tap, and memory for their newest inputs: rows of padded numbers, `stride` apart.
struct Taps {
  const float* weights;  // [num_taps, stride]
  int64_t stride;
  int64_t num_taps;  // K
  float* newest;     // [num_taps, newest_stride]
  int64_t newest_stride;
};

// Calls result(n, i, count, sum) for the channels from `channel` on of tokens begin + n. kTaps: 0 means any number.
template <int kTaps, class Source, class Result>
void convolve_taps(const Source& inputs, const Taps& taps, int64_t channel, int64_t size, int64_t begin, int64_t count,
                   const Result& result) {
  const int64_t num_taps = kTaps > 0 ? kTaps : taps.num_taps, before = num_taps - 1, stride = taps.stride;
  const float* const weights = taps.weights;
  // The input of a token takes the place of the one that is no longer needed.
  const auto inputs_of = [&](int64_t n) { return taps.newest + n % num_taps * taps.newest_stride; };
  for (int64_t n = 0; n < before; ++n)
    for_vectors(0, size, [&](int64_t i, auto part) {
      store(inputs_of(n) + i, inputs.at(begin - before + n, channel + i, part()));
    });
  for (int64_t n = 0; n < count; ++n) {
    const auto token = inputs.token(begin + n, channel);
    const float* earlier[kTaps > 0 ? kTaps : 1];
    for (int64_t tap = 0; tap < kTaps; ++tap) earlier[tap] = inputs_of(n + tap);
    float* const newest = inputs_of(n + before);
    for_vectors(0, size, [&](int64_t i, auto part) {
      const Vec input = token(i, part());
      Vec sum = zero();
      if (kTaps > 0) {
#pragma GCC unroll 4
        for (int64_t tap = 0; tap + 1 < kTaps; ++tap)
          sum = madd(load(earlier[tap] + i), load(weights + tap * stride + i), sum);
      } else {
        for (int64_t tap = 0; tap < before; ++tap)
          sum = madd(load(inputs_of(n + tap) + i), load(weights + tap * stride + i), sum);
      }
      store(newest + i, input);
      result(n, i, part, madd(input, load(weights + before * stride + i), sum));
    });
  }
}

// Stores the inputs for the token after the stored state, of channels [first, end).
template <class Source>
void keep_newest_inputs(const Source& inputs, const StateSequence& sequence, int64_t first, int64_t end) {
  // In a block that is source and target, each row comes from a later one.
  for (int64_t row = 0; row < inputs.num_earlier; ++row) {
    const int64_t place = sequence.num_stored - inputs.num_earlier + row;
    float* const target = sequence.target + row * inputs.num_channels;
    for_vectors(first, end, [&](int64_t channel, auto count) {
      store_count(target + channel, inputs.at(place, channel, count()), count());
    });
  }
}

// Copy columns of a state to rows of whole vectors, with zeros behind them, and back.
inline void load_columns(const float* source, int64_t stride, int64_t rows, int64_t count, float* state) {
  for (int64_t i = 0; i < rows; ++i)
    for_vectors(0, count, [&](int64_t j, auto part) {
      store(state + i * padded(count) + j, load_count(source + i * stride + j, part()));
    });
}

inline void store_columns(const float* state, int64_t rows, int64_t count, float* target, int64_t stride) {
  for (int64_t i = 0; i < rows; ++i)
    for_vectors(0, count, [&](int64_t j, auto part) {
      store_count(target + i * stride + j, load(state + i * padded(count) + j), part());
    });
}

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick
