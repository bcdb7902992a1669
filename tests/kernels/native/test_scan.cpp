#include <cmath>

#include "channel_scan.h"
#include "convolution.h"
#include "scan.h"
#include "testing.h"

using namespace testing;

namespace {

constexpr float kEps = 1e-5f, kGateScale = 0.75f, kStepScale = 1.25f;

// The sequences of a batch, and a block for the source and the target of each.
struct Sequences {
  bool in_place;
  std::vector<int32_t> q_lens, earlier;
};

struct Batch {
  Array<int32_t> block_tables, context_lens, cu_seqlens_q;
  int64_t num_tokens, num_seqs, num_blocks;

  // The number of new tokens whose state is stored.
  int64_t num_stored(int64_t seq) const {
    const int32_t count = block_tables[3 * seq + 2];
    return count > 0 ? count : cu_seqlens_q[seq + 1] - cu_seqlens_q[seq];
  }
};

Batch make_batch(const Sequences& c) {
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
  return {Array<int32_t>(tables), Array<int32_t>(lens), Array<int32_t>(starts), starts.back(), num_seqs, num_blocks};
}

template <class Args>
void set_batch(Args& args, const Batch& batch, const Tensor& states) {
  args.states = static_cast<float*>(states.data()), args.block_tables = batch.block_tables.data();
  args.context_lens = batch.context_lens.data(), args.cu_seqlens_q = batch.cu_seqlens_q.data();
  args.num_tokens = batch.num_tokens, args.num_seqs = batch.num_seqs, args.num_blocks = batch.num_blocks;
  args.block_floats = states.size() / batch.num_blocks, args.block_table_stride = 3;
}

Tensor rows_of(DType dtype, int64_t num_rows, int64_t size, int64_t stride) {
  return Tensor::random(dtype, (num_rows - 1) * stride + size, 2.0);
}

Tensor copy_of(const Tensor& tensor) {
  Tensor copy(tensor.dtype(), tensor.size());
  std::memcpy(copy.data(), tensor.data(), static_cast<size_t>(tensor.size() * element_size(tensor.dtype())));
  return copy;
}

double silu(double x) { return x / (1.0 + std::exp(-x)); }

// Runs an operation; the result, and the states that are left.
template <class Args>
Outputs run_on_all_threads(const char* name, const Args& args, const Batch& batch, const Tensor& before, DType dtype,
                           int64_t out_size) {
  return on_all_threads([&] {
    Outputs outputs;
    outputs.emplace_back(dtype, out_size);
    outputs.push_back(copy_of(before));
    Args own = args;
    set_batch(own, batch, outputs[1]), own.out = outputs[0].data();
    run(name, own);
    return outputs;
  });
}

// Returns the numbers of a sequence's block before the step, from `first` on.
std::vector<double> numbers_before(const Batch& batch, int64_t seq, const Tensor& states, int64_t first,
                                   int64_t count) {
  std::vector<double> numbers(count);
  const int32_t block = batch.block_tables[3 * seq];
  for (int64_t i = 0; i < count && block >= 0; ++i)
    numbers[i] = states[block * (states.size() / batch.num_blocks) + first + i];
  return numbers;
}

// Checks the numbers of a sequence's target, from `first` on.
void check_target(const Batch& batch, int64_t seq, const Tensor& states, int64_t first, const double* numbers,
                  int64_t count, double error) {
  const int64_t block = batch.block_tables[3 * seq + 1] * (states.size() / batch.num_blocks);
  for (int64_t i = 0; i < count; ++i)
    require_near(states, block + first + i, numbers[i], error + error * std::abs(numbers[i]), "a state");
}

void check_other_blocks(const Batch& batch, const Tensor& before, const Tensor& after) {
  std::vector<bool> is_target(batch.num_blocks);
  for (int64_t seq = 0; seq < batch.num_seqs; ++seq) is_target[batch.block_tables[3 * seq + 1]] = true;
  for (int64_t i = 0; i < before.size(); ++i)
    if (!is_target[i / (before.size() / batch.num_blocks)])
      require(after.bits(i) == before.bits(i), "another block");
}

struct ScanCase {
  DType dtype;
  int64_t heads, groups, head_dim, state_dim, width, norm_groups;  // norm_groups: 0 for no norm
  bool is_norm_first;
  Sequences sequences;

