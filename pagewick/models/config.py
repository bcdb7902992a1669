"""ModelConfig: a checkpoint's config.json in terms of the one decoder. Imports no torch.

The module of a family reads the entries into these classes, and the decoder builds what they describe. Names are
Hugging Face's where it has one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.layers.config import TILED, DeltaConfig, MlaConfig
from pagewick.models.old_names import OLD_ARCHITECTURES

if TYPE_CHECKING:
    from pagewick.layers.config import MoeConfig, RopeConfig
    from pagewick.models.labels import LabelHead
    from pagewick.models.vision.config import VisionConfig

_TIED_HEAD: Final = r"(.*\.)?lm_head\.weight"
# How the parts of a layer follow each other; h: the hidden states that the layer gets.
#   sequential: h += attention(norm(h)); h += mlp(norm(h))
#   parallel:   h += attention(norm(h)) + mlp(norm(h)), one norm for both
#   sandwich:   h += norm(attention(norm(h))); h += norm(mlp(norm(h)))
#   post_norm:  h += norm(attention(h)); h += norm(mlp(h))
#   extended:   as sandwich; a layer with experts beside its MLP adds both: norm(norm(mlp(norm(h))) + norm(experts(
#               norm(h)))). Then h += norm(projection(activation(gate(h)) * the layer's own input)), if the model has
#               such inputs, and h is multiplied by a number of the layer's.
Block = Literal["sequential", "parallel", "sandwich", "post_norm", "extended"]
_NORMS: Final = ("input_layernorm", "post_attention_layernorm")
_SANDWICH: Final = (*_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
# Norms around experts beside an MLP: after the MLP, before and after the experts.
NORMS_OF_EXPERTS: Final = (
    "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2",
)  # fmt: skip
NORMS_OF_BLOCK: Final[Mapping[Block, tuple[str, ...]]] = {
    "sequential": _NORMS,
    "parallel": _NORMS[:1],
    "sandwich": _SANDWICH,
    "post_norm": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "extended": _SANDWICH,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig:
    """offset: added to the weight of an RMS norm. has_bias: whether a layer norm has one."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float
    offset: float = 0.0
    has_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNormConfig(NormConfig):
    """Normalisation of each head's query and key before they are rotated.

    is_per_head: whether every head has a weight of its own. is_matrix: the file has these as one matrix. is_joint: the
    queries of all heads are normalised as one vector, and so are the keys; it is an RMS norm without an offset.
    """

    is_per_head: bool = False
    is_matrix: bool = False
    is_joint: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """layout: how the file stores the projections to queries, keys and values.

    parts: as q_proj, k_proj and v_proj. fused: in one tensor, all queries, then all keys, then all values. by_head: in
    one tensor, each head's query, key and value one after the other. keys_are_values: as q_proj and k_proj, whose
    outputs are values, too. queries: as q_proj alone, in a layer that borrows keys and values.
    has_gate: each head's output is multiplied by the sigmoid of a gate, whose rows follow the head's query in q_proj.
    has_value_norm: each head's value is divided by its root mean square, with head_norm's eps.
    has_sinks: each query head has a further logit in its softmax, which has no value.
    sees_images_whole: tokens of an image see those behind them in the same image, too.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    softmax_scale: float
    qkv_bias: bool = False
    o_bias: bool = False
    layout: Literal["parts", "fused", "by_head", "keys_are_values", "queries"] = "parts"
    head_norm: HeadNormConfig | None = None
    logit_soft_cap: float | None = None
    has_gate: bool = False
    has_sinks: bool = False
    has_value_norm: bool = False
    sees_images_whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpConfig:
    """activation: a name in kernels.reference.ACTIVATIONS. is_gated: activation(gate(x)) * up(x), or activation(up(x)).

    is_fused: the file has gate and up in one tensor.
    """

    intermediate_size: int
    activation: str = "silu"
    is_gated: bool = True
    bias: bool = False
    is_fused: bool = False

    @property
    def input_projections(self) -> tuple[str, ...]:
        """Names of the projections before the activation."""
        return ("gate_proj", "up_proj") if self.is_gated else ("up_proj",)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """window: number of tokens that attention sees, the new one included; None: all. rope: None: nothing is rotated.

    lender: index of the layer whose keys and values this one attends to; None: it has its own. experts: beside the MLP,
    in an extended block.
    """

    attention: AttentionConfig | MlaConfig | DeltaConfig
    mlp: MlpConfig | MoeConfig
    rope: RopeConfig | None
    window: int | None = None
    lender: int | None = None
    experts: MoeConfig | None = None

    def without_images(self) -> LayerConfig:
        """Return the layer as it is in a model that reads text only."""
        rope, attention = self.rope, self.attention
        if rope is not None and rope.mrope_section:
            rope = replace(rope, mrope_section=(), mrope_interleaved=False)
        if isinstance(attention, AttentionConfig) and attention.sees_images_whole:
            attention = replace(attention, sees_images_whole=False)
        return replace(self, rope=rope, attention=attention)

    def seeing_images_whole(self) -> LayerConfig:
        """Return the layer, whose attention is of the usual kind, so that the tokens of an image see each other."""
        assert isinstance(self.attention, AttentionConfig), "no other attention can do so"
        return replace(self, attention=replace(self.attention, sees_images_whole=True))

    @property
    def state(self) -> DeltaConfig | None:
        """The attention of a layer that keeps one state of a sequence, and nothing of each token."""
        return self.attention if isinstance(self.attention, DeltaConfig) else None

    @property
    def latent(self) -> MlaConfig | None:
        """The attention of a layer that keeps a latent of each token."""
        return self.attention if isinstance(self.attention, MlaConfig) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputsConfig:
    """Inputs of each layer's own, `size` numbers of a token: from a table of vocab_size rows, and from its embedding.

    activation: of the gate in each layer. eps: of the norm of what comes from the embedding. image_row: the row of the
    table that all tokens of images have.
    """

    vocab_size: int
    size: int
    activation: str
    eps: float
    image_row: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NameMap:
    """The file's names of tensors. parts: (ours, theirs), parts of dotted names, which are replaced in this order.

    A part that is replaced by "" is left out.
    """

    parts: tuple[tuple[str, str], ...] = ()

    def in_file(self, name: str) -> str:
        dotted = f".{name}."
        for ours, theirs in self.parts:
            dotted = dotted.replace(f".{ours}.", f".{theirs}." if theirs else ".")
        return dotted[1:-1]

    def bare(self) -> NameMap:
        """Return the names in a file of the model without its output layer, which transformers calls model."""
        return NameMap(parts=(*self.parts, ("model", "")))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model in the decoder's terms; dtype is that of the weights.

    max_position_embeddings: the longest sequence that the file intends, in tokens. longest_context: the longest that
    the scaling of its rotary embedding allows, if that is more.
    num_position_embeddings: rows of a learned table of positions, added to the tokens' embeddings; None without one.
    embedding_scale: factor of the embeddings; rounded to the weights' dtype first if is_embedding_scale_rounded.
    residual_scale: factor of the outputs of attention and MLP. logit_scale, logit_soft_cap: applied to the logits in
    this order.
    names: the file's names of tensors; the first map that fits the file counts. ignored: regular expressions of the
    file's names of tensors that the model does not use. embedding: the pooling of a model that was trained to make
    embeddings; empty for one that writes text. labels: the head of one that rates texts. vision: the encoder of images;
    None: the model reads none, and no layer has an mrope_section.
    """

    architecture: str
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    longest_context: int
    tie_word_embeddings: bool
    dtype: str
    layers: tuple[LayerConfig, ...]
    norm: NormConfig
    block: Block = "sequential"
    num_position_embeddings: int | None = None
    layer_inputs: LayerInputsConfig | None = None
    embedding_scale: float = 1.0
    is_embedding_scale_rounded: bool = False
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    head_bias: bool = False
    names: tuple[NameMap, ...] = (NameMap(),)
    ignored: tuple[str, ...] = ()
    embedding: str = ""
    labels: LabelHead | None = None
    vision: VisionConfig | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> AttentionConfig | MlaConfig:
        """The attention of the first layer that has queries."""
        return next(layer.attention for layer in self.layers if not isinstance(layer.attention, DeltaConfig))

    @property
    def unshared(self) -> str:
        """The part of the model that several ranks cannot share, and why; empty if there is none."""
        states = (layer.state for layer in self.layers)
        return TILED if any(state is not None and state.is_tiled for state in states) else ""

    @property
    def num_heads(self) -> int:
        """Number of query heads in every layer that has some."""
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Number of key and value heads in the first layer with some; latent attention has as many as query heads."""
        attention = self.attention
        return attention.num_kv_heads if isinstance(attention, AttentionConfig) else attention.num_heads

    @property
    def num_experts(self) -> int:
        """Number of routed experts in each layer that has some; 0 if none has."""
        return self.mixtures[0].num_experts if self.mixtures else 0

    @property
    def attention_width(self) -> int:
        """Number of query heads times the size of the largest query as it is compared with keys."""
        attention = self.attention
        if isinstance(attention, AttentionConfig):
            sizes = (layer.attention.head_dim for layer in self.layers if isinstance(layer.attention, AttentionConfig))
            return attention.num_heads * max(sizes)
        return attention.num_heads * (attention.kv_lora_rank + attention.qk_rope_head_dim)

    @property
    def ignored_tensors(self) -> tuple[str, ...]:
        """Regular expressions of all tensors that a file may hold and the model does not use."""
        # Old checkpoints hold the frequencies of rotation, which are computed; some hold the tied head as well.
        tied = (_TIED_HEAD,) if self.tie_word_embeddings else ()
        # DecoderAttention reads the scales of keys and values, which not every KV cache needs; queries are not rounded.
        kv_scales = r".*\.self_attn\.(((attn|[qkv]_proj)\.)?(q|k|v|kv)_scale|[kv]_proj\.output_scale)"
        return (r".*\.rotary_emb\.inv_freq", kv_scales, *self.ignored, *tied)

    def tied_heads(self, tensor_names: Sequence[str]) -> dict[str, str]:
        """The heads that a file with these tensors holds although they are tied, each with its embedding."""
        embedding = self.name_map(tensor_names).in_file("model.embed_tokens.weight")
        if not self.tie_word_embeddings or self.labels is not None or embedding not in tensor_names:
            return {}
        return {name: embedding for name in tensor_names if re.fullmatch(_TIED_HEAD, name)}

    @property
    def mixtures(self) -> list[MoeConfig]:
        """The MoeConfig of every layer that has experts."""
        found = (layer.mlp if layer.experts is None else layer.experts for layer in self.layers)
        return [mixture for mixture in found if not isinstance(mixture, MlpConfig)]

    def check_expert_offload(self, per_rank: int, num_ranks: int) -> None:
        """Raise ConfigError unless --num-experts-offload-per-rank `per_rank` is possible with this model."""
        mixtures = set(self.mixtures)
        if per_rank and not mixtures:
            raise ConfigError(
                f"--num-experts-offload-per-rank {per_rank}: {self.architecture} has no experts; leave it out"
            )
        for mixture in mixtures:
            mixture.num_offloaded(per_rank, num_ranks)

    def name_map(self, tensor_names: Sequence[str]) -> NameMap:
        """The map for a file with these tensors: the first under which most of a few well-known names exist."""
        known = frozenset(tensor_names)
        sought = ["model.embed_tokens.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight"]
        mixed = next((idx for idx, layer in enumerate(self.layers) if not isinstance(layer.mlp, MlpConfig)), None)
        if mixed is not None:
            sought += [f"model.layers.{mixed}.mlp.gate.{leaf}" for leaf in ("weight", "e_score_correction_bias")]
        if self.vision is not None:
            sought.append("visual.blocks.0.norm1.weight")
        maps = (*self.names, *(names.bare() for names in self.names))
        return max(maps, key=lambda names: sum(names.in_file(name) in known for name in sought))

    def fitted(self, tensor_names: Sequence[str]) -> ModelConfig:
        """Return the config for a file with these tensors.

        A file without an output layer, whose names lack "model.", is that of an embedding model. Nothing reads the head
        then, so that it may be the table of embeddings. A file without any tensor of a vision part reads no images.
        """
        if (
            self.vision is not None
            and tensor_names
            and not any(map(re.compile(self.vision.tensors).fullmatch, tensor_names))
        ):
            return self.without_vision().fitted(tensor_names)
        names = self.name_map(tensor_names)
        if names in self.names or self.labels is not None or names.in_file("lm_head.weight") in tensor_names:
            return self
        return replace(self, tie_word_embeddings=True, embedding=self.embedding or "last")

    def without_vision(self) -> ModelConfig:
        """Return the config of the text part alone: it ignores the tensors of the vision part."""
        if self.vision is None:
            return self
        layers = tuple(layer.without_images() for layer in self.layers)
        return replace(self, vision=None, layers=layers, ignored=(*self.ignored, self.vision.tensors))


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the checkpoint's architecture by its name in models.registry. Raises ModelLoadError if it names none."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ModelLoadError(
            'config.json names no architecture; it needs for example "architectures": ["LlamaForCausalLM"]'
        )
    return OLD_ARCHITECTURES.get(architectures[0], architectures[0])
