// Tables without kernels, for an instruction set that a test program does not run: the library names the tables of all.
// Compiled with -DPW_ISA=<instruction set>. Calling a kernel of such a set is a crash. Where the program has some kernels
// of a set, their tables take the place of these, which are weak.
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

#define PW_TABLE(Kernels, kName) extern const Kernels kName __attribute__((weak)){};

namespace pagewick {
namespace PW_ISA {

PW_TABLE(ActivationKernels, kActivation)
PW_TABLE(AttentionKernels, kAttention)
PW_TABLE(CompressKernels, kCompress)
PW_TABLE(ConvolutionKernels, kConvolution)
PW_TABLE(ChannelScanKernels, kChannelScan)
PW_TABLE(DeltaKernels, kDelta)
PW_TABLE(ElementwiseKernels, kElementwise)
PW_TABLE(HyperKernels, kHyper)
PW_TABLE(IndexKernels, kIndex)
PW_TABLE(LogitsKernels, kLogits)
PW_TABLE(MatrixKernels, kMatrix)
PW_TABLE(MlaKernels, kMla)
PW_TABLE(MoeKernels, kMoe)
PW_TABLE(NormKernels, kNorm)
PW_TABLE(QuantizedKernels, kQuantized)
PW_TABLE(QuantizerKernels, kQuantizers)
PW_TABLE(RopeKernels, kRope)
PW_TABLE(ScanKernels, kScan)
PW_TABLE(StreamsKernels, kStreams)
PW_TABLE(WindowKernels, kWindow)

}  // namespace PW_ISA
}  // namespace pagewick
