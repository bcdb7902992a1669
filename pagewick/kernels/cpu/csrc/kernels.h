// The parts that all operations of the library share: element types, results, and the kernels of an instruction set.
//
// An operation has a struct of arguments, a function `Status name(const Kernels&, const NameArgs&)` that checks the
// arguments and divides the work, and kernels that are written once over the vector layer and compiled for every
// instruction set. An operation writes into memory that it is given when it is called. A list of calls can therefore be
// recorded once and replayed on new contents of that memory. ../structs.py is generated from the structs, the enums and
// the list of operations (`make structs`).
#pragma once

#include <cstddef>
#include <cstdint>

namespace pagewick {

// Raise this by one when arguments keep their size but change their meaning, or when the layout of a packed tensor
// changes. ../binding.py compares it, and the size of every operation's arguments, with those in structs.py.
constexpr int kAbiVersion = 34;

// Those from kInt8 on are for KV caches only.
enum class DType : int32_t {
  kFloat32 = 0,
  kBFloat16 = 1,
  kFloat16 = 2,
  kInt8 = 3,
  kFp8E4m3 = 4,
  kFp8E5m2 = 5,
  kInt4 = 6,  // two in a byte
};

enum Status : int32_t { kOk = 0, kBadLengths = 1, kBadBlockId = 2, kBadRow = 3 };

struct NormKernels;
struct MatrixKernels;
struct RopeKernels;
struct ActivationKernels;
struct LogitsKernels;
struct AttentionKernels;
struct MoeKernels;
struct ElementwiseKernels;
struct MlaKernels;
struct IndexKernels;
struct DeltaKernels;
struct QuantizedKernels;
struct QuantizerKernels;
struct ScanKernels;
struct ConvolutionKernels;
struct ChannelScanKernels;
struct StreamsKernels;
struct HyperKernels;
struct CompressKernels;
struct WindowKernels;

// The kernels of one instruction set.
struct Kernels {
  const NormKernels* norm;
  const MatrixKernels* matrix;
  const RopeKernels* rope;
  const ActivationKernels* activation;
  const LogitsKernels* logits;
  const AttentionKernels* attention;
  const MoeKernels* moe;
  const ElementwiseKernels* elementwise;
  const MlaKernels* mla;
  const IndexKernels* index;
  const DeltaKernels* delta;
  const QuantizedKernels* quantized;
  const QuantizerKernels* quantizers;
  const ScanKernels* scan;
  const ConvolutionKernels* convolution;
  const ChannelScanKernels* channel_scan;
  const StreamsKernels* streams;
  const HyperKernels* hyper;
  const CompressKernels* compress;
  const WindowKernels* window;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Whether no slot lies beyond the end of a cache. A negative one stores nothing.
inline bool slots_are_valid(const int64_t* slot_mapping, int64_t num_tokens, int64_t num_slots) {
  for (int64_t token = 0; token < num_tokens; ++token)
    if (slot_mapping[token] >= num_slots) return false;
  return true;
}

}  // namespace pagewick
