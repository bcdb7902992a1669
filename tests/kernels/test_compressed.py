"""Compressed entries, attention to them, streams of hyper-connections and root scores: as transformers has them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4Config, HYV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek_v4
from transformers.models.hy_v4.modeling_hy_v4 import HYV4HyperConnection

from pagewick.expert_routing import Routing
from pagewick.kernels import reference
from pagewick.kernels.options import (
    AttentionMetadata,
    CompressOptions,
    Entries,
    HyperOptions,
    Rotation,
    ScoreOptions,
    SelectedKeys,
    StreamWeights,
)
from pagewick.kernels.recorded_steps import RecordedStep, StepMemory, record
from tests.kernels.conftest import NativeKernels

DIM, HIDDEN, BLOCK = 10, 14, 12
KINDS = {4: "compressed_sparse_attention", 6: "heavily_compressed_attention"}
CONFIG = DeepseekV4Config(
    hidden_size=HIDDEN, head_dim=DIM, num_attention_heads=6, partial_rotary_factor=0.4, q_lora_rank=8, o_groups=2,
    o_lora_rank=6, index_head_dim=6, index_n_heads=3, index_topk=3, sliding_window=7, num_hidden_layers=2, hc_mult=3,
    hc_sinkhorn_iters=3, hc_eps=1e-3, compress_rates={kind: ratio for ratio, kind in KINDS.items()},
    compress_rope_theta=50.0, rms_norm_eps=1e-3, n_routed_experts=9, num_experts_per_tok=4, routed_scaling_factor=1.3,
    layer_types=[KINDS[4], KINDS[6]], vocab_size=11,
)  # fmt: skip


class SelectsNothing(torch.nn.Module):
    def forward(self, *_: object) -> Tensor:
        return torch.zeros(2, 37, 1, dtype=torch.long)


@dataclass
class Cached:
    """Two sequences in blocks of another order, of which the rows of `ratio` tokens make an entry."""

    ratio: int
    rows: Tensor
    entries: Tensor

    def __init__(self, ratio: int, row_size: int) -> None:
        self.ratio = ratio
        self.rows = torch.full((9, BLOCK, row_size), float("nan"))
        self.entries = torch.full((9, BLOCK // ratio, DIM), float("nan"))
        self.tables = torch.tensor([[7, 2, 5, 1], [3, 8, 4, 0]], dtype=torch.int32)

    def slots(self, seq: int, positions: Tensor) -> Tensor:
        return self.tables[seq][positions // BLOCK].long() * BLOCK + positions % BLOCK

    def metadata(self, firsts: list[int], counts: list[int]) -> AttentionMetadata:
        starts = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)
        lengths = torch.tensor(firsts) + torch.tensor(counts)
        return AttentionMetadata(self.tables, lengths.int(), starts)

    def entries_of(self, seq: int, number: int) -> Tensor:
        per_block = BLOCK // self.ratio
        indices = torch.arange(number)
        return self.entries[self.tables[seq][indices // per_block].long(), indices % per_block]


def random_module(module: Any) -> Any:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in (*module.parameters(), *module.buffers()):
            if parameter.is_floating_point():
                parameter.normal_()
    return module


def rotation_at(positions: Tensor, turned: int = 4) -> Rotation:
    """Angles of whole vectors, of which all but the last pairs stand still."""
    frequencies = 1.0 / 50.0 ** (torch.arange(0, turned, 2) / turned)
    angles = torch.cat((torch.zeros(len(positions), (DIM - turned) // 2), positions[:, None] * frequencies), dim=-1)
    return Rotation(angles.cos(), angles.sin(), interleaved=True)


@pytest.mark.parametrize("ratio", KINDS)
@pytest.mark.parametrize("step", [1, 5, 37])
def test_entries_however_a_prompt_is_cut(operations: Any, ratio: int, step: int) -> None:
    overlaps = ratio == 4
    module_type = deepseek_v4.DeepseekV4CSACompressor if overlaps else deepseek_v4.DeepseekV4HCACompressor
    module = module_type(CONFIG)
    # The module's rotary embedding keeps its frequencies.
    for part in (module.kv_proj, module.gate_proj, module.kv_norm):
        random_module(part)
    module.position_bias.data.normal_()
    hidden = torch.randn(2, 37, HIDDEN)
    positions = torch.arange(37)
    if overlaps:
        module.indexer = SelectsNothing()
    with torch.no_grad():
        expected = module(hidden, None, positions.expand(2, -1), None, 0)[0].squeeze(1)
        rows = torch.cat((module.kv_proj(hidden), module.gate_proj(hidden)), dim=-1)
    options = CompressOptions(ratio, overlaps, module.position_bias.data, module.kv_norm.weight.data, 1e-3)
    cached = Cached(ratio, rows.shape[-1])
    for first in range(0, 37, step):
        new = positions[first : first + step]
        slots = torch.cat([cached.slots(seq, new) for seq in range(2)])
        operations.compress_rows(
            rows[:, new].flatten(0, 1), cached.rows, slots, cached.metadata([first] * 2, [len(new)] * 2),
            cached.entries, slots, rotation=rotation_at((new - ratio + 1).clamp(min=0).repeat(2)), options=options,
        )  # fmt: skip
    for seq in range(2):
        found = cached.entries_of(seq, 37 // ratio)
        torch.testing.assert_close(found, expected[seq], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_selective", [False, True])
def test_one_softmax_over_a_window_and_entries(operations: Any, is_selective: bool) -> None:
    torch.manual_seed(5)
    ratio, window, counts, lengths = 4, 7, [5, 1], [23, 2]
    cached = Cached(ratio, DIM)
    cached.rows.normal_()
    cached.entries.normal_()
    firsts = [length - count for length, count in zip(lengths, counts, strict=True)]
    q, sinks = torch.randn(6, 6, DIM), torch.randn(6)
    slots, seen = torch.full((6, 3), 99, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    chosen = {2: [1, 4], 4: [0, 2, 3]}
    for token, indices in chosen.items():
        slots[token, : len(indices)] = (cached.slots(0, torch.tensor(indices) * ratio) // ratio).int()
        seen[token] = len(indices)
    selected = SelectedKeys(slots, seen, torch.arange(7, dtype=torch.int32)) if is_selective else None
    found = operations.window_attention(
        q, cached.rows, cached.metadata(firsts, counts), ScoreOptions(0.3, window, sinks=sinks),
        Entries(cached.entries, cached.tables, ratio, selected),
    )  # fmt: skip
    owner = SimpleNamespace(num_key_value_groups=6, sinks=sinks, training=False)
    for token in range(6):
        seq, position = (0, firsts[0] + token) if token < 5 else (1, 1)
        block_ids = cached.slots(seq, torch.arange(max(0, position - window + 1), position + 1))
        entries = cached.entries_of(seq, (position + 1) // ratio)
        keys = torch.cat((
            cached.rows.flatten(0, 1)[block_ids], entries[chosen.get(token, [])] if is_selective else entries
        ))  # fmt: skip
        query, keys = q[token, :, None][None], keys[None, None]
        expected, _ = deepseek_v4.eager_attention_forward(owner, query, keys, keys, None, scaling=0.3)
        torch.testing.assert_close(found[token], expected[0, 0], atol=1e-5, rtol=1e-5)


def test_bits_do_not_depend_on_the_batch(operations: Any) -> None:
    torch.manual_seed(6)
    cached = Cached(4, DIM)
    cached.rows.normal_()
    q, scores = torch.randn(19, 6, DIM), ScoreOptions(0.3, 7, sinks=torch.randn(6))
    whole = operations.window_attention(q, cached.rows, cached.metadata([3, 0], [16, 3]), scores)
    alone = cached.metadata([3, 0], [11, 0])
    part = operations.window_attention(q[:11].clone(), cached.rows, alone, scores)
    assert torch.equal(part, whole[:11])


def test_streams_that_keep_what_they_have(operations: Any) -> None:
    """As Hy4 has them."""
    config = HYV4Config(hidden_size=HIDDEN, hc_mult=3, hc_eps=1e-3, hc_magnitude=1.7, rms_norm_eps=1e-3)
    module = random_module(HYV4HyperConnection(config))
    streams, output = torch.randn(7, 3, HIDDEN), torch.randn(7, HIDDEN)
    with torch.no_grad():
        post, collapsed = (each[0] for each in module(streams[None]))
        options = HyperOptions(module.base, module.scale, 0, 1e-3, 1e-3, 1.7)
        weights = operations.stream_weights(streams.flatten(1) @ module.fn.t(), streams, options)
    assert weights.mixing is None
    torch.testing.assert_close(operations.collapse_streams(streams, weights.before), collapsed, atol=1e-5, rtol=1e-5)
    expected = post.unsqueeze(-1) * output.unsqueeze(1) + streams
    torch.testing.assert_close(operations.expand_streams(streams, output, weights), expected, atol=1e-5, rtol=1e-5)


def test_streams(operations: Any) -> None:
    module = random_module(deepseek_v4.DeepseekV4HyperConnection(CONFIG))
    head = random_module(deepseek_v4.DeepseekV4HyperHead(CONFIG))
    streams, output = torch.randn(7, 3, HIDDEN), torch.randn(7, HIDDEN)
    with torch.no_grad():
        post, comb, collapsed = (each[0] for each in module(streams[None]))
        mixed = post.unsqueeze(-1) * output.unsqueeze(1) + comb.transpose(-1, -2) @ streams
        merged = head(streams[None])[0]
        options = HyperOptions(module.base, module.scale, 3, 1e-3, 1e-3)
        weights = operations.stream_weights(streams.flatten(1) @ module.fn.t(), streams, options)
        of_head = HyperOptions(head.hc_base, head.hc_scale, 3, 1e-3, 1e-3)
        sums = operations.stream_weights(streams.flatten(1) @ head.hc_fn.t(), streams, of_head)
        assert sums.after is None and sums.mixing is None
        close = torch.testing.assert_close
        close(operations.collapse_streams(streams, weights.before), collapsed, atol=1e-5, rtol=1e-5)
        close(operations.expand_streams(streams, output, weights), mixed, atol=1e-5, rtol=1e-5)
        close(operations.collapse_streams(streams, sums.before), merged, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("has_table", [False, True])
def test_root_scores(operations: Any, has_table: bool) -> None:
    router_type = deepseek_v4.DeepseekV4HashRouter if has_table else deepseek_v4.DeepseekV4TopKRouter
    router = random_module(router_type(CONFIG))
    hidden, token_ids = 3 * torch.randn(1, 13, HIDDEN), torch.arange(13) % 11
    choice = getattr(router, "e_score_correction_bias", None)
    if has_table:
        router.tid2eid.copy_(torch.rand(11, 9).argsort(-1)[:, :4])
        # An expert that a token names twice counts twice.
        router.tid2eid[5, 2] = router.tid2eid[5, 0]
        choice = router.tid2eid[token_ids]
    assert choice is not None
    with torch.no_grad():
        logits, weights, ids = router(hidden, token_ids[None]) if has_table else router(hidden)
    routed = operations.root_logits(logits, choice, 4)
    found_ids, found_weights = operations.route(routed, Routing(top_k=4, renormalize=True, scaling=1.3))
    dense = torch.zeros(13, 9)
    expected = dense.clone().scatter_add_(1, ids, weights)
    torch.testing.assert_close(dense.scatter_add_(1, found_ids.long(), found_weights), expected, atol=1e-6, rtol=1e-5)


def test_logits_far_below_0_still_have_shares(operations: Any) -> None:
    logits = torch.tensor([[-200.0, -202.0, 3.0]])
    _, weights = operations.route(
        operations.root_logits(logits, torch.tensor([[0, 1]]), 2), Routing(top_k=2, renormalize=True)
    )
    # The scores are powers of e, half of whose difference is left.
    torch.testing.assert_close(weights, torch.tensor([[0.0, -1.0]]).softmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 37, 1001])
def test_sums_of_streams_have_the_bits_of_the_definition(native: NativeKernels, dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(8)
    streams, output = torch.randn(5, 4, size).to(dtype), torch.randn(5, 2 * size).to(dtype)[:, size:]
    weights = StreamWeights(torch.randn(5, 4), torch.randn(5, 4), torch.randn(5, 4, 4))
    for name, args in (
        ("collapse_streams", (streams, weights.before)), ("expand_streams", (streams, output, weights)),
        ("expand_streams", (streams, output, weights._replace(mixing=None))),
    ):  # fmt: skip
        found, expected = getattr(native, name)(*args), getattr(reference, name)(*args)
        assert found.dtype == dtype and torch.equal(found, expected), name
    assert torch.equal(native.widen(streams), streams.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_heads_of_which_some_pairs_stand_still(native: NativeKernels, dtype: torch.dtype) -> None:
    torch.manual_seed(12)
    x = torch.randn(23, 5 * 18).to(dtype)[:, 18:].view(23, 4, 18)
    angles = torch.randn(23, 9)
    angles[:, :5] = 0
    for cos, sin, interleaved in (
        (angles.cos(), angles.sin(), True), (angles.cos()[:, 4:], angles.sin()[:, 4:], False),
    ):  # fmt: skip
        rotation = Rotation(cos, sin, interleaved)
        assert torch.equal(native.rotate_heads(x, rotation), reference.rotate_heads(x, rotation))


def test_angles_of_earlier_positions(operations: Any) -> None:
    frequencies, positions = torch.tensor([1.0, 0.01, 0.0]), torch.tensor([0, 2, 3, 4, 700])
    found = operations.rotary_angles(positions, frequencies, 1.5, shift=-3)
    expected = reference.rotary_angles(torch.tensor([0, 0, 0, 1, 697]), frequencies, 1.5)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-7, rtol=0)


@pytest.mark.parametrize("ratio", [1, 4])
def test_entries_that_an_indexer_selects(native: NativeKernels, ratio: int) -> None:
    torch.manual_seed(9)
    cached = Cached(ratio, DIM)
    cached.entries.normal_()
    q, weights = torch.randn(26, 3, DIM), torch.randn(26, 3)
    args = (q, weights, cached.entries, cached.metadata([0, 18], [6, 20]), cached.tables.flip(1))
    options = {"ratio": ratio, "rotation": rotation_at(torch.arange(26)), "top_k": 3}
    found, expected = native.select_keys(*args, **options), reference.select_keys(*args, **options)
    assert torch.equal(found.counts, expected.counts)
    assert found.counts.tolist()[:6] == [min(3, (position + 1) // ratio) for position in range(6)]
    numbers = native.select_keys(*args[:4], None, **options)
    assert torch.equal(numbers.counts, found.counts)
    for token, count in enumerate(found.counts):
        assert torch.equal(found.slots[token, :count], expected.slots[token, :count])
        own = numbers.slots[token, :count]
        table = args[4][int(token >= 6)]
        places = BLOCK // ratio
        assert torch.equal(table[own // places] * places + own % places, found.slots[token, :count])


def test_wide_rows_and_many_keys(native: NativeKernels) -> None:
    """More keys than are reduced together, more heads than vectors, and caches of 16 bits."""
    torch.manual_seed(10)
    lengths, counts, heads, dim = [700, 9], [3, 2], 33, 70
    tables = torch.randperm(60).view(2, 30).int()
    metadata = AttentionMetadata(tables, torch.tensor(lengths).int(), torch.tensor([0, 3, 5], dtype=torch.int32))
    scores = ScoreOptions(0.1, 290, sinks=torch.randn(heads))
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
        q = torch.randn(sum(counts), heads, dim).to(dtype)
        keys, entries = torch.randn(60, 24, dim).to(dtype), Entries(torch.randn(60, 6, dim).to(dtype), tables, 4)
        found = native.window_attention(q, keys, metadata, scores, entries)
        expected = reference.window_attention(q, keys, metadata, scores, entries)
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
        native.set_num_threads(3)
        assert torch.equal(native.window_attention(q, keys, metadata, scores, entries), found)
        native.set_num_threads(1)


def test_numbers_that_contradict_each_other(native: NativeKernels) -> None:
    cached = Cached(4, DIM)
    q, scores, metadata = (
        torch.randn(6, 2, DIM),
        ScoreOptions(0.3, 7, sinks=torch.randn(2)),
        cached.metadata([1, 0], [5, 1]),
    )
    with pytest.raises(ValueError, match="contradict"):
        native.window_attention(q[:5], cached.rows, metadata, scores)
    with pytest.raises(ValueError, match="outside the caches"):
        native.window_attention(q, cached.rows[:3], metadata, scores)
    with pytest.raises(ValueError, match="sinks"):
        native.window_attention(q, cached.rows, metadata, ScoreOptions(0.3, 7, sinks=torch.randn(3)))
    with pytest.raises(IndexError, match="outside 0"):
        native.root_logits(torch.randn(1, 9), torch.tensor([[3, 9]]), 2)
    with pytest.raises(ValueError, match="does not fit"):
        native.root_logits(torch.randn(1, 9), torch.randn(8), 2)
    options = CompressOptions(4, False, torch.randn(4, DIM), torch.randn(DIM), 1e-3)
    slots = torch.full((6,), 9 * BLOCK)
    with pytest.raises(IndexError, match="outside the caches"):
        native.compress_rows(
            torch.randn(6, 2 * DIM), torch.zeros(9, BLOCK, 2 * DIM), slots, metadata, cached.entries, slots,
            rotation=rotation_at(torch.arange(6)), options=options,
        )  # fmt: skip


def test_a_layer_is_recorded(native: NativeKernels) -> None:
    """All operations of a layer with entries, of which a repetition reads other numbers."""
    torch.manual_seed(11)
    cached = Cached(4, 4 * DIM)
    keys, index_keys = torch.randn(9, BLOCK, DIM), torch.randn(9, BLOCK // 4, DIM)
    cached.rows.normal_()
    cached.entries.normal_()
    options = CompressOptions(4, True, torch.randn(4, 2 * DIM), torch.randn(DIM), 1e-3)
    hyper = HyperOptions(torch.randn(15), torch.randn(3), 3, 1e-3, 1e-3)
    streams, products, rows = torch.randn(2, 3, 6 * DIM), torch.randn(2, 15), torch.randn(2, 4 * DIM)
    metadata, scores = cached.metadata([19, 7], [1, 1]), ScoreOptions(0.3, 7, sinks=torch.randn(6))
    slots = torch.stack([cached.slots(0, torch.tensor(19)), cached.slots(1, torch.tensor(7))])
    rotation, index_weights, bias = rotation_at(torch.tensor([16, 4])), torch.randn(2, 6), torch.randn(6 * DIM)

    def layer() -> list[Tensor]:
        weights = native.stream_weights(products, streams, hyper)
        q = native.rotate_heads(native.collapse_streams(streams, weights.before).view(2, 6, DIM), rotation)
        native.compress_rows(
            rows, cached.rows, slots, metadata, cached.entries, slots, rotation=rotation, options=options
        )
        selected = native.select_keys(
            q, index_weights, index_keys, metadata, cached.tables, ratio=4, rotation=rotation, top_k=2
        )
        attended = native.window_attention(
            q, keys, metadata, scores, Entries(cached.entries, cached.tables, 4, selected)
        )
        expanded = native.expand_streams(streams, attended.flatten(1), weights)
        return [expanded, native.root_logits(expanded[:, 0], bias, 5)]

    recorded, step = record(layer, StepMemory())
    assert isinstance(step, RecordedStep), step
    before = [result.clone() for result in recorded]
    for changed in (streams, products, rows):
        changed.normal_()
    expected = [result.clone() for result in layer()]
    cached.entries.flatten(0, 1)[slots // 4] = torch.nan
    step.replay()
    for result, wanted, old in zip(recorded, expected, before, strict=True):
        assert torch.equal(result, wanted) and not torch.equal(result, old)
