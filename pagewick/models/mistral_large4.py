"""Mistral Large 4. Mistral Small 4's experts, and latent attention with the indexers of DeepSeek-V3.2, except:

- One matrix makes queries. They are multiplied by scale * log(position + 1) + bias, with two numbers of each head.
- Every fourth layer rotates nothing; in the others, frequencies are multiplied by learned numbers (LeRoPE).
- Layers may attend to the latents of an earlier layer that rotates as they do (kv_source_layers).
- Queries of indexers are made from normalised hidden states, and scaled as those of attention; they rotate where
  attention does. Layers may see what an earlier indexer has selected.
- Logits have a soft cap. Images are read as in Mistral Small 4. The files have Mistral's own names of tensors.
- The layers that predict later tokens are not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.deepseek import SHARED_EXPERTS, latent_attention, later_layers, layers_by_kind, read_experts
from pagewick.models.deepseek_v32 import read_indexers
from pagewick.models.entries import Entries
from pagewick.models.mistral4 import read_softmax_routing
from pagewick.models.multimodal import read_text_part, text_entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import LayerConfig, NormConfig
from pagewick.models.rope_entries import read_rope
from pagewick.models.vision.pixtral_entries import with_original_pixtral

# Defaults of entries that files leave out.
_USUAL: Final = {
    "first_k_dense_replace": 1,
    "qk_nope_head_dim": 64,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 1048576,
    "index_n_heads": 32,
}
_ROPE: Final = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2048.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.0,
}
_NAMES: Final = NameMap(
    parts=(
        ("model.embed_tokens", "tok_embeddings"), ("model.norm", "norm"), ("lm_head", "output"),
        # The index of the kind of layers that rotate.
        ("model.rotary.0", "lerope"), ("model.rotary.1", "lerope"),
        ("model.layers", "layers"), ("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm"),
        ("softmax_scaling.scale", "ssmax_scaling.s"), ("softmax_scaling.bias", "ssmax_scaling.b"),
        ("self_attn.q_proj", "attention.wq"), ("self_attn.o_proj", "attention.wo"),
        ("kv_a_proj_with_mqa", "wkv_a_with_mqa"), ("kv_b_proj", "wkv_b"), ("kv_a_layernorm", "kv_a_norm"),
        ("self_attn", "attention"),
        ("mlp.gate", "gate"), ("mlp.experts", "experts"), ("mlp.shared_expert", "shared_experts"),
        ("mlp", "feed_forward"), ("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3"),
    )
)  # fmt: skip
_LATER_LAYERS: Final = r"mtp_dspark\..*"


def read_mistral_large4(entries: Entries) -> ModelConfig:
    text_entries(entries).choice("model_type", ("mistral_large4_text",), "mistral_large4_text")
    return with_original_pixtral(read_text_part(entries, _read_text, places=(NameMap(),)), entries)


def _read_text(entries: Entries) -> ModelConfig:
    if "rope_scaling" not in entries:
        entries = entries.without_null(("rope_parameters",)).filled({"rope_parameters": _ROPE})
    entries = entries.filled(_USUAL)
    entries.demand("q_lora_rank", None, None, "one matrix makes queries")
    entries.demand("rope_interleave", True, True)
    entries.demand("norm_topk_prob", True, True)
    num_experts = entries.size("n_routed_experts", 128)
    routing = read_softmax_routing(entries, num_experts)
    mlps = layers_by_kind(
        entries, read_experts(entries, routing, num_experts=num_experts, default_shared=1), default_dense=1
    )
    rope_dim, eps = entries.size("qk_rope_head_dim", 64), entries.positive("rms_norm_eps", 1e-5)
    rope = read_rope(
        entries,
        head_dim=rope_dim,
        rotary_dim=rope_dim,
        max_position_embeddings=reading.read_max_position(entries),
        interleaved=True,
    )
    if rope.kind == "dynamic":
        raise entries.wrong("rope_parameters", "of another type than dynamic: its frequencies cannot be learned")
    rope = replace(rope, is_learned=True)
    rotating = replace(latent_attention(entries, rope), norm_eps=eps, has_log_scales=True)
    still = replace(rotating, qk_nope_head_dim=rotating.qk_head_dim, has_shared_key=False)
    indexers = read_indexers(entries, is_interleaved=True, reads_hidden_states=True)
    rotates = reading.read_rotating_layers(entries, len(mlps))
    lenders = _read_lenders(entries, rotates)
    layers = tuple(
        LayerConfig(
            attention=replace(rotating if turns else still, indexer=indexer, has_own_latents=lender is None),
            mlp=mlp,
            rope=rope if turns else None,
            lender=lender,
        )
        for turns, indexer, lender, mlp in zip(rotates, indexers, lenders, mlps, strict=True)
    )
    return reading.model_config(
        entries,
        norm=NormConfig(eps=eps),
        layers=layers,
        logit_soft_cap=entries.positive("final_logit_softcapping", 30.0),
        names=(_NAMES,),
        adapter_names=SHARED_EXPERTS,
        ignored=(_LATER_LAYERS, *later_layers(entries), *(() if any(rotates) else (r"lerope\.alpha",))),
    )


def _read_lenders(entries: Entries, rotates: Sequence[bool]) -> list[int | None]:
    """Return the layer to whose latents each layer attends; None: its own.

    transformers gives a layer the latents of the last layer before it that rotates as it does and lends its own; the
    entry must say the same.
    """
    sources = entries.sizes("kv_source_layers", least=0)
    if sources is None:
        return [None] * len(rotates)
    if len(sources) != len(rotates):
        raise entries.wrong("kv_source_layers", f"a list of num_hidden_layers ({len(rotates)}) layers")
    lending = {source for layer_idx, source in enumerate(sources) if source != layer_idx}
    latest: dict[bool, int] = {}
    for layer_idx, (source, turns) in enumerate(zip(sources, rotates, strict=True)):
        if source != layer_idx and latest.get(turns) != source:
            raise entries.wrong(
                "kv_source_layers",
                f"a list in which layer {layer_idx} has itself, or the last layer before it that rotates as it does, "
                "has latents of its own and lends them",
            )
        if source == layer_idx and layer_idx in lending:
            latest[turns] = layer_idx
    return [None if source == layer_idx else source for layer_idx, source in enumerate(sources)]
