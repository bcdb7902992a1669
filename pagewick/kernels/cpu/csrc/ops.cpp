// The C ABI of libpagewick_cpu, the table of its operations, and the choice of the instruction set.
#include <atomic>
#include <cstring>

#include "activation.h"
#include "attention.h"
#include "channel_scan.h"
#include "compress.h"
#include "convolution.h"
#include "delta.h"
#include "elementwise.h"
#include "hyper.h"
#include "index.h"
#include "kernels.h"
#include "logits.h"
#include "matrix.h"
#include "mla.h"
#include "moe.h"
#include "norm.h"
#include "parallel.h"
#include "processor.h"
#include "quantized.h"
#include "quantizers.h"
#include "replay.h"
#include "rope.h"
#include "scan.h"
#include "streams.h"
#include "window.h"

#define PW_EXPORT extern "C" __attribute__((visibility("default")))

namespace pagewick {

#define PW_DECLARE(isa)                         \
  namespace isa {                               \
  extern const NormKernels kNorm;               \
  extern const MatrixKernels kMatrix;           \
  extern const RopeKernels kRope;               \
  extern const ActivationKernels kActivation;   \
  extern const LogitsKernels kLogits;           \
  extern const AttentionKernels kAttention;     \
  extern const MoeKernels kMoe;                 \
  extern const ElementwiseKernels kElementwise; \
  extern const MlaKernels kMla;                 \
  extern const IndexKernels kIndex;             \
  extern const DeltaKernels kDelta;             \
  extern const QuantizedKernels kQuantized;     \
  extern const QuantizerKernels kQuantizers;    \
  extern const ScanKernels kScan;               \
  extern const ConvolutionKernels kConvolution; \
  extern const ChannelScanKernels kChannelScan; \
  extern const StreamsKernels kStreams;         \
  extern const HyperKernels kHyper;             \
  extern const CompressKernels kCompress;       \
  extern const WindowKernels kWindow;           \
  }

// A set that has instructions for products only. Everything else is that of another set.
#define PW_DECLARE_PRODUCTS(isa, other)     \
  namespace isa {                           \
  extern const QuantizedKernels kQuantized; \
  using other::kActivation;                 \
  using other::kChannelScan;                \
  using other::kCompress;                   \
  using other::kConvolution;                \
  using other::kDelta;                      \
  using other::kElementwise;                \
  using other::kHyper;                      \
  using other::kIndex;                      \
  using other::kLogits;                     \
  using other::kMoe;                        \
  using other::kNorm;                       \
  using other::kQuantizers;                 \
  using other::kRope;                       \
  using other::kScan;                       \
  using other::kStreams;                    \
  }
// For those that multiply only bytes: products of floats are those of the other set, too.
#define PW_USE_FLOAT_PRODUCTS(isa, other) \
  namespace isa {                         \
  using other::kAttention;                \
  using other::kMatrix;                   \
  using other::kMla;                      \
  using other::kWindow;                   \
  }

PW_DECLARE(generic)
#if defined(__x86_64__)
PW_DECLARE(avx2)
PW_DECLARE_PRODUCTS(avx_vnni, avx2)
PW_USE_FLOAT_PRODUCTS(avx_vnni, avx2)
PW_DECLARE(avx512)
PW_DECLARE_PRODUCTS(avx512_vnni, avx512)
PW_USE_FLOAT_PRODUCTS(avx512_vnni, avx512)
PW_DECLARE(avx512_bf16)
PW_DECLARE_PRODUCTS(amx, avx512_bf16)
namespace amx {
extern const AttentionKernels kAttention;
extern const MatrixKernels kMatrix;
extern const MlaKernels kMla;
extern const WindowKernels kWindow;
}  // namespace amx
#elif defined(__aarch64__)
PW_DECLARE(neon)
PW_DECLARE_PRODUCTS(neon_dotprod, neon)
PW_USE_FLOAT_PRODUCTS(neon_dotprod, neon)
PW_DECLARE_PRODUCTS(neon_i8mm, neon)
PW_USE_FLOAT_PRODUCTS(neon_i8mm, neon)
#endif

namespace {

struct InstructionSet {
  const char* name;
  bool (*is_supported)();
  Kernels kernels;
};

#define PW_KERNELS(isa) PW_KERNELS_OF(isa, isa)
#define PW_KERNELS_OF(isa, quantized)                                                                       \
  {&isa::kNorm, &isa::kMatrix, &isa::kRope, &isa::kActivation, &isa::kLogits, &isa::kAttention, &isa::kMoe, \
   &isa::kElementwise, &isa::kMla, &isa::kIndex, &isa::kDelta, &quantized::kQuantized, &isa::kQuantizers,   \
   &isa::kScan, &isa::kConvolution, &isa::kChannelScan, &isa::kStreams, &isa::kHyper, &isa::kCompress,     \
   &isa::kWindow}

// The best comes last.
const InstructionSet kInstructionSets[] = {
    {"generic", always, PW_KERNELS(generic)},
#if defined(__x86_64__)
    {"avx2", has_avx2, PW_KERNELS(avx2)},
    {"avx_vnni", has_avx_vnni, PW_KERNELS(avx_vnni)},
    {"avx512", has_avx512, PW_KERNELS(avx512)},
    {"avx512_vnni", has_avx512_vnni, PW_KERNELS(avx512_vnni)},
    {"avx512_bf16", has_avx512_bf16, PW_KERNELS(avx512_bf16)},
    // Hints in avx512_bf16's kernels for quantized weights are for AMD's processors (quantized_tiles.h). An Intel
    // processor gets here if its tile registers are hidden or forbidden.
    {"avx512_bf16", is_intel_with_avx512_bf16, PW_KERNELS_OF(avx512_bf16, avx512_vnni)},
    {"amx", has_amx, PW_KERNELS(amx)},
#elif defined(__aarch64__)
    {"neon", always, PW_KERNELS(neon)},
    {"neon_dotprod", has_dotprod, PW_KERNELS(neon_dotprod)},
    {"neon_i8mm", has_i8mm, PW_KERNELS(neon_i8mm)},
#endif
};

const InstructionSet* best_supported() {
  const InstructionSet* best = kInstructionSets;
  for (const InstructionSet& candidate : kInstructionSets)
    if (candidate.is_supported()) best = &candidate;
  return best;
}

std::atomic<const InstructionSet*>& chosen() {
  static std::atomic<const InstructionSet*> choice{best_supported()};
  return choice;
}

#define PW_RUN(name, Args) \
  [](const Kernels& kernels, const void* args) { return name(kernels, *static_cast<const Args*>(args)); }
#define PW_OPERATION(name, Args) {#name, sizeof(Args), PW_RUN(name, Args), nullptr, true}
// Not the same if it runs twice.
#define PW_ADVANCING(name, Args) {#name, sizeof(Args), PW_RUN(name, Args), nullptr, false}
#define PW_EXPECTED(name, Args, expect) \
  {#name, sizeof(Args), PW_RUN(name, Args), [](const void* args) { expect(*static_cast<const Args*>(args)); }, true}

// ../structs_from_headers.py reads these lines: an operation and the struct of its arguments.
const Operation kOperations[] = {
    PW_OPERATION(rms_norm, NormArgs),
    PW_OPERATION(layer_norm, NormArgs),
    PW_EXPECTED(linear, LinearArgs, expect_linear),
    PW_OPERATION(pack_rows, PackArgs),
    PW_OPERATION(gather_rows, GatherArgs),
    PW_OPERATION(activation, ActivationArgs),
    PW_OPERATION(rope_and_store, RopeStoreArgs),
    PW_OPERATION(rotary_angles, RotaryAnglesArgs),
    PW_OPERATION(argmax_rows, ArgmaxArgs),
    PW_OPERATION(log_softmax_stats, LogSoftmaxArgs),
    PW_OPERATION(mask_rows, MaskArgs),
    PW_OPERATION(argmax_allowed, AllowedArgs),
    PW_OPERATION(sample_tokens, SampleArgs),
    PW_OPERATION(paged_attention, AttentionArgs),
    PW_OPERATION(store_kv, StoreKvArgs),
    PW_OPERATION(route, RouteArgs),
    PW_OPERATION(grouped_linear, GroupedLinearArgs),
    PW_OPERATION(combine, CombineArgs),
    PW_OPERATION(fused_moe, FusedMoeArgs),
    PW_OPERATION(add_low_rank, AddLowRankArgs),
    PW_OPERATION(elementwise, ElementwiseArgs),
    PW_OPERATION(dynamic_rotary_angles, DynamicAnglesArgs),
    PW_OPERATION(store_latent, StoreLatentArgs),
    PW_OPERATION(latent_attention, LatentAttentionArgs),
    PW_OPERATION(store_index_keys, StoreIndexArgs),
    PW_OPERATION(select_keys, SelectKeysArgs),
    PW_ADVANCING(gated_delta_net, DeltaArgs),
    PW_ADVANCING(selective_scan, ScanArgs),
    PW_ADVANCING(short_convolution, ConvolutionArgs),
    PW_ADVANCING(channel_scan, ChannelScanArgs),
    PW_EXPECTED(quantized_linear, QuantizedLinearArgs, expect_quantized_linear),
    PW_OPERATION(pack_quantized_rows, PackQuantizedArgs),
    PW_OPERATION(gather_quantized_rows, GatherQuantizedArgs),
    PW_OPERATION(quantize_weight, QuantizeWeightArgs),
    PW_OPERATION(gather_columns, GatherColumnsArgs),
    PW_OPERATION(rank_tokens, RankArgs),
    PW_OPERATION(truncate_rows, TruncateArgs),
    PW_OPERATION(surprise, SurpriseArgs),
    PW_OPERATION(xielu, XieluArgs),
    PW_OPERATION(gaussian_top_k, GaussianTopKArgs),
    PW_OPERATION(mix_streams, StreamsArgs),
    PW_OPERATION(correct_streams, StreamsArgs),
    PW_OPERATION(match_magnitude, MagnitudeArgs),
    PW_OPERATION(stream_weights, StreamWeightsArgs),
    PW_OPERATION(collapse_streams, CollapseStreamsArgs),
    PW_OPERATION(expand_streams, ExpandStreamsArgs),
    PW_OPERATION(root_logits, RootLogitsArgs),
    PW_OPERATION(rotate_heads, RotateHeadsArgs),
    PW_OPERATION(widen, WidenArgs),
    PW_OPERATION(compress_rows, CompressRowsArgs),
    PW_OPERATION(window_attention, WindowAttentionArgs),
    PW_OPERATION(block_attention, BlockAttentionArgs),
};
constexpr int32_t kNumOperations = sizeof(kOperations) / sizeof(kOperations[0]);

}  // namespace
}  // namespace pagewick

using namespace pagewick;

namespace {

Status replay_from(int64_t first, const Call* calls, int64_t num_calls, volatile uint64_t* progress,
                   const NextInputs* next) {
  const Kernels& kernels = chosen().load()->kernels;
  const Status status = replay(kOperations, kernels, calls + first, num_calls - first, progress);
  if (status == kOk && next != nullptr) replay_ahead(kOperations, kernels, calls, num_calls, *next);
  return status;
}

}  // namespace

PW_EXPORT int32_t pw_abi_version() { return kAbiVersion; }

PW_EXPORT const char* pw_isa() { return chosen().load()->name; }

// Returns 0, or -1 if this build or this processor lacks the instruction set. Must not be called while operations run.
PW_EXPORT int32_t pw_select_isa(const char* name) {
  stop_replay_ahead();
  const InstructionSet* found = nullptr;
  for (const InstructionSet& candidate : kInstructionSets)
    if (std::strcmp(candidate.name, name) == 0 && candidate.is_supported()) found = &candidate;
  if (found == nullptr) return -1;
  chosen() = found;
  return 0;
}

PW_EXPORT void pw_set_num_threads(int32_t count) {
  stop_replay_ahead();
  set_num_threads(count);
}

PW_EXPORT int32_t pw_num_threads() { return num_threads(); }

// Returns the number of an operation, or -1 if there is none of that name.
PW_EXPORT int32_t pw_operation(const char* name) {
  for (int32_t i = 0; i < kNumOperations; ++i)
    if (std::strcmp(kOperations[i].name, name) == 0) return i;
  return -1;
}

// Returns the size in bytes of an operation's arguments.
PW_EXPORT int64_t pw_args_size(int32_t operation) { return static_cast<int64_t>(kOperations[operation].args_size); }

// Returns a Status.
PW_EXPORT int32_t pw_run(int32_t operation, const void* args) {
  stop_replay_ahead();
  return kOperations[operation].run(chosen().load()->kernels, args);
}

// Runs the calls in order up to the first that fails; returns its Status. `progress`, unless null, is increased by one
// after each call; another thread may read it meanwhile. Unless `next` is null, the calls then begin to run once more on
// a worker, with the next inputs. Before one of these functions or pw_stop_ahead stops them, what they read must stay as
// it is, and nothing may read or write what they write.
PW_EXPORT int32_t pw_replay(const Call* calls, int64_t num_calls, volatile uint64_t* progress, const NextInputs* next) {
  stop_replay_ahead();
  return replay_from(0, calls, num_calls, progress, next);
}

// Does as pw_replay does, but without the calls that have run ahead.
PW_EXPORT int32_t pw_resume(const Call* calls, int64_t num_calls, volatile uint64_t* progress, const NextInputs* next) {
  const int64_t num_done = stop_replay_ahead(calls);
  return replay_from(num_done, calls, num_calls, progress, next);
}

PW_EXPORT void pw_stop_ahead() { stop_replay_ahead(); }
