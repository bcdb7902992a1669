"""Structs that operations take: the fixed options of a layer, of a step or of a draw, and weights.

Dimensions: T tokens of the batch, B sequences, H query heads, KVH key/value heads, D head size, R the part of a
head that is rotated, E experts, N rows of logits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from torch import Tensor


class AttentionMetadata(NamedTuple):
    """The places of the sequences of a ragged batch and of their cached keys and values.

    block_tables: [B, max_blocks] int32, the blocks of each sequence in order; context_lens: [B] int32, the number of
    tokens that each attends to, new ones included; cu_seqlens_q: [B + 1] int32, where the new tokens of each begin;
    max_query_len: upper limit of a sequence's new tokens; None: all of the batch.
    key_ends: [T] int32, where a new token sees later ones, as the tokens of an image may: token i sees the first
    key_ends[i] tokens of its sequence, itself included. Numbers do not fall within a sequence. None: each sees the
    tokens up to itself.
    """

    block_tables: Tensor
    context_lens: Tensor
    cu_seqlens_q: Tensor
    max_query_len: int | None = None
    key_ends: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ScoreOptions:
    """How the attention of a layer scores keys.

    softmax_scale: above 0. sliding_window: the number of tokens that a query sees, its own included; None: all.
    is_chunked: the window does not slide: sequences are cut into chunks of that many tokens, and a query sees those of
    its own chunk. logit_soft_cap: scores become cap * tanh(score / cap); None: they are not changed. sinks: [H]
    float32, a further logit of each head's softmax, which has no value.
    """

    softmax_scale: float
    sliding_window: int | None = None
    logit_soft_cap: float | None = None
    sinks: Tensor | None = None
    is_chunked: bool = False

    def first_key(self, position: int) -> int:
        """Return the first position that a query at `position` sees."""
        if self.sliding_window is None:
            return 0
        size = self.sliding_window
        return position - position % size if self.is_chunked else max(0, position + 1 - size)


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A weight of num_rows outputs and num_columns inputs.

    data: [num_rows, num_columns], or packed as matrix.weight_layout says.
    """

    data: Tensor
    num_rows: int
    num_columns: int
    is_packed: bool


@dataclass(frozen=True, slots=True)
class StoredQuantized:
    """A quantized weight of num_rows outputs and num_columns inputs.

    data: bytes: rows of blocks as files have them [num_rows, bytes of a row], or packed as quantized.py says.
    format: the name of the format, such as Q8_0. row_scales: [num_rows] float32, of a weight in FP8 whose rows have one
    scale each, where products want to know it.
    """

    data: Tensor
    num_rows: int
    num_columns: int
    format: str
    is_packed: bool
    row_scales: Tensor | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """The weights of num_experts experts, each of num_rows outputs and num_columns inputs.

    data: [num_experts, num_rows, num_columns], or num_experts packed weights as matrix.weight_layout says. With a
    format, such as Q8_0, it has the data of num_experts quantized weights, as StoredQuantized describes them.
    """

    data: Tensor
    num_experts: int
    num_rows: int
    num_columns: int
    is_packed: bool
    format: str | None = None


class HeadLayout(NamedTuple):
    """The layout of a row of a fused product: query heads, then key heads, then as many value heads, D numbers each."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class Rotation(NamedTuple):
    """cos, sin: [T, R / 2] float32. The pairs that are rotated are (i, i + R / 2), or (2i, 2i + 1) if interleaved."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False


class SelectedKeys(NamedTuple):
    """The tokens that each of T tokens sees, as a batch of T sequences with one token in each block of the cache.

    slots: [T, top_k] int32, block_id * block_size + offset of each of them, in their order. counts: [T] int32, how many
    there are; what follows in a row is never read. starts: [T + 1] int32: 0, 1, 2, ... T.
    For block_attention, slots are numbers of blocks in the sequence: [T, top_k], or [T, KVH, top_k].
    """

    slots: Tensor
    counts: Tensor
    starts: Tensor


