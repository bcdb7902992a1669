"""The parts of a ModelConfig: norms, attention, MLPs, layers, and the names of their tensors. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from pagewick.layers.compressed_config import BlockIndexConfig, WindowConfig
from pagewick.layers.config import MlaConfig
from pagewick.layers.state_config import MambaConfig, StateConfig

if TYPE_CHECKING:
    from pagewick.layers.config import HeadBlockConfig, IndexerConfig, MoeConfig, QueryScaleConfig, RopeConfig
    from pagewick.layers.ngram_config import NgramConfig
    from pagewick.models.caption_parts import ImageAttentionConfig

# How the parts of a layer follow each other; h: the hidden states that the layer gets.
#   sequential: h += attention(norm(h)); h += mlp(norm(h))
#   parallel:   h += attention(norm(h)) + mlp(norm(h)), one norm for both
#   parallel_norms: h += attention(norm(h)) + mlp(norm(h)), a norm for each
#   sandwich:   h += norm(attention(norm(h))); h += norm(mlp(norm(h)))
#   post_norm:  h += norm(attention(h)); h += norm(mlp(h))
#   post_mlp:   h += attention(norm(h)); h += norm(mlp(norm(h)))
#   post_ln:    h = norm(h + attention(h)); h = norm(h + mlp(h)), as in the first transformers
#   captioning: as post_ln, with attention to an image between: h = norm(h + attention(h)); h = norm(h + attention to
#               the image(h)); h = norm(h + mlp(h))
#   extended:   as sandwich; a layer with experts beside its MLP adds both: norm(norm(mlp(norm(h))) + norm(experts(
#               norm(h)))). Then h += norm(projection(activation(gate(h)) * the layer's own input)), if the model has
#               such inputs, and h is multiplied by a number of the layer's.
#   shortcut:   as sequential; a layer with experts beside its MLP leaves their output, experts(norm(h)) with the norm
#               of the MLP, to the next layer, which has none and adds it behind its own MLP
#   altup:      the token has several streams, from which the layer predicts new ones; h is the first of these. As
#               sandwich, but h = (h + norm(attention(n)) + n + norm(projections(n))) / sqrt(2) with n = norm(h). The
#               layer corrects all streams by the difference that it makes, and adds its own input to the others.
#   hyper:      the token has several streams in place of h. Attention reads a weighted sum of them, normalised; they
#               are mixed, and its output is added to each with a weight of its own. So with the MLP.
#   gated_streams: the token has several streams in place of h. Attention reads the mean over them of normalised numbers
#               times their gates, and its output is added to each with a factor of its own. So with the MLP.
Block = Literal[
    "sequential", "parallel", "parallel_norms", "sandwich", "post_norm", "post_mlp", "post_ln", "extended", "altup",
    "shortcut", "hyper", "gated_streams", "captioning",
]  # fmt: skip
# An activation with learned numbers.
XIELU: Final = "xielu"
_NORMS: Final = ("input_layernorm", "post_attention_layernorm")
GATED_NORMS: Final = _NORMS
"""Norms that may have a gate behind them, in a sequential block."""
_SANDWICH: Final = (*_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
# Norms around experts beside an MLP: after the MLP, before and after the experts.
NORMS_OF_EXPERTS: Final = (
    "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2",
)  # fmt: skip
NORMS_OF_BLOCK: Final[Mapping[Block, tuple[str, ...]]] = {
    "sequential": _NORMS,
    "parallel": _NORMS[:1],
    "parallel_norms": _NORMS,
    "sandwich": _SANDWICH,
    "post_norm": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "post_mlp": (*_NORMS, "post_feedforward_layernorm"),
    "post_ln": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "captioning": ("post_attention_layernorm", "post_image_layernorm", "post_feedforward_layernorm"),
    "extended": _SANDWICH,
    "altup": _SANDWICH,
    "shortcut": _NORMS,
    "hyper": _NORMS,
    "gated_streams": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig:
    """offset: added to the weight; among norms of heads, to that of an RMS norm only. has_bias: of a layer norm.

    has_weight: False: there is nothing to multiply by. gate_rank: rank of the gates behind those norms of layers that
    have one (LayerConfig.gated_norms); such norms are plain RMS norms.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float
    offset: float = 0.0
    has_bias: bool = False
    has_weight: bool = True
    gate_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNormConfig(NormConfig):
    """Normalisation of each head's query and key before they are rotated.

    is_per_head: whether every head has a weight of its own. is_matrix: the file has these as one matrix. is_joint: the
    queries of all heads are normalised as one vector, and so are the keys; it is an RMS norm without an offset.
    is_after_rotation: after they are rotated instead, with one weight for all heads.
    """

    is_per_head: bool = False
    is_matrix: bool = False
    is_joint: bool = False
    is_after_rotation: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """layout: how the file stores the projections to queries, keys and values.

    parts: as q_proj, k_proj and v_proj. fused: in one tensor, all queries, then all keys, then all values. by_head: in
    one tensor, each key head's queries, its key and its value one after the other. keys_are_values: as q_proj and
    k_proj, whose outputs are values, too. queries: as q_proj alone, in a layer that borrows keys and values.
    qkv_limit: numbers of queries, keys and values that are farther from 0 than this become as far; None: they stay.
    value_dim: size of a value, if it is smaller than head_dim, that of a key; in the layout "parts", without gates and
    norms of heads. value_scale: factor of values.
    has_gate: each head's output is multiplied by the sigmoid of a gate, whose rows follow the head's query in q_proj.
    has_head_gates: it is multiplied by the sigmoid of one number, which g_proj makes for each head.
    has_number_gates: each number of it is multiplied by the sigmoid of one, which g_proj makes for that number.
    has_softplus_gates: the gates of g_proj are multiplied as the softplus of these numbers, not as their sigmoid.
    has_value_norm: each head's value is divided by its root mean square, with head_norm's eps.
    has_sinks: each query head has a further logit in its softmax, which has no value. head_blocks: how blocks of tokens
    are selected for each KV head, in the layout "parts" without a window, sinks and caps; None: they are not.
    sees_images_whole: tokens of an image see those behind them in the same image, too. sees_all: all tokens see those
    behind them, as far as they see those before them.
    block_index: selects the blocks of tokens that each token sees; None: it sees all before it.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    softmax_scale: float
    qkv_bias: bool = False
    o_bias: bool = False
    layout: Literal["parts", "fused", "by_head", "keys_are_values", "queries"] = "parts"
    qkv_limit: float | None = None
    value_dim: int | None = None
    value_scale: float = 1.0
    head_norm: HeadNormConfig | None = None
    logit_soft_cap: float | None = None
    has_gate: bool = False
    has_head_gates: bool = False
    has_number_gates: bool = False
    has_softplus_gates: bool = False
    has_sinks: bool = False
    has_value_norm: bool = False
    head_blocks: HeadBlockConfig | None = None
    sees_images_whole: bool = False
    sees_all: bool = False
    block_index: BlockIndexConfig | None = None

    @property
    def output_dim(self) -> int:
        """Size of a head's output."""
        return self.value_dim or self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpConfig:
    """activation: a name in kernels.reference.ACTIVATIONS, or XIELU, which is no gate, and whose numbers the file has.

    is_gated: activation(gate(x)) * up(x), or activation(up(x)).

    is_fused: the file has gate and up in one tensor. in_scale, out_scale: factors of its inputs and its outputs.
    sparsity: the share of a token's gates that become 0 before the activation if they are normally distributed
    (layers/sparse_activation.py); 0: they stay as they are.
    """

    intermediate_size: int
    activation: str = "silu"
    is_gated: bool = True
    bias: bool = False
    is_fused: bool = False
    in_scale: float = 1.0
    out_scale: float = 1.0
    sparsity: float = 0.0

    @property
    def input_projections(self) -> tuple[str, ...]:
        """Names of the projections before the activation."""
        return ("gate_proj", "up_proj") if self.is_gated else ("up_proj",)


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideConfig:
    """Mamba-2 beside a layer's attention: both read the same, and their outputs are added, each times a factor."""

    mamba: MambaConfig
    scale: float = 1.0
    attention_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """window: number of tokens that attention sees, the new one included; None: all. rope: None: nothing is rotated.

    Where a token sees those behind it, the window says how many of them, too. is_chunked: the window does not slide: it
    begins at the last multiple of its size. query_scale: in layers that rotate nothing; None: queries are not scaled.
    attention, mlp: None in a sequential block that has only the other one, with one norm. beside: Mamba-2 beside
    attention, in a sequential block.
    has_input_norm: False: the layer gets its input as it is, where other layers normalise theirs first.
    has_output_norm: False: the MLP's output is added as it is, in a post_mlp block. gated_norms: the names, among
    GATED_NORMS, of norms with a gate of norm.gate_rank behind them.
    ngrams: what it adds to its streams first, in a gated_streams block.
    lender: index of the layer whose keys and values this one attends to; None: it has its own. experts: beside the MLP,
    in an extended or a shortcut block. block: how the parts of this layer follow each other; None: as in all others.
    image: attention to an image, in a captioning block.
    """

    attention: AttentionConfig | MlaConfig | WindowConfig | StateConfig | None
    mlp: MlpConfig | MoeConfig | None
    rope: RopeConfig | None
    window: int | None = None
    is_chunked: bool = False
    query_scale: QueryScaleConfig | None = None
    has_input_norm: bool = True
    has_output_norm: bool = True
    gated_norms: tuple[str, ...] = ()
    lender: int | None = None
    experts: MoeConfig | None = None
    beside: BesideConfig | None = None
    block: Block | None = None
    ngrams: NgramConfig | None = None
    image: ImageAttentionConfig | None = None

    def without_images(self) -> LayerConfig:
        """Return the layer as it is in a model that reads text only."""
        rope, attention = self.rope, self.attention
        if rope is not None and rope.mrope_section:
            rope = replace(rope, mrope_section=(), mrope_interleaved=False)
        if isinstance(attention, AttentionConfig) and attention.sees_images_whole:
            attention = replace(attention, sees_images_whole=False)
        return replace(self, rope=rope, attention=attention)

    def without_router_bias(self) -> LayerConfig:
        """Return the layer with a router that adds nothing for its choice of experts, if it has one."""
        if self.mlp is None or isinstance(self.mlp, MlpConfig):
            return self
        return replace(self, mlp=replace(self.mlp, has_router_bias=False))

    def seeing_images_whole(self) -> LayerConfig:
        """Return the layer, whose attention is of the usual kind, so that the tokens of an image see each other."""
        assert isinstance(self.attention, AttentionConfig), "no other attention can do so"
        return replace(self, attention=replace(self.attention, sees_images_whole=True))

    def seeing_all(self) -> LayerConfig:
        """Return the layer, whose attention is of the usual kind, so that tokens see those behind them, too."""
        assert isinstance(self.attention, AttentionConfig), "no other attention can do so"
        return replace(self, attention=replace(self.attention, sees_all=True))

    def norms(self, block: Block) -> tuple[str, ...]:
        """Return the names of the layer's norms. block: the model's."""
        names = NORMS_OF_BLOCK[self.block or block]
        if self.mlp is None:
            return names[:1]
        if not self.has_output_norm:
            names = names[:-1]
        return names if self.has_input_norm and self.attention is not None else names[1:]

    @property
    def state(self) -> StateConfig | None:
        """The attention of a layer that keeps one state of a sequence, and nothing of each token."""
        return self.attention if isinstance(self.attention, StateConfig) else None

    @property
    def states(self) -> list[StateConfig]:
        """All parts that keep one state of a sequence."""
        return [*([] if self.state is None else [self.state]), *([] if self.beside is None else [self.beside.mamba])]

    @property
    def latent(self) -> MlaConfig | None:
        """The attention of a layer that keeps a latent of each token."""
        return self.attention if isinstance(self.attention, MlaConfig) else None

    @property
    def rows(self) -> WindowConfig | None:
        """The attention of a layer that keeps keys of a window which are their own values, and perhaps entries."""
        return self.attention if isinstance(self.attention, WindowConfig) else None

    @property
    def block_index(self) -> BlockIndexConfig | None:
        """The index of a layer with attention to selected blocks."""
        return self.attention.block_index if isinstance(self.attention, AttentionConfig) else None

    @property
    def indexer(self) -> IndexerConfig | None:
        """The indexer of a layer with sparse attention to tokens."""
        return None if self.latent is None else self.latent.indexer


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputsConfig:
    """Inputs of each layer's own, `size` numbers of a token: from a table of vocab_size rows, and from its embedding.

    Tokens behind the last row have the first one. activation: of the gate in each layer. eps: of the norm of what comes
    from the embedding. image_row: the row of the table that all tokens of images have.
    """

    vocab_size: int
    size: int
    activation: str
    eps: float
    image_row: int = 0

    def num_ids(self, vocab_size: int) -> int:
        """Return the number of ids that are looked up in a model with this vocabulary."""
        return max(self.vocab_size, vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpConfig:
    """Alternating updates (AltUp, arXiv:2301.13310) of num_streams residual streams, in blocks that have them.

    The first stream is active: layers compute with it, and the others follow. laurel_rank: rank of the projection that
    is added to it (LAuReL, arXiv:2411.07501).
    """

    num_streams: int
    laurel_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """The parts that only encoders have.

    num_token_types: rows of a learned table of types, which is added to the tokens' embeddings; 0: there is none. Where
    there are two, tokens of the second text of a pair have the second. num_distance_buckets: rows of a learned table of
    distances, whose numbers are added to the scores of attention in all layers; 0: there is none. has_final_norm: the
    last layer's output is normalised.
    """

    num_token_types: int = 0
    num_distance_buckets: int = 0
    has_final_norm: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig:
    """A layer that changes a pooled vector: activation(weight x + bias). name: that of its tensors in the file.

    activation: a name in layers.label_head.ACTIVATIONS.
    """

    name: str
    in_features: int
    out_features: int
    bias: bool
    activation: str
