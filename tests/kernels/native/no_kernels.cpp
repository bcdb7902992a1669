// Tables without kernels, for an instruction set that a test program does not run: the library names the tables of all.
// Compiled with -DPW_ISA=<instruction set>. Calling a kernel of such a set is a crash.
#include "activation.h"
#include "attention.h"
#include "channel_scan.h"
#include "compress.h"
#include "convolution.h"
#include "delta.h"
#include "elementwise.h"
#include "hyper.h"
#include "index.h"
#include "logits.h"
#include "matrix.h"
#include "mla.h"
#include "moe.h"
#include "norm.h"
#include "quantized.h"
#include "quantizers.h"
#include "rope.h"
#include "scan.h"
#include "streams.h"
#include "window.h"

namespace pagewick {
namespace PW_ISA {

extern const ActivationKernels kActivation{};
extern const AttentionKernels kAttention{};
extern const CompressKernels kCompress{};
extern const ConvolutionKernels kConvolution{};
extern const ChannelScanKernels kChannelScan{};
extern const DeltaKernels kDelta{};
extern const ElementwiseKernels kElementwise{};
extern const HyperKernels kHyper{};
extern const IndexKernels kIndex{};
extern const LogitsKernels kLogits{};
extern const MatrixKernels kMatrix{};
extern const MlaKernels kMla{};
extern const MoeKernels kMoe{};
extern const NormKernels kNorm{};
extern const QuantizedKernels kQuantized{};
extern const QuantizerKernels kQuantizers{};
extern const RopeKernels kRope{};
extern const ScanKernels kScan{};
extern const StreamsKernels kStreams{};
extern const WindowKernels kWindow{};

}  // namespace PW_ISA
}  // namespace pagewick