class Entries(NamedTuple):
    """Compressed entries that queries see beside the keys of a window.

    cache: [num_blocks, entries of a block, D], one entry for `ratio` tokens. selected: those that each token sees;
    None: all whose windows end with the token or before it, in the blocks of block_tables [B, max_blocks] int32.
    """

    cache: Tensor
    block_tables: Tensor
    ratio: int
    selected: SelectedKeys | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CompressOptions:
    """How the rows of `ratio` tokens become an entry of D numbers; see compress_rows.

    overlaps: the tokens of the window before count, too. bias: [ratio, D] float32, [ratio, 2 * D] with overlaps, of the
    gates, by the place of a token in its window. norm_weight: [D], of an RMS norm.
    """

    ratio: int
    overlaps: bool
    bias: Tensor
    norm_weight: Tensor
    norm_eps: float


@dataclass(frozen=True, slots=True, eq=False)
class HyperOptions:
    """Constants of the weights of S streams; see stream_weights.

    biases: [N] float32. scales: [1], [2] or [3] float32, of each kind of weights. eps: of the weights; norm_eps: of the
    norm of streams. magnitude: factor of the weights of outputs.
    """

    biases: Tensor
    scales: Tensor
    num_iterations: int
    eps: float
    norm_eps: float
    magnitude: float = 2.0


class StreamWeights(NamedTuple):
    """The weights of each token's streams: before [T, S], after [T, S], mixing [T, S, S], all float32.

    before: of the sum that a part of a layer reads. after: of its output. mixing: of the streams among each other;
    None beside `after`: each keeps what it has.
    """

    before: Tensor
    after: Tensor | None = None
    mixing: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorm:
    """The norm of each head of D numbers: normed * (weight + offset) + bias, in float32.

    weight, bias: [D], or [heads, D] where each head has its own. normed is the head divided by its root mean square, as
    in Qwen 3, or, for is_layer_norm, brought to mean 0 and variance 1, as in Phi and StableLM. offset: 1 in Gemma.
    is_after_rotation: queries and keys are rotated first, as in Hunyuan.
    """

    weight: Tensor
    bias: Tensor | None = None
    eps: float = 1e-6
    offset: float = 0.0
    is_layer_norm: bool = False
    is_after_rotation: bool = False


class HeadOptions(NamedTuple):
    """Changes to heads before they are stored: norm and rotation of queries and keys. None: no change.

    The norm comes first, unless it says otherwise.

    v_norm: of value heads, which are never rotated. q_scales: [T] float32, factors of all query heads of a token, last.
    """

    rotation: Rotation | None = None
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None
    v_norm: HeadNorm | None = None
    q_scales: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DeltaOptions:
    """Constants of a gated delta rule: KH key heads of DK numbers, VH value heads (a multiple of KH) of DV numbers.

    conv_weight: [C, K] float32, for the channels of queries, keys and values; the newest of K inputs has the last
    weight. log_decay: [VH] float32. dt_bias: [VH] float32, or [VH * DK] with has_channel_decay. norm_weight: [DV]
    float32, of the RMS norm of each value head.
    has_channel_decay: each of the DK rows of a state decays by a factor of its own (Kimi Delta Attention), and KH is
    VH; else a head has one factor. strength: a head takes in this times sigmoid(beta) of a difference.
    has_sigmoid_gate: the gate of the output is a sigmoid, else a SiLU. decay_bound: a number below 0, for
    has_channel_decay: the logarithms of factors are this times a sigmoid; None: they have no bound.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_weight: Tensor
    log_decay: Tensor
    dt_bias: Tensor
    norm_weight: Tensor
    norm_eps: float
    has_channel_decay: bool = False
    strength: float = 1.0
    has_sigmoid_gate: bool = False
    decay_bound: float | None = None

    @property
    def num_decays(self) -> int:
        """Factors by which the state of a token decays."""
        return self.num_value_heads * (self.key_dim if self.has_channel_decay else 1)

    @property
    def num_channels(self) -> int:
        """C = 2 * KH * DK + VH * DV."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True, eq=False)
