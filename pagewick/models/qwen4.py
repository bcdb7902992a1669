"""Qwen4-Exp, as a text model. Qwen3.5-MoE, except:

- Attention sees the blocks of indexer_compress_ratio tokens that an index selects, indexer_budget tokens in all, and
  the tokens behind the last complete block.
- A token has hc_count residual streams with gates (hyper-connections); there are no other norms between layers.
- The layers in ple_layer_ids, which count from 1, add embeddings of hashed n-grams to the streams.
- The output of linear attention may have gates that are sigmoids (output_gate_type).

Files call the layers with an index full_attention or indexed_attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pagewick.layers.compressed_config import BlockIndexConfig
from pagewick.layers.config import GatedStreamsConfig
from pagewick.layers.ngram_config import NgramConfig, multipliers_of, primes_from
from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.multimodal import read_alone, read_text_part
from pagewick.models.parts import HeadNormConfig, LayerConfig, NormConfig
from pagewick.models.qwen import sparse_layers
from pagewick.models.qwen_next import read_linear_attention, without_axes

_DEFAULTS: Final = {
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 2,
    "norm_topk_prob": True,
    "hc_count": 4,
    "hc_lowrank": 320,
}
# Larger numbers mean that the file is corrupt; the primes from the base on are computed when it is read, and all parts
# of tables are listed. The heads and the parts of all layers together:
_ALL_HEADS, _ALL_SHARDS = 2**14, 2**18
_MOST_ROWS, _MOST_ORDER, _MOST_HEADS, _MOST_SHARDS = 2**28, 16, 128, 2**16
_MAX_SEED: Final = 2**62
# They count if a file has them, and follow from config.json otherwise.
_HASHES: Final = r".*\.ple_embedding\.(layer_multipliers|ngram_heads_vocab_sizes|ngram_heads_offsets)"
_MTP: Final = r"(model\.)?mtp\..*"


def read_qwen4(entries: Entries) -> ModelConfig:
    return read_alone(entries, _read)


def read_qwen4_multimodal(entries: Entries) -> ModelConfig:
    return read_text_part(entries, _read, is_tied=False)


def _read(entries: Entries) -> ModelConfig:
    entries = without_axes(entries.filled(_DEFAULTS))
    eps, has_bias = entries.positive("rms_norm_eps"), entries.flag("attention_bias", False)
    is_linear = _linear_layers(entries)
    entries = entries.replaced({"layer_types": [reading.LINEAR if one else reading.INDEXED for one in is_linear]})
    attention = reading.read_attention(
        entries,
        qkv_bias=has_bias,
        o_bias=has_bias,
        head_norm=HeadNormConfig(eps=eps, offset=1.0),
        has_gate=True,
        block_index=_block_index(entries, eps),
    )
    rope = reading.read_rope_of(entries, attention)
    if attention.block_index is not None and rope.rotary_dim > attention.block_index.head_dim:
        raise entries.wrong("indexer_head_dim", f"at least the {rope.rotary_dim} numbers of a head that rotate")
    gate = entries.choice("output_gate_type", ("silu", "sigmoid"), "silu")
    linear = read_linear_attention(entries, eps, has_sigmoid_gate=gate == "sigmoid")
    shared = entries.size("shared_expert_intermediate_size", 512)
    mlps = sparse_layers(entries, default_top_k=10, default_num_experts=512, shared=shared)
    streams = GatedStreamsConfig(num_streams=entries.size("hc_count"), rank=entries.size("hc_lowrank"), norm_eps=eps)
    if streams.num_streams < 2:
        raise entries.wrong("hc_count", "a whole number above 1")
    ngrams = _ngrams(entries, is_linear, streams)
    layers = tuple(
        LayerConfig(attention=linear, mlp=mlp, rope=None, ngrams=ngrams.get(layer_idx))
        if is_linear[layer_idx]
        else LayerConfig(attention=attention, mlp=mlp, rope=rope)
        for layer_idx, mlp in enumerate(mlps)
    )
    return reading.model_config(
        entries,
        block="gated_streams",
        norm=NormConfig(eps=eps, offset=1.0),
        gated_streams=streams,
        layers=layers,
        ignored=(_HASHES, _MTP),
    )


def _linear_layers(entries: Entries) -> list[bool]:
    """Return which layers have linear attention. Raises ModelLoadError unless some layer has the other kind."""
    num_layers = reading.read_num_layers(entries)
    kinds: Sequence[str] | None = entries.texts("layer_types")
    if kinds is None:
        interval = entries.size("full_attention_interval", 4)
        if interval > num_layers:
            raise entries.wrong("full_attention_interval", f"at most num_hidden_layers ({num_layers})")
        return [(layer_idx + 1) % interval != 0 for layer_idx in range(num_layers)]
    known = {reading.LINEAR, reading.FULL, reading.INDEXED}
    if len(kinds) != num_layers or set(kinds) - known or set(kinds) == {reading.LINEAR}:
        raise entries.wrong(
            "layer_types",
            f"a list of num_hidden_layers ({num_layers}) kinds, {', '.join(sorted(known))}, not all {reading.LINEAR}",
        )
    return [kind == reading.LINEAR for kind in kinds]


def _block_index(entries: Entries, eps: float) -> BlockIndexConfig:
    entries.demand("indexer_kv_heads", 1, None)
    budget, ratio = entries.size("indexer_budget"), entries.size("indexer_compress_ratio")
    if budget % ratio:
        raise entries.wrong("indexer_budget", f"a multiple of indexer_compress_ratio ({ratio})")
    return BlockIndexConfig(
        num_heads=entries.size("indexer_n_heads"),
        head_dim=entries.size("indexer_head_dim"),
        top_k=budget // ratio,
        ratio=ratio,
        norm_eps=eps,
    )


def _ngrams(entries: Entries, is_linear: Sequence[bool], streams: GatedStreamsConfig) -> dict[int, NgramConfig]:
    """Return what layers add of n-grams, by the index of the layer."""
    layer_ids = sorted(set(entries.sizes("ple_layer_ids") or ()))
    if not layer_ids:
        return {}
    if layer_ids[-1] > len(is_linear) or not all(is_linear[layer_id - 1] for layer_id in layer_ids):
        raise entries.wrong("ple_layer_ids", f"numbers from 1 to {len(is_linear)} of layers with linear attention")
    hidden_size, vocab_size = entries.size("hidden_size"), entries.size("vocab_size")
    num_orders = entries.size("ngram_size", 3, most=_MOST_ORDER) - 1
    num_heads = num_orders * entries.size("heads_per_ngram", 8, most=_MOST_HEADS)
    embed_dim = entries.size("ple_embed_dim", hidden_size)
    if not num_heads or embed_dim % num_heads:
        raise entries.wrong(
            "ple_embed_dim", f"a multiple of the heads of all n-grams, (ngram_size - 1) * heads_per_ngram ({num_heads})"
        )
    num_shards = entries.size("split_ngram_parts", 512, most=_MOST_SHARDS)
    for name, number, most in (
        ("heads_per_ngram", num_heads, _ALL_HEADS),
        ("split_ngram_parts", num_shards, _ALL_SHARDS),
    ):
        if number * len(layer_ids) > most:
            raise entries.wrong(name, f"smaller: {number} in each of {len(layer_ids)} layers are more than {most}")
    unit = entries.size("make_ngram_vocab_size_divisible_by", 128)
    primes = primes_from(entries.size("ngram_vocab_size_base", 20_000_000, most=_MOST_ROWS), num_heads * len(layer_ids))
    seed, found = entries.count("seed", 1234, most=_MAX_SEED), {}
    for index, layer_id in enumerate(layer_ids):
        sizes = primes[index * num_heads : (index + 1) * num_heads]
        found[layer_id - 1] = NgramConfig(
            num_orders=num_orders,
            head_sizes=sizes,
            num_rows=-(-sum(sizes) // unit) * unit,
            vocab_size=vocab_size,
            num_shards=num_shards,
            embed_dim=embed_dim,
            multipliers=multipliers_of(index, num_places=num_orders + 1, vocab_size=vocab_size, seed=seed),
            end_id=_end_id(entries),
            num_streams=streams.num_streams,
            stream_size=hidden_size,
            conv_size=entries.size("ple_conv_kernel_size", 4),
            norm_eps=streams.norm_eps,
        )
    return found


def _end_id(entries: Entries) -> int:
    """Return the token that ends a text: the first, where there are several."""
    value = entries.get("eos_token_id")
    if isinstance(value, list) and value:
        entries = entries.replaced({"eos_token_id": value[0]})
    return entries.count("eos_token_id")
