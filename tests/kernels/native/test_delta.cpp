#include <cmath>

#include "delta.h"
#include "testing.h"

using namespace testing;

namespace {

constexpr float kEps = 1e-6f;

struct Case {
  DType dtype;
  int64_t key_heads, value_heads, key_dim, value_dim, width;
  bool in_place;
  std::vector<int32_t> q_lens, earlier;
  float strength = 1;
  bool by_channel = false, sigmoid_gate = false;
  float bound = 0;

  int64_t decays() const { return by_channel ? value_heads * key_dim : value_heads; }
  int64_t channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
  int64_t columns() const { return value_heads * value_dim; }
  int64_t block_floats() const { return (width - 1) * channels() + columns() * key_dim; }
};

struct Inputs {
  Tensor qkv, gate, beta, decay, conv_weight, log_decay, dt_bias, norm_weight, states;
  Array<int32_t> block_tables, context_lens, cu_seqlens_q;
  int64_t num_tokens, num_seqs, num_blocks;
};

Tensor rows_of(DType dtype, int64_t num_rows, int64_t size, int64_t stride) {
  return Tensor::random(dtype, (num_rows - 1) * stride + size, 2.0);
}

Inputs make_inputs(const Case& c) {
  const int64_t num_seqs = static_cast<int64_t>(c.q_lens.size()), num_blocks = 2 * num_seqs + 1;
  std::vector<int32_t> tables, lens, starts = {0};
  for (int64_t seq = 0; seq < num_seqs; ++seq) {
    const auto block = static_cast<int32_t>(num_blocks - 1 - 2 * seq);
    tables.push_back(c.earlier[seq] > 0 ? block : -1);
    tables.push_back(c.in_place ? block : block - 1);
    // The last tokens of long sequences change no state.
    tables.push_back(c.q_lens[seq] > 4 ? c.q_lens[seq] - 3 : 0);
    lens.push_back(c.earlier[seq] + c.q_lens[seq]);
    starts.push_back(starts.back() + c.q_lens[seq]);
  }
  const int64_t tokens = starts.back();
  return {rows_of(c.dtype, tokens, c.channels(), c.channels() + 3),
          rows_of(c.dtype, tokens, c.columns(), c.columns() + 1),
          rows_of(c.dtype, tokens, c.value_heads, c.value_heads + 2),
          rows_of(c.dtype, tokens, c.decays(), c.decays()),
          Tensor::random(DType::kFloat32, c.channels() * c.width),
          Tensor::random(DType::kFloat32, c.value_heads),
          Tensor::random(DType::kFloat32, c.decays()),
          Tensor::random(DType::kFloat32, c.value_dim),
          Tensor::random(DType::kFloat32, num_blocks * c.block_floats()),
          Array<int32_t>(tables),
          Array<int32_t>(lens),
          Array<int32_t>(starts),
          tokens,
          num_seqs,
          num_blocks};
}

pagewick::DeltaArgs arguments(const Case& c, const Inputs& in, const Tensor& states, const Tensor& out) {
  pagewick::DeltaArgs args = {};
  args.qkv = in.qkv.data(), args.gate = in.gate.data(), args.beta = in.beta.data(), args.decay = in.decay.data();
  args.conv_weight = in.conv_weight.floats(), args.log_decay = in.log_decay.floats();
  args.dt_bias = in.dt_bias.floats(), args.norm_weight = in.norm_weight.floats();
  args.states = static_cast<float*>(states.data()), args.out = out.data();
  args.block_tables = in.block_tables.data(), args.context_lens = in.context_lens.data();
  args.cu_seqlens_q = in.cu_seqlens_q.data(), args.num_tokens = in.num_tokens, args.num_seqs = in.num_seqs;
  args.num_blocks = in.num_blocks, args.block_floats = c.block_floats(), args.block_table_stride = 3;
  args.num_key_heads = c.key_heads, args.num_value_heads = c.value_heads, args.key_dim = c.key_dim;
  args.value_dim = c.value_dim, args.conv_width = c.width, args.qkv_stride = c.channels() + 3;
  args.gate_stride = c.columns() + 1, args.beta_stride = c.value_heads + 2, args.decay_stride = c.decays();
  args.norm_eps = kEps, args.strength = c.strength, args.decay_bound = c.bound, args.has_channel_decay = c.by_channel;
  args.has_sigmoid_gate = c.sigmoid_gate, args.dtype = c.dtype;
  return args;
}

Tensor copy_of(const Tensor& tensor) {
  Tensor copy(tensor.dtype(), tensor.size());
  std::memcpy(copy.data(), tensor.data(), static_cast<size_t>(tensor.size() * element_size(tensor.dtype())));
  return copy;
}

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

void set_length(double* x, int64_t size, double length) {
  double squares = 1e-6;
  for (int64_t i = 0; i < size; ++i) squares += x[i] * x[i];
  for (int64_t i = 0; i < size; ++i) x[i] *= length / std::sqrt(squares);
}

// Takes a token through one value head. S: [DK, DV]; x: the channels after the convolution.
void check_head(const Case& c, const Inputs& in, int64_t token, int64_t head, const double* x, double* s,
                const Tensor& out) {
  const double* const q = x + head / (c.value_heads / c.key_heads) * c.key_dim;
  const double* const k = q + c.key_heads * c.key_dim;
  const double* const v = x + 2 * c.key_heads * c.key_dim + head * c.value_dim;
  std::vector<double> kept(c.key_dim);
  for (int64_t i = 0; i < c.key_dim; ++i) {
    const int64_t place = c.by_channel ? head * c.key_dim + i : head;
    const double x = in.decay[token * c.decays() + place] + in.dt_bias[place], speed = std::exp(in.log_decay[head]);
    kept[i] = std::exp(c.bound < 0 ? c.bound * sigmoid(speed * x) : -speed * std::log1p(std::exp(x)));
  }
  const double taken = static_cast<double>(c.strength) * sigmoid(in.beta[token * (c.value_heads + 2) + head]);
  std::vector<double> read(c.value_dim);
  double squares = 0;
  for (int64_t j = 0; j < c.value_dim; ++j) {
    double held = 0;
    for (int64_t i = 0; i < c.key_dim; ++i) held += kept[i] * s[i * c.value_dim + j] * k[i];
    for (int64_t i = 0; i < c.key_dim; ++i) {
      double& number = s[i * c.value_dim + j];
      number = kept[i] * number + k[i] * taken * (v[j] - held);
      read[j] += number * q[i];
    }
    squares += read[j] * read[j];
  }
  for (int64_t j = 0; j < c.value_dim; ++j) {
    const int64_t column = head * c.value_dim + j;
    const double gate = in.gate[token * (c.columns() + 1) + column];
    const double normed = read[j] / std::sqrt(squares / c.value_dim + static_cast<double>(kEps)) * in.norm_weight[j];
    const double activated = (c.sigmoid_gate ? 1.0 : gate) * sigmoid(gate);
    require_near(out, token * c.columns() + column, normed * activated, 2e-5 + 2e-5 * std::abs(normed), "output");
  }
}

// Checks the outputs of a sequence, and its block.
void check_sequence(const Case& c, const Inputs& in, int64_t seq, const Tensor& out, const Tensor& states) {
  const int64_t first = in.cu_seqlens_q[seq], count = in.cu_seqlens_q[seq + 1] - first, channels = c.channels();
  const int64_t stored = in.block_tables[3 * seq + 2] > 0 ? in.block_tables[3 * seq + 2] : count;
  std::vector<double> inputs((c.width - 1) * channels), s(c.columns() * c.key_dim), x(channels), left;
  if (c.earlier[seq] > 0) {
    const int64_t source = in.block_tables[3 * seq] * c.block_floats();
    for (size_t i = 0; i < inputs.size(); ++i) inputs[i] = in.states[source + static_cast<int64_t>(i)];
    for (size_t i = 0; i < s.size(); ++i) s[i] = in.states[source + static_cast<int64_t>(inputs.size() + i)];
  }
  for (int64_t n = 0; n < count; ++n) {
    for (int64_t i = 0; i < channels; ++i) inputs.push_back(in.qkv[(first + n) * (channels + 3) + i]);
    for (int64_t i = 0; i < channels; ++i) {
      double sum = 0;
      for (int64_t tap = 0; tap < c.width; ++tap)
        sum += inputs[(n + tap) * channels + i] * in.conv_weight[i * c.width + tap];
      x[i] = sum * sigmoid(sum);
    }
    for (int64_t head = 0; head < 2 * c.key_heads; ++head)
      set_length(&x[head * c.key_dim], c.key_dim, head < c.key_heads ? 1.0 / std::sqrt(c.key_dim) : 1.0);
    for (int64_t head = 0; head < c.value_heads; ++head)
      check_head(c, in, first + n, head, x.data(), &s[head * c.key_dim * c.value_dim], out);
    if (n + 1 == stored) left = s;
  }
  const int64_t target = in.block_tables[3 * seq + 1] * c.block_floats(), num_kept = (c.width - 1) * channels;
  for (int64_t i = 0; i < num_kept; ++i)
    require_near(states, target + i, inputs[stored * channels + i], 0.0, "an input that is kept");
  for (size_t i = 0; i < left.size(); ++i)
    require_near(states, target + num_kept + static_cast<int64_t>(i), left[i], 1e-5 + 1e-5 * std::abs(left[i]),
                 "a state");
}

void test_case(const Case& c) {
  begin_case("delta %s %d/%d heads [%d, %d], %d inputs", name_of(c.dtype), static_cast<int>(c.key_heads),
             static_cast<int>(c.value_heads), static_cast<int>(c.key_dim), static_cast<int>(c.value_dim),
             static_cast<int>(c.width));
  const Inputs in = make_inputs(c);
  const Outputs found = on_all_threads([&] {
    Outputs outputs;
    outputs.emplace_back(c.dtype, in.num_tokens * c.columns());
    outputs.push_back(copy_of(in.states));
    run("gated_delta_net", arguments(c, in, outputs[1], outputs[0]));
    return outputs;
  });
  std::vector<bool> is_target(in.num_blocks);
  for (int64_t seq = 0; seq < in.num_seqs; ++seq) {
    check_sequence(c, in, seq, found[0], found[1]);
    is_target[in.block_tables[3 * seq + 1]] = true;
  }
  for (int64_t i = 0; i < in.states.size(); ++i)
    if (!is_target[i / c.block_floats()]) require(found[1].bits(i) == in.states.bits(i), "another block");
}

void test_refusals() {
  const Case c = {DType::kFloat32, 1, 1, 3, 5, 2, false, {2}, {1}};
  begin_case("delta with lengths and blocks that do not fit");
  Inputs in = make_inputs(c);
  const Tensor states = copy_of(in.states), out(c.dtype, in.num_tokens * c.columns());
  const auto status = [&](const Array<int32_t>& tables, const Array<int32_t>& lens, const Array<int32_t>& starts) {
    pagewick::DeltaArgs args = arguments(c, in, states, out);
    args.block_tables = tables.data(), args.context_lens = lens.data(), args.cu_seqlens_q = starts.data();
    return status_of("gated_delta_net", args);
  };
  require(status({2, 1, 0}, {3}, {1, 2}) == pagewick::kBadLengths, "a start after the first token");
  require(status({2, 1, 0}, {3}, {0, 1}) == pagewick::kBadLengths, "an end before the last token");
  require(status({2, 1, 0}, {1}, {0, 2}) == pagewick::kBadLengths, "a short context");
  for (const int32_t bad : {-1, 3})
    require(status({2, 1, bad}, {3}, {0, 2}) == pagewick::kBadLengths, "a state behind other tokens");
  for (const int32_t bad : {-1, 3}) {
    require(status({bad, 1, 0}, {3}, {0, 2}) == pagewick::kBadBlockId, "a source that is not there");
    require(status({2, bad, 0}, {3}, {0, 2}) == pagewick::kBadBlockId, "a target that is not there");
  }
  require(states == in.states, "nothing is written");
  require(status({-1, 1, 0}, {2}, {0, 2}) == pagewick::kOk, "a source that is not read");
}

}  // namespace

void test_delta() {
  for (const DType dtype : kDTypes) {
    test_case({dtype, 2, 4, 24, 40, 4, true, {1, 2, 3, 33}, {0, 7, 1, 2}});
    test_case({dtype, 1, 3, 5, 7, 2, false, {1, 5}, {2, 0}});
    test_case({dtype, 3, 3, 16, 150, 4, true, {70, 1}, {3, 1}});
    test_case({dtype, 2, 4, 24, 40, 4, true, {1, 2, 33}, {0, 7, 2}, 2});
    test_case({dtype, 3, 3, 20, 40, 4, false, {1, 2, 33}, {0, 7, 2}, 1, true, true});
    test_case({dtype, 3, 3, 20, 40, 4, false, {1, 2, 33}, {0, 7, 2}, 1, true, true, -5});
  }
  test_case({DType::kFloat32, 1, 1, 1, 1, 1, false, {3}, {0}});
  test_case({DType::kBFloat16, 1, 2, 128, 128, 4, true, {1, 35}, {1, 0}});
  test_refusals();
}
