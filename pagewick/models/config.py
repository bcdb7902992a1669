"""ModelConfig: a checkpoint's config.json in terms of the one decoder. Imports no torch.

The module of a family reads the entries into these classes, and the decoder builds what they describe. Names are
Hugging Face's where it has one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Any, Final

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.layers.compressed_config import WindowConfig
from pagewick.layers.config import MlaConfig
from pagewick.layers.state_config import TILED, DeltaConfig, MambaConfig
from pagewick.models.name_map import NameMap
from pagewick.models.old_names import OLD_ARCHITECTURES
from pagewick.models.parts import (
    AltUpConfig,
    AttentionConfig,
    Block,
    DenseConfig,
    EncoderConfig,
    LayerConfig,
    LayerInputsConfig,
    MlpConfig,
    NormConfig,
)
from pagewick.parallel.sharding import check_tensor_parallel

if TYPE_CHECKING:
    from pagewick.layers.config import GatedStreamsConfig, HyperConfig, MoeConfig, QueryScaleConfig, RopeConfig
    from pagewick.models.caption_parts import ImageAttentionConfig
    from pagewick.models.labels import LabelHead
    from pagewick.models.mtp_config import MtpConfig
    from pagewick.models.vision.config import VisionConfig

_TIED_HEAD: Final = r"(.*\.)?lm_head\.weight"
_ROUTER_BIAS: Final = re.compile(r"\.e_score_correction_bias$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model in the decoder's terms; dtype is that of the weights.

    max_position_embeddings: the longest sequence that the file intends, in tokens. longest_context: the longest that
    the scaling of its rotary embedding allows, if that is more.
    num_position_embeddings: rows of a learned table of positions, added to the tokens' embeddings; None without one.
    position_offset: the row of this table that the first token has.
    has_embedding_norm: the first layer gets normalised embeddings.
    embedding_scale: factor of the embeddings; rounded to the weights' dtype first if is_embedding_scale_rounded.
    altup: in models whose block is "altup", which have layer_inputs, too. hyper, gated_streams: in those whose block is
    called so; the latter have no norm behind their last layer.
    residual_scale: factor of the outputs of attention and MLP. has_wide_residual: their sum, which goes from layer to
    layer, is in float32, and rounded where a norm reads it; in sequential blocks with RMS norms.
    logit_scale, logit_soft_cap: applied to the logits in this order. head_transform: the activation of a layer ahead of
    a tied head, norm(activation(W h + b)); the head then has a bias. None: there is none.
    end_token_ids: the tokens that end a sequence, whatever files say; empty: files say it. copies: names of tensors
    that a file may hold although they are tied, each with the name of what they equal.
    is_router_bias_optional: some files lack the numbers that routers add for their choice; these are 0 then.
    names: the file's names of tensors; the first map that fits the file counts. adapter_names: the names that LoRA
    adapters have for weights, where these are not those of the file: transformers' own. ignored: regular expressions of
    the file's names of tensors that the model does not use. encoder: what makes the model an encoder, whose tokens see
    those behind them, too; None: it is a decoder. embedding: the pooling of a model that was trained to make
    embeddings; empty for one that writes text. dense: layers that change the pooled vector, in their order. labels: the
    head of a model that rates texts. vision: the encoder of images; None: the model reads none, and no layer has an
    mrope_section. mtp: the layer that predicts further tokens, which files may hold; None: none is known. has_mtp:
    whether it is a part of the model.
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
    position_offset: int = 0
    has_embedding_norm: bool = False
    layer_inputs: LayerInputsConfig | None = None
    altup: AltUpConfig | None = None
    hyper: HyperConfig | None = None
    gated_streams: GatedStreamsConfig | None = None
    embedding_scale: float = 1.0
    is_embedding_scale_rounded: bool = False
    residual_scale: float = 1.0
    has_wide_residual: bool = False
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    head_bias: bool = False
    head_transform: str | None = None
    end_token_ids: tuple[int, ...] = ()
    copies: tuple[tuple[str, str], ...] = ()
    is_router_bias_optional: bool = False
    names: tuple[NameMap, ...] = (NameMap(),)
    adapter_names: NameMap | None = None
    ignored: tuple[str, ...] = ()
    encoder: EncoderConfig | None = None
    embedding: str = ""
    dense: tuple[DenseConfig, ...] = ()
    labels: LabelHead | None = None
    vision: VisionConfig | None = None
    mtp: MtpConfig | None = None
    has_mtp: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def all_layers(self) -> tuple[LayerConfig, ...]:
        """The layers, and behind them the one that predicts further tokens, if the model has it."""
        return self.layers if self.mtp is None or not self.has_mtp else (*self.layers, self.mtp.layer(self.layers))

    @property
    def position_kinds(self) -> list[tuple[RopeConfig | None, QueryScaleConfig | None]]:
        """The ways in which layers use positions, each once, in the order of the layers."""
        return list(dict.fromkeys((layer.rope, layer.query_scale) for layer in self.layers))

    @property
    def attentions(self) -> list[AttentionConfig | MlaConfig | WindowConfig]:
        """The attention of every layer that has queries."""
        found = (layer.attention for layer in self.layers)
        return [attention for attention in found if isinstance(attention, AttentionConfig | MlaConfig | WindowConfig)]

    @property
    def attention(self) -> AttentionConfig | MlaConfig | WindowConfig | None:
        """The attention of the first layer that has queries; None: no layer has."""
        return next(iter(self.attentions), None)

    @property
    def has_final_norm(self) -> bool:
        """Whether the last layer's output is normalised."""
        has_none = self.gated_streams is not None or self.image_attention is not None
        return not has_none and (self.encoder is None or self.encoder.has_final_norm)

    @property
    def image_attention(self) -> ImageAttentionConfig | None:
        """The attention of all layers to an image, in a model that writes captions."""
        return self.layers[0].image if self.layers else None

    @property
    def latent(self) -> MlaConfig | None:
        """The attention of the first layer that keeps latents."""
        return next((layer.latent for layer in self.layers if layer.latent is not None), None)

    @property
    def rows(self) -> WindowConfig | None:
        """The attention of the first layer that keeps rows."""
        return next((layer.rows for layer in self.layers if layer.rows is not None), None)

    @property
    def embedding_size(self) -> int:
        """Numbers of an embedding."""
        return self.dense[-1].out_features if self.dense else self.hidden_size

    @property
    def unshared(self) -> str:
        """The part of the model that several ranks cannot share, and why; empty if there is none."""
        return TILED if any(delta.is_tiled for delta in self.deltas) else ""

    @property
    def divided(self) -> dict[str, int]:
        """How many there are of each kind of part of which all ranks must get as many."""
        counts = {} if self.attention is None else {"attention heads": self.num_heads}
        others = {attention.num_heads for attention in self.attentions} - {self.num_heads}
        if others:
            counts["attention heads of other layers"] = gcd(*others)
        groups = {attention.num_groups for attention in self.attentions if isinstance(attention, WindowConfig)}
        if groups:
            counts["groups of heads"] = gcd(*groups)
        if self.deltas:
            counts["key heads of linear attention"] = self.deltas[0].num_key_heads
        states = (state for layer in self.layers for state in layer.states)
        mamba = next((state for state in states if isinstance(state, MambaConfig)), None)
        if mamba is not None:
            counts["heads of Mamba"] = mamba.num_heads
            # Ranks may share a model's only group.
            counts |= {"groups of Mamba": mamba.num_groups} if mamba.num_groups > 1 else {}
        return counts

    def check_ranks(self, num_ranks: int, owner: str = "model") -> None:
        """Raise ConfigError, naming the sizes that work, unless every rank gets as many of all parts of `owner`."""
        for parts, count in self.divided.items():
            check_tensor_parallel(count, num_ranks, owner, parts)

    @property
    def deltas(self) -> list[DeltaConfig]:
        """The linear attention of every layer that has the gated delta rule."""
        return [layer.attention for layer in self.layers if isinstance(layer.attention, DeltaConfig)]

    @property
    def num_heads(self) -> int:
        """Number of query heads in the first layer with some; 0 if none has."""
        return 0 if self.attention is None else self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Number of key and value heads in the first layer with some; latent attention has as many as query heads."""
        attention = self.attention
        if isinstance(attention, WindowConfig):
            return 1
        return attention.num_kv_heads if isinstance(attention, AttentionConfig) else self.num_heads

    @property
    def num_experts(self) -> int:
        """Number of routed experts in each layer that has some; 0 if none has."""
        return self.mixtures[0].num_experts if self.mixtures else 0

    @property
    def attention_width(self) -> int:
        """Number of query heads times the size of a query as it is compared with keys, in the layer with the most."""
        widths = (
            attention.num_heads * (attention.latent_size if isinstance(attention, MlaConfig) else attention.head_dim)
            for attention in self.attentions
        )
        return max(widths, default=0)

    @property
    def ignored_tensors(self) -> tuple[str, ...]:
        """Regular expressions of all tensors that a file may hold and the model does not use."""
        # Old checkpoints hold the frequencies of rotation, which are computed; some hold the tied head as well.
        tied = (_TIED_HEAD,) if self.tie_word_embeddings else ()
        # DecoderAttention reads the scales of keys and values, which not every KV cache needs; queries are not rounded.
        kv_scales = r".*\.self_attn\.(((attn|[qkv]_proj)\.)?(q|k|v|kv)_scale|[qkv]_proj\.output_scale)"
        return (r".*\.rotary_emb\.inv_freq", kv_scales, *self.ignored, *tied)

    def tied_heads(self, tensor_names: Sequence[str]) -> dict[str, str]:
        """The heads that a file with these tensors holds although they are tied, each with its embedding."""
        embedding = self.name_map(tensor_names).in_file("model.embed_tokens.weight")
        has_head = self.labels is None and self.encoder is None
        if not self.tie_word_embeddings or not has_head or embedding not in tensor_names:
            return {}
        copies = {name: original for name, original in self.copies if name in tensor_names}
        return copies | {name: embedding for name in tensor_names if re.fullmatch(_TIED_HEAD, name)}

    @property
    def mixtures(self) -> list[MoeConfig]:
        """The MoeConfig of every layer that has experts."""
        found = (layer.mlp if layer.experts is None else layer.experts for layer in self.layers)
        return [mixture for mixture in found if mixture is not None and not isinstance(mixture, MlpConfig)]

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
        if self.has_embedding_norm:
            sought.append("model.embed_norm.weight")
        kinds = (layer.mlp for layer in self.layers)
        mixed = next((idx for idx, mlp in enumerate(kinds) if not isinstance(mlp, MlpConfig | None)), None)
        linear = next((idx for idx, layer in enumerate(self.layers) if isinstance(layer.state, DeltaConfig)), None)
        if linear is not None:
            sought.append(f"model.layers.{linear}.linear_attn.out_proj.weight")
        if self.norm.gate_rank is not None:
            sought.append("model.layers.0.input_layernorm.gate_down.weight")
        if mixed is not None:
            sought += [f"model.layers.{mixed}.mlp.gate.{leaf}" for leaf in ("weight", "e_score_correction_bias")]
        attentions = (layer.attention for layer in self.layers)
        with_sinks = next(
            (
                idx
                for idx, one in enumerate(attentions)
                if isinstance(one, WindowConfig) or (isinstance(one, AttentionConfig | MlaConfig) and one.has_sinks)
            ),
            None,
        )
        if with_sinks is not None:
            sought.append(f"model.layers.{with_sinks}.self_attn.sinks.weight")
        if self.hyper is not None:
            sought.append("model.layers.0.attn_hc.fn")
        if self.vision is not None:
            sought += ["visual.blocks.0.norm1.weight", "visual.patch_embed.proj.weight"]
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
        if self.is_router_bias_optional and tensor_names and not any(map(_ROUTER_BIAS.search, tensor_names)):
            layers = tuple(layer.without_router_bias() for layer in self.layers)
            return replace(self, layers=layers, is_router_bias_optional=False).fitted(tensor_names)
        names = self.name_map(tensor_names)
        if (
            self.encoder is not None
            or names in self.names
            or self.labels is not None
            or names.in_file("lm_head.weight") in tensor_names
        ):
            return self
        return replace(self, tie_word_embeddings=True, embedding=self.embedding or "last")

    def without_vision(self) -> ModelConfig:
        """Return the config of the text part alone: it ignores the tensors of the vision part.

        Raises ModelLoadError for a model whose texts are about an image always.
        """
        if self.vision is None:
            return self
        if self.image_attention is not None:
            raise ModelLoadError(
                f"{self.architecture} writes captions of images, and nothing without the part that sees\n"
                "  leave out --language-model-only and --limit-mm-per-prompt, and download the model with its "
                "preprocessor_config.json"
            )
        layers = tuple(layer.without_images() for layer in self.layers)
        return replace(self, vision=None, layers=layers, ignored=(*self.ignored, self.vision.tensors))


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the checkpoint's architecture by its name in models.registry. Raises ModelLoadError if it names none."""
    architectures = config.get("architectures")
    found = architectures[0] if isinstance(architectures, list) and architectures else None
    # The names are those of classes in Python.
    if not isinstance(found, str) or not found.isidentifier():
        raise ModelLoadError(
            'config.json names no architecture; it needs for example "architectures": ["LlamaForCausalLM"]'
        )
    return OLD_ARCHITECTURES.get(found, found)
