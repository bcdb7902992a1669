// Short convolutions in fp32. Compiled once per instruction set.
#include "convolution.h"

#include "convolve.h"
#include "parallel.h"
#include "vec_math.h"

namespace pagewick {
namespace PW_ISA {
namespace {

// The inputs of the convolution are products of two parts of a row.
template <class T>
struct Products {
  const T* rows;         // of new tokens, `stride` elements apart
  int64_t stride;
  const float* earlier;  // [K - 1, D], of the tokens before, oldest first; null: zeros
  int64_t num_earlier;   // K - 1
  int64_t num_channels;  // D

  struct Token {
    const T* b;
    const T* x;
    Vec operator()(int64_t i, int64_t count) const { return load_count(b + i, count) * load_count(x + i, count); }
  };
  Token token(int64_t place, int64_t channel) const {
    const T* const b = rows + place * stride + channel;
    return {b, b + 2 * num_channels};
  }

  Vec at(int64_t place, int64_t channel, int64_t count) const {
    if (place >= 0) return token(place, channel)(0, count);
    if (earlier == nullptr) return zero();
    return load_count(earlier + (num_earlier + place) * num_channels + channel, count);
  }
};

static_assert(kTapsUnit % kLanes == 0, "rows of taps have whole vectors");

// Source: Products or, without gates, Inputs.
template <class Source, class T>
Source source_of(const ConvolutionArgs& args, const StateSequence& sequence) {
  const T* const rows = static_cast<const T*>(args.bcx) + sequence.first_token * args.bcx_stride;
  return {rows, args.bcx_stride, sequence.source, args.conv_width - 1, args.num_channels};
}

// finish(n, i, count, sum): the result of token unit.begin + n for channels from unit.first_channel + i on.
template <class T, class Source, class F>
void advance_source(const ConvolutionArgs& args, const StateSequence& sequence, const ConvolutionUnit& unit,
                    const float* weights, int64_t weights_stride, const Source& source, const F& finish) {
  const int64_t first = unit.first_channel, size = unit.end_channel - first, channels = args.num_channels;
  const size_t num_bytes = static_cast<size_t>(args.conv_width * padded(size)) * sizeof(float);
  float* const newest = static_cast<float*>(thread_scratch(Scratch::kKernel, num_bytes));
  const Taps taps = {weights + first, weights_stride, args.conv_width, newest, padded(size)};
  T* const out = static_cast<T*>(args.out) + (sequence.first_token + unit.begin) * channels + first;
  const float* const bias = args.bias == nullptr ? nullptr : args.bias + first;
  const auto write = [=](int64_t n, int64_t i, auto part, Vec sum) {
    if (bias != nullptr) sum = sum + load_count(bias + i, part());
    const Vec result = finish(n, i, part(), sum);
    T* const target = out + n * channels + i;
    part() == kLanes ? store_result(target, result) : store_part(target, result, part());
  };
  const int64_t count = unit.end - unit.begin;
  switch (args.conv_width) {
    case 3: return convolve_taps<3>(source, taps, first, size, unit.begin, count, write);
    case 4: return convolve_taps<4>(source, taps, first, size, unit.begin, count, write);
    default: return convolve_taps<0>(source, taps, first, size, unit.begin, count, write);
  }
}

template <class T>
void advance_typed(const ConvolutionArgs& args, const StateSequence& sequence, const ConvolutionUnit& unit,
                   const float* weights, int64_t weights_stride) {
  if (!args.has_gates) {
    const auto source = source_of<Inputs<T>, T>(args, sequence);
    return advance_source<T>(args, sequence, unit, weights, weights_stride, source,
                             [](int64_t, int64_t, int64_t, Vec sum) { return silu(sum); });
  }
  const auto source = source_of<Products<T>, T>(args, sequence);
  const T* const c = source.token(unit.begin, unit.first_channel).b + args.num_channels;
  advance_source<T>(args, sequence, unit, weights, weights_stride, source,
                    [c, stride = args.bcx_stride](int64_t n, int64_t i, int64_t count, Vec sum) {
                      return load_count(c + n * stride + i, count) * sum;
                    });
}

void turn(const ConvolutionArgs& args, int64_t first, int64_t end, float* taps, int64_t stride) {
  turn_taps(args.weight + first * args.conv_width, args.conv_width, end - first, taps, stride);
}

void advance(const ConvolutionArgs& args, const StateSequence& sequence, const ConvolutionUnit& unit,
             const float* taps, int64_t stride) {
  with_type(args.dtype, [&](auto* type) {
    advance_typed<Element<decltype(type)>>(args, sequence, unit, taps, stride);
  });
}

void keep_inputs(const ConvolutionArgs& args, const StateSequence& sequence, int64_t first, int64_t end) {
  with_type(args.dtype, [&](auto* type) {
    using T = Element<decltype(type)>;
    if (args.has_gates) keep_newest_inputs(source_of<Products<T>, T>(args, sequence), sequence, first, end);
    else keep_newest_inputs(source_of<Inputs<T>, T>(args, sequence), sequence, first, end);
  });
}

}  // namespace

extern const ConvolutionKernels kConvolution;
const ConvolutionKernels kConvolution = {turn, advance, keep_inputs};

}  // namespace PW_ISA
}  // namespace pagewick