class ScanOptions:
    """Constants of a selective scan: H heads of P numbers, G groups (a divisor of H) with keys of N numbers.

    conv_weight: [C, K] float32, for the channels of values, keys and queries; the newest of K inputs has the last
    weight. conv_bias: [C] float32. log_decay, skip, dt_bias: [H] float32. norm_weight: [H * P] float32, of the RMS norm
    over each of num_norm_groups equal parts; None: there is no norm. is_norm_first: the gate is applied after the norm.
    gate_scale, dt_scale: factors of the gate and of the step before its bias.
    """

    num_heads: int
    num_groups: int
    head_dim: int
    state_dim: int
    conv_weight: Tensor
    conv_bias: Tensor
    log_decay: Tensor
    skip: Tensor
    dt_bias: Tensor
    norm_weight: Tensor | None
    norm_eps: float
    num_norm_groups: int = 1
    is_norm_first: bool = False
    gate_scale: float = 1.0
    dt_scale: float = 1.0

    @property
    def num_channels(self) -> int:
        """C = H * P + 2 * G * N."""
        return self.num_heads * self.head_dim + 2 * self.num_groups * self.state_dim


@dataclass(frozen=True, slots=True, eq=False)
class ConvolutionOptions:
    """Constants of a short convolution of D channels.

    weight: [D, K] float32; the newest of K inputs has the last weight. bias: [D] float32, or None. has_gates: inputs
    and outputs are multiplied by gates (LFM2); else the results go through a SiLU (Mamba-1).
    """

    weight: Tensor
    bias: Tensor | None = None
    has_gates: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class NgramOptions:
    """Constants of the hashes of n-grams; see reference_ngrams.ngram_rows.

    end_id: the token that no n-gram reaches beyond. multipliers: [n] int64, of a token and of those before it; no
    product of one with an id reaches 2**63. sizes, offsets: [n - 1, H] int64, of each head's part of the table.
    """

    end_id: int
    multipliers: Tensor
    sizes: Tensor
    offsets: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ChannelScanOptions:
    """Constants of a scan of D channels, each with a state of N numbers (Mamba-1).

    log_decay: [N, D] float32. skip, dt_bias: [D] float32. state_offset: numbers of a block before the states.
    """

    log_decay: Tensor
    skip: Tensor
    dt_bias: Tensor
    state_offset: int


class MoeBiases(NamedTuple):
    """Biases of a mixture of experts, and factors of the experts' weights.

    router: [E] float32, added to the scores for the choice only; gate_up, down: [E, outputs], added to an expert's
    products. scales: [E] float32, by which the weight of a chosen expert is multiplied.
    """

    router: Tensor | None = None
    gate_up: Tensor | None = None
    down: Tensor | None = None
    scales: Tensor | None = None


class SharedOutput(NamedTuple):
    """The output [T, N] of the expert that all tokens share, times the sigmoid of gate [T] float32 if there is one."""

    output: Tensor
    gate: Tensor | None = None


class Identities(NamedTuple):
    """Experts without weights, which return their input: the last `number` of a router's experts.

    rows: [T, H], these inputs; None: they are left out, as on all ranks but one, whose results are added up.
    """

    number: int
    rows: Tensor | None


class DrawOptions(NamedTuple):
    """How a token is drawn from each row; all tensors are [N].

    temperature: 0 for the most likely token. min_p, top_k: 0 for all tokens. uniform: the random number, in [0, 1).
    """

    temperature: Tensor
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    uniform: Tensor


class EditStep(IntEnum):
    """The steps in which single logits are changed, in their order."""

    BAN = 0
    BIAS = 1
    REPETITION = 2
    PRESENCE = 3
    FREQUENCY = 4
    DRY = 5


class TokenEdits(NamedTuple):
    """Changes of E single logits in R rows.

    row_ids: [R] int64, each row once. starts: [6 * R + 1] int64: the changes of row_ids[r] in an EditStep are those
    from starts[step * R + r] to before the next start. token_ids: [E] int64; a step may have a token of a row twice,
    with one amount. amounts: [E], in the dtype of the logits.
    """

    row_ids: Tensor
    starts: Tensor
    token_ids: Tensor
    amounts: Tensor


PLAIN_HEADS = HeadOptions()
NO_BIASES = MoeBiases()