  int64_t columns() const { return heads * head_dim; }
  int64_t channels() const { return columns() + 2 * groups * state_dim; }
  int64_t kept() const { return (width - 1) * channels(); }
};

struct ScanInputs {
  Tensor xbc, gate, dt, conv_weight, conv_bias, log_decay, skip, dt_bias, norm_weight, states;
};

ScanInputs make_inputs(const ScanCase& c, const Batch& batch) {
  const auto floats = [](int64_t size) { return Tensor::random(DType::kFloat32, size); };
  return {rows_of(c.dtype, batch.num_tokens, c.channels(), c.channels() + 3),
          rows_of(c.dtype, batch.num_tokens, c.columns(), c.columns() + 1),
          rows_of(c.dtype, batch.num_tokens, c.heads, c.heads + 2),
          floats(c.channels() * c.width),
          floats(c.channels()),
          floats(c.heads),
          floats(c.heads),
          floats(c.heads),
          floats(c.columns()),
          floats(batch.num_blocks * (c.kept() + c.columns() * c.state_dim))};
}

pagewick::ScanArgs arguments(const ScanCase& c, const ScanInputs& in) {
  pagewick::ScanArgs args = {};
  args.xbc = in.xbc.data(), args.gate = in.gate.data(), args.dt = in.dt.data();
  args.conv_weight = in.conv_weight.floats(), args.conv_bias = in.conv_bias.floats();
  args.log_decay = in.log_decay.floats(), args.skip = in.skip.floats(), args.dt_bias = in.dt_bias.floats();
  args.norm_weight = c.norm_groups > 0 ? in.norm_weight.floats() : nullptr;
  args.num_heads = c.heads, args.num_groups = c.groups, args.head_dim = c.head_dim, args.state_dim = c.state_dim;
  args.conv_width = c.width, args.num_norm_groups = c.norm_groups > 0 ? c.norm_groups : 1;
  args.xbc_stride = c.channels() + 3, args.gate_stride = c.columns() + 1, args.dt_stride = c.heads + 2;
  args.norm_eps = kEps, args.gate_scale = kGateScale, args.dt_scale = kStepScale;
  args.is_norm_first = c.is_norm_first, args.dtype = c.dtype;
  return args;
}

// Takes a token through a head's S [N, P], and writes what its query reads [P]. x: the channels after the convolution.
void advance_head(const ScanCase& c, const ScanInputs& in, int64_t token, int64_t head, const double* x, double* s,
                  double* read) {
  const double* const key = x + c.columns() + head / (c.heads / c.groups) * c.state_dim;
  const double* const query = key + c.groups * c.state_dim;
  const double* const values = x + head * c.head_dim;
  const double raw = in.dt[token * (c.heads + 2) + head] * static_cast<double>(kStepScale) + in.dt_bias[head];
  const double step = std::log1p(std::exp(raw)), kept = std::exp(-std::exp(in.log_decay[head]) * step);
  for (int64_t j = 0; j < c.head_dim; ++j) {
    read[j] = in.skip[head] * values[j];
    for (int64_t i = 0; i < c.state_dim; ++i) {
      double& number = s[i * c.head_dim + j];
      number = kept * number + key[i] * step * values[j];
      read[j] += number * query[i];
    }
  }
}

void check_output(const ScanCase& c, const ScanInputs& in, int64_t token, std::vector<double> y, const Tensor& out) {
  const auto gate = [&](int64_t i) {
    return silu(in.gate[token * (c.columns() + 1) + i] * static_cast<double>(kGateScale));
  };
  if (c.norm_groups == 0 || !c.is_norm_first)
    for (int64_t i = 0; i < c.columns(); ++i) y[i] *= gate(i);
  const int64_t size = c.columns() / (c.norm_groups > 0 ? c.norm_groups : 1);
  for (int64_t first = 0; first < c.columns() && c.norm_groups > 0; first += size) {
    double squares = 0;
    for (int64_t i = first; i < first + size; ++i) squares += y[i] * y[i];
    const double scale = 1.0 / std::sqrt(squares / static_cast<double>(size) + static_cast<double>(kEps));
    for (int64_t i = first; i < first + size; ++i)
      y[i] *= scale * in.norm_weight[i] * (c.is_norm_first ? gate(i) : 1.0);
  }
  for (int64_t i = 0; i < c.columns(); ++i)
    require_near(out, token * c.columns() + i, y[i], 5e-5 + 5e-5 * std::abs(y[i]), "output");
}

void check_sequence(const ScanCase& c, const ScanInputs& in, const Batch& batch, int64_t seq, const Outputs& found) {
  const int64_t first = batch.cu_seqlens_q[seq], count = batch.cu_seqlens_q[seq + 1] - first, channels = c.channels();
  std::vector<double> inputs = numbers_before(batch, seq, in.states, 0, c.kept());
  std::vector<double> s = numbers_before(batch, seq, in.states, c.kept(), c.columns() * c.state_dim);
  std::vector<double> x(channels), read(c.columns()), left;
  for (int64_t n = 0; n < count; ++n) {
    for (int64_t i = 0; i < channels; ++i) inputs.push_back(in.xbc[(first + n) * (channels + 3) + i]);
    for (int64_t i = 0; i < channels; ++i) {
      double sum = in.conv_bias[i];
      for (int64_t tap = 0; tap < c.width; ++tap)
        sum += inputs[(n + tap) * channels + i] * in.conv_weight[i * c.width + tap];
      x[i] = silu(sum);
    }
    for (int64_t head = 0; head < c.heads; ++head)
      advance_head(c, in, first + n, head, x.data(), &s[head * c.state_dim * c.head_dim], &read[head * c.head_dim]);
    check_output(c, in, first + n, read, found[0]);
    if (n + 1 == batch.num_stored(seq)) left = s;
  }
  check_target(batch, seq, found[1], 0, inputs.data() + batch.num_stored(seq) * channels, c.kept(), 0.0);
  check_target(batch, seq, found[1], c.kept(), left.data(), static_cast<int64_t>(left.size()), 1e-5);
}

void test_scan_case(const ScanCase& c) {
  begin_case("scan %s %d/%d heads [%d, %d], %d inputs, %d norms", name_of(c.dtype), static_cast<int>(c.heads),
             static_cast<int>(c.groups), static_cast<int>(c.state_dim), static_cast<int>(c.head_dim),
             static_cast<int>(c.width), static_cast<int>(c.norm_groups));
  const Batch batch = make_batch(c.sequences);
  const ScanInputs in = make_inputs(c, batch);
  const Outputs found = run_on_all_threads("selective_scan", arguments(c, in), batch, in.states, c.dtype,
                                           batch.num_tokens * c.columns());
  for (int64_t seq = 0; seq < batch.num_seqs; ++seq) check_sequence(c, in, batch, seq, found);
  check_other_blocks(batch, in.states, found[1]);
}

struct ConvolutionCase {
  DType dtype;
  int64_t channels, width;
  bool has_bias;
  Sequences sequences;
  bool has_gates = true;
};

void test_convolution_case(const ConvolutionCase& c) {
  begin_case("convolution %s of %d channels, %d inputs, %s gates", name_of(c.dtype), static_cast<int>(c.channels),
             static_cast<int>(c.width), c.has_gates ? "with" : "without");
  const Batch batch = make_batch(c.sequences);
  const int64_t size = c.channels, parts = c.has_gates ? 3 : 1, stride = parts * size + 1, kept = (c.width - 1) * size;
  const Tensor bcx = rows_of(c.dtype, batch.num_tokens, parts * size, stride);
  const Tensor weight = Tensor::random(DType::kFloat32, size * c.width), bias = Tensor::random(DType::kFloat32, size);
  const Tensor states = Tensor::random(DType::kFloat32, batch.num_blocks * (kept + 2));
  pagewick::ConvolutionArgs args = {};
  args.bcx = bcx.data(), args.weight = weight.floats(), args.bias = c.has_bias ? bias.floats() : nullptr;
  args.num_channels = size, args.conv_width = c.width, args.bcx_stride = stride, args.has_gates = c.has_gates;
  args.dtype = c.dtype;
  const Outputs found =
      run_on_all_threads("short_convolution", args, batch, states, c.dtype, batch.num_tokens * size);
  for (int64_t seq = 0; seq < batch.num_seqs; ++seq) {
    const int64_t first = batch.cu_seqlens_q[seq], count = batch.cu_seqlens_q[seq + 1] - first;
    std::vector<double> products = numbers_before(batch, seq, states, 0, kept);
    for (int64_t n = 0; n < count; ++n) {
      const int64_t row = (first + n) * stride;
      for (int64_t i = 0; i < size; ++i)
        products.push_back(bcx[row + i] * (c.has_gates ? bcx[row + 2 * size + i] : 1.0f));
      for (int64_t i = 0; i < size; ++i) {
        double sum = c.has_bias ? bias[i] : 0.0;
        for (int64_t tap = 0; tap < c.width; ++tap) sum += products[(n + tap) * size + i] * weight[i * c.width + tap];
        const double expected = c.has_gates ? bcx[row + size + i] * sum : silu(sum);
        require_near(found[0], (first + n) * size + i, expected, 2e-5 + 1e-5 * std::abs(sum), "output");
      }
    }
    check_target(batch, seq, found[1], 0, products.data() + batch.num_stored(seq) * size, kept, 1e-6);
  }
  check_other_blocks(batch, states, found[1]);
}

struct ChannelCase {
  DType dtype;
  int64_t channels, state_dim, offset;
  Sequences sequences;
};

void test_channel_case(const ChannelCase& c) {
  begin_case("channels %s of [%d, %d]", name_of(c.dtype), static_cast<int>(c.state_dim), static_cast<int>(c.channels));
  const Batch batch = make_batch(c.sequences);
  const int64_t size = c.channels, dim = c.state_dim, tokens = batch.num_tokens;
  const Tensor x = rows_of(c.dtype, tokens, size, size + 1), gate = rows_of(c.dtype, tokens, size, size + 2);
  const Tensor dt = rows_of(c.dtype, tokens, size, size + 3), keys = rows_of(c.dtype, tokens, dim, dim + 4);
  const Tensor queries = rows_of(c.dtype, tokens, dim, dim + 5);
  const Tensor log_decay = Tensor::random(DType::kFloat32, dim * size), skip = Tensor::random(DType::kFloat32, size);
  const Tensor dt_bias = Tensor::random(DType::kFloat32, size);
  const Tensor states = Tensor::random(DType::kFloat32, batch.num_blocks * (c.offset + dim * size + 2));
  pagewick::ChannelScanArgs args = {};
  args.x = x.data(), args.gate = gate.data(), args.dt = dt.data(), args.keys = keys.data();
  args.queries = queries.data(), args.log_decay = log_decay.floats(), args.skip = skip.floats();
  args.dt_bias = dt_bias.floats(), args.num_channels = size, args.state_dim = dim, args.state_offset = c.offset;
  args.x_stride = size + 1, args.gate_stride = size + 2, args.dt_stride = size + 3, args.key_stride = dim + 4;
  args.query_stride = dim + 5, args.dtype = c.dtype;
  const Outputs found = run_on_all_threads("channel_scan", args, batch, states, c.dtype, tokens * size);
  for (int64_t seq = 0; seq < batch.num_seqs; ++seq) {
    std::vector<double> s = numbers_before(batch, seq, states, c.offset, dim * size);
    std::vector<double> left;
    for (int64_t t = batch.cu_seqlens_q[seq]; t < batch.cu_seqlens_q[seq + 1]; ++t) {
      for (int64_t i = 0; i < size; ++i) {
        const double value = x[t * (size + 1) + i];
        const double raw = static_cast<double>(dt[t * (size + 3) + i]) + static_cast<double>(dt_bias[i]);
        const double step = std::log1p(std::exp(raw));
        double read = skip[i] * value, parts = std::abs(read);
        for (int64_t n = 0; n < dim; ++n) {
          double& number = s[n * size + i];
          number = number * std::exp(-std::exp(log_decay[n * size + i]) * step) + keys[t * (dim + 4) + n] * step * value;
          read += queries[t * (dim + 5) + n] * number;
          parts += std::abs(queries[t * (dim + 5) + n] * number);
        }
        const double activated = silu(gate[t * (size + 2) + i]);
        require_near(found[0], t * size + i, read * activated, 2e-5 + 2e-5 * parts * std::abs(activated), "output");
      }
      if (t + 1 == batch.cu_seqlens_q[seq] + batch.num_stored(seq)) left = s;
    }
    check_target(batch, seq, found[1], c.offset, left.data(), dim * size, 2e-5);
  }
}

template <class Args>
void test_refusals(const char* name, const Args& args, const Tensor& states, const Tensor& out) {
  begin_case("%s with lengths and blocks that do not fit", name);
  const Tensor before = copy_of(states);
  const auto status = [&](const Array<int32_t>& tables, const Array<int32_t>& lens, const Array<int32_t>& starts) {
    Args own = args;
    own.states = static_cast<float*>(states.data()), own.out = out.data(), own.num_tokens = 2, own.num_seqs = 1;
    own.num_blocks = 3, own.block_floats = states.size() / 3, own.block_table_stride = 3;
    own.block_tables = tables.data(), own.context_lens = lens.data(), own.cu_seqlens_q = starts.data();
    return status_of(name, own);
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
  require(states == before, "nothing is written");
  require(status({-1, 1, 0}, {2}, {0, 2}) == pagewick::kOk, "a source that is not read");
}

}  // namespace

void test_scan() {
  for (const DType dtype : kDTypes) {
    test_scan_case({dtype, 4, 2, 24, 40, 4, 2, false, {true, {1, 2, 3, 33}, {0, 7, 1, 2}}});
    test_scan_case({dtype, 3, 1, 7, 5, 2, 0, false, {false, {1, 5}, {2, 0}}});
    test_scan_case({dtype, 3, 3, 150, 16, 4, 1, true, {true, {140, 1}, {3, 1}}});
  }
  test_scan_case({DType::kFloat32, 1, 1, 1, 1, 1, 1, false, {false, {3}, {0}}});
  test_scan_case({DType::kBFloat16, 2, 1, 64, 256, 4, 1, false, {false, {1, 35}, {1, 0}}});
  const ScanCase c = {DType::kFloat32, 1, 1, 5, 3, 2, 1, false, {false, {2}, {1}}};
  const ScanInputs in = make_inputs(c, make_batch(c.sequences));
  test_refusals("selective_scan", arguments(c, in), in.states, Tensor(c.dtype, 2 * c.columns()));
}

void test_channel_scan() {
  for (const DType dtype : kDTypes) {
    test_channel_case({dtype, 40, 16, 120, {true, {1, 2, 3, 33}, {0, 7, 1, 2}}});
    test_channel_case({dtype, 17, 5, 0, {false, {1, 5}, {2, 0}}});
  }
  test_channel_case({DType::kFloat32, 1, 1, 3, {false, {3}, {0}}});
  test_channel_case({DType::kBFloat16, 1030, 16, 0, {true, {1, 5}, {1, 3}}});
  const Tensor numbers = Tensor::random(DType::kFloat32, 40);
  pagewick::ChannelScanArgs args = {};
  args.x = args.gate = args.dt = args.keys = args.queries = numbers.data();
  args.log_decay = args.skip = args.dt_bias = numbers.floats(), args.num_channels = 5, args.state_dim = 2;
  args.x_stride = args.gate_stride = args.dt_stride = args.key_stride = args.query_stride = 5;
  args.dtype = DType::kFloat32;
  test_refusals("channel_scan", args, Tensor::random(DType::kFloat32, 30), Tensor(DType::kFloat32, 10));
}

void test_convolution() {
  for (const DType dtype : kDTypes) {
    test_convolution_case({dtype, 40, 3, false, {true, {1, 2, 3, 70}, {0, 7, 1, 2}}});
    test_convolution_case({dtype, 17, 4, true, {false, {1, 5}, {2, 0}}});
    test_convolution_case({dtype, 40, 4, true, {true, {1, 2, 3, 70}, {0, 7, 1, 2}}, false});
  }
  test_convolution_case({DType::kFloat32, 1, 1, true, {false, {3}, {0}}});
  test_convolution_case({DType::kBFloat16, 1030, 3, true, {true, {1, 5}, {1, 3}}});
  const Tensor bcx = Tensor::random(DType::kFloat32, 30), weight = Tensor::random(DType::kFloat32, 10);
  pagewick::ConvolutionArgs args = {};
  args.bcx = bcx.data(), args.weight = weight.floats(), args.num_channels = 5, args.conv_width = 2;
  args.bcx_stride = 15, args.has_gates = 1, args.dtype = DType::kFloat32;
  test_refusals("short_convolution", args, Tensor::random(DType::kFloat32, 15), Tensor(DType::kFloat32, 10));
}
