"""The step's batch reaches every layer: an adapter for some of a batch's sequences changes only their rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pagewick.kernels import cpu
from pagewick.layers.context import BatchRows, LayerBatch
from pagewick.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from pagewick.layers.experts import ExpertWeights
from pagewick.layers.linear import Linear
from pagewick.layers.moe import Router
from pagewick.models.decoder import Decoder
from pagewick.quantization.method import Storage
from pagewick.quantization.unquantized import UnquantizedMethod
from tests.layers.ranks import single_context
from tests.models.answers import make_prompts
from tests.models.by_hand import build, logits_of, make_batch, make_checkpoint

PROMPTS = make_prompts((5, 1, 19))
ADAPTED = 2  # the sequence that has the adapter


class Adapter:
    """A low-rank change of a Linear for the rows of one sequence, as a layer of a real adapter makes it."""

    def __init__(self, layer: Linear, seed: int) -> None:
        share, generator = layer.share, torch.Generator().manual_seed(seed)
        self.down = torch.randn(2, share.num_columns, generator=generator) * 0.1
        self.up = torch.randn(share.num_rows, 2, generator=generator) * 0.3
        layer.register_forward_hook(self)

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, LayerBatch], given: Tensor) -> Tensor:
        x, batch = inputs
        first, last = batch.cu_seqlens_q[ADAPTED : ADAPTED + 2].tolist()
        changed = given.clone()
        changed[first:last] += x[first:last] @ self.down.t() @ self.up.t()
        return changed


def linears(model: Decoder) -> list[tuple[str, Linear]]:
    return [
        (name, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, Linear) and not isinstance(layer, VocabParallelHead)
    ]


@pytest.mark.skipif(cpu.library() is None, reason="needs the native library: make install")
@pytest.mark.parametrize("name", ["llama", "gemma-2", "starcoder", "qwen2-moe", "deepseek-v2"])
def test_an_adapter_changes_the_rows_of_its_sequence(name: str, tmp_path: Path) -> None:
    """Other sequences keep their bits; those of the adapter match a model with the change merged into its weights."""
    config, tensors = make_checkpoint(name, tmp_path)
    plain = build(single_context(), config, tensors)
    expected = logits_of(plain, PROMPTS)
    adapted, merged = build(single_context(), config, tensors), build(single_context(), config, tensors)
    for seed, ((_, layer), (_, changed)) in enumerate(zip(linears(adapted), linears(merged), strict=True)):
        adapter = Adapter(layer, seed)
        (storage,) = changed.weight.storages
        assert isinstance(storage, Storage)
        UnquantizedMethod().load(storage, "weight", changed.weight.unpack() + adapter.up @ adapter.down, out_offset=0)
    found, whole = logits_of(adapted, PROMPTS), logits_of(merged, PROMPTS)
    first = sum(map(len, PROMPTS[:ADAPTED]))
    assert torch.equal(found[:first], expected[:first])
    torch.testing.assert_close(found[first:], whole[first:], rtol=0, atol=2e-3)
    assert (found[first:] - expected[first:]).abs().amax(-1).min() > 0.1


@pytest.mark.parametrize("name", ["llama", "starcoder", "gemma-2", "phi-2", "qwen2-moe", "deepseek-v2", "deepseek-v3"])
def test_every_layer_is_given_the_batch(name: str, tmp_path: Path) -> None:
    config, tensors = make_checkpoint(name, tmp_path)
    model = build(single_context(), config, tensors)
    seen: dict[str, Any] = {}

    def remember(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            seen[name] = inputs[-1]

        return hook

    wanted = []
    for path, layer in model.named_modules():
        if isinstance(layer, Linear | Router | ExpertWeights) and not isinstance(layer, VocabParallelHead):
            layer.register_forward_pre_hook(remember(path))
            wanted.append(path)
    batch = make_batch(model, PROMPTS)
    with torch.inference_mode():
        model(batch)
    assert len(wanted) >= 4 and sorted(seen) == sorted(wanted)
    assert all(given is batch for given in seen.values())


@pytest.mark.parametrize("name", ["llama", "llama-bias-tied"])
def test_the_head_is_told_whose_rows_it_gets(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors = make_checkpoint(name, tmp_path)
    model = build(single_context(), config, tensors)
    kind = VocabParallelEmbedding if model.lm_head is None else VocabParallelHead
    seen, logits = [], kind.logits

    def remember(layer: Any, hidden_states: Tensor, batch: LayerBatch | None = None) -> Tensor:
        seen.append(batch)
        return logits(layer, hidden_states, batch)

    monkeypatch.setattr(kind, "logits", remember)
    rows = BatchRows([2, 0, 1], torch.device("cpu"))
    model.compute_logits(torch.zeros(3, model.model.norm.weight.shape[0]), rows)
    model.compute_logits(torch.zeros(3, model.model.norm.weight.shape[0]))
    assert seen == [rows, None]
    assert rows.cu_seqlens_q.tolist() == [0, 2, 2, 3] and rows.cu_seqlens_q.dtype == torch.int32
