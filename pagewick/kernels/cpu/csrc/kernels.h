// What every operation of the library shares: element types, results, and the kernels of an instruction set.
//
// An operation has a struct of arguments, mirrored field by field in the Python module of the same name, a function
// `Status name(const Kernels&, const NameArgs&)` that checks and divides the work, and kernels that are written once
// over the vector layer and compiled for every instruction set. It writes into memory that it is given and branches on
// no number in it, so that a list of calls can be recorded once and replayed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pagewick {

// Raised by one whenever an argument struct, an operation or the layout of a packed tensor changes; ../binding.py checks it.
constexpr int kAbiVersion = 12;

enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

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
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace pagewick
