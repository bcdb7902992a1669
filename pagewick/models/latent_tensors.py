"""The tensors of latent attention, and of the indexers within it. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from pagewick.layers.config import HeadBlockConfig, IndexerConfig, MlaConfig
from pagewick.models.tensor_sizes import Role, Size, whole

Named = tuple[str, Role, tuple[Size, ...]]


def latent_tensors(config: MlaConfig, hidden: Size, heads: Size) -> Iterator[Named]:
    """Yield the name behind the attention's, the role and the sizes of each tensor.

    hidden: the size of hidden states. heads: how many there are, and how many of them the rank keeps.
    """
    has_bias, queries = config.attention_bias, heads.times(config.query_rows)
    if config.q_lora_rank is None:
        yield from _linear("q_proj", queries, hidden)
    else:
        low = whole(config.q_lora_rank)
        yield from _linear("q_a_proj", low, hidden, has_bias=has_bias)
        yield "q_a_layernorm.weight", "norm", (low,)
        yield from _linear("q_b_proj", queries, low.times(2) if config.has_gates else low)
    if config.has_own_latents:
        rows = whole(config.kv_lora_rank + config.key_dim)
        yield from _linear("kv_a_proj_with_mqa", rows, hidden, has_bias=has_bias)
        yield "kv_a_layernorm.weight", "norm", (whole(config.kv_lora_rank),)
    keys_and_values = heads.times(config.qk_nope_head_dim + config.v_head_dim)
    yield from _linear("kv_b_proj", keys_and_values, whole(config.kv_lora_rank))
    if config.has_head_gates:
        yield from _linear("g_proj", heads, hidden)
    elif config.has_number_gates:
        yield from _linear("g_proj", heads.times(config.v_head_dim), hidden)
    if config.has_sinks:
        yield "sinks.weight", "attention", (heads,)
    if config.has_log_scales:
        yield from _log_scales("softmax_scaling", heads)
    yield from _linear("o_proj", hidden, heads.times(config.v_head_dim), has_bias=has_bias)
    if config.indexer is not None and not config.indexer.is_shared:
        for name, role, sizes in _indexer(config.indexer, hidden, config.q_lora_rank):
            yield f"indexer.{name}", role, sizes


def _indexer(config: IndexerConfig, hidden: Size, q_lora_rank: int | None) -> Iterator[Named]:
    """Yield the tensors of an indexer, all of which every rank has."""
    heads, head_dim, inputs = whole(config.num_heads), whole(config.head_dim), hidden
    if config.reads_hidden_states:
        yield from _norm("q_input_norm", hidden)
    else:
        assert q_lora_rank is not None, "other indexers read what queries are made from"
        inputs = whole(q_lora_rank)
    yield from _linear("wq_b", heads.times(config.head_dim), inputs)
    if config.has_log_scales:
        yield from _log_scales("softmax_scaling", heads)
    yield from _linear("wk", head_dim, hidden)
    yield from _norm("k_norm", head_dim)
    yield "weights_proj.weight", "router", (heads, hidden)


def head_block_tensors(config: HeadBlockConfig | None, hidden: Size) -> Iterator[Named]:
    """Yield the same of an indexer of blocks, without the indexer's name; nothing if there is none."""
    if config is None:
        return
    head_dim = whole(config.head_dim)
    yield from _linear("q_proj", head_dim.times(config.num_heads), hidden)
    yield from _linear("k_proj", head_dim, hidden)
    yield "q_norm.weight", "norm", (head_dim,)
    yield "k_norm.weight", "norm", (head_dim,)


def _log_scales(path: str, heads: Size) -> Iterator[Named]:
    for leaf in ("scale", "bias"):
        yield f"{path}.{leaf}", "attention", (heads,)


def _norm(path: str, size: Size) -> Iterator[Named]:
    """Yield the tensors of a layer norm."""
    for leaf in ("weight", "bias"):
        yield f"{path}.{leaf}", "norm", (size,)


def _linear(path: str, rows: Size, columns: Size, *, has_bias: bool = False) -> Iterator[Named]:
    yield f"{path}.weight", "attention", (rows, columns)
    if has_bias:
        yield f"{path}.bias", "attention", (rows,)
