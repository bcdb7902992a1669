"""Tensors that files stack, fuse or split in several ways: a checkpoint is the same in all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pagewick.models.registry import read_config
from pagewick.weights.gguf.source import GgufSource
from tests.weights.gguf.mixes import Numbers, rewrite
from tests.weights.gguf.models import original, write_file

Change = Callable[[str, Numbers], Iterator[tuple[str, Numbers, str]]]


def separate_experts(name: str, numbers: Numbers) -> Iterator[tuple[str, Numbers, str]]:
    """A tensor for each expert, as in the first files of Mixtral."""
    if "_exps." not in name:
        yield name, numbers, "F32"
        return
    for expert, rows in enumerate(numbers):
        yield name.replace("_exps.", f".{expert}."), rows, "F32"


class Joined:
    """Joins tensors of a layer: the parts, in the order of the result, and the name of the result in their place."""

    def __init__(self, *parts: str, to: str, axis: int = 0) -> None:
        self._parts, self._to, self._axis = parts, to, axis
        self._kept: dict[str, Numbers] = {}

    def __call__(self, name: str, numbers: Numbers) -> Iterator[tuple[str, Numbers, str]]:
        layer, _, rest = name.rpartition("blk.")[2].partition(".")
        stem, _, leaf = rest.partition(".")
        if stem not in self._parts:
            yield name, numbers, "F32"
            return
        self._kept[stem] = self.prepared(stem, numbers)
        if len(self._kept) == len(self._parts):
            joined = np.concatenate([self._kept[part] for part in self._parts], axis=self._axis)
            self._kept.clear()
            yield f"blk.{layer}.{self._to}.{leaf}", self.finished(joined), "F32"

    def prepared(self, stem: str, numbers: Numbers) -> Numbers:
        return numbers

    def finished(self, joined: Numbers) -> Numbers:
        return joined


class JoinedLatents(Joined):
    """attn_kv_b as a whole, as in files from before llama.cpp absorbed it."""

    def __init__(self) -> None:
        super().__init__("attn_k_b", "attn_v_b", to="attn_kv_b", axis=1)

    def prepared(self, stem: str, numbers: Numbers) -> Numbers:
        return numbers.swapaxes(1, 2) if stem == "attn_k_b" else numbers

    def finished(self, joined: Numbers) -> Numbers:
        return joined.reshape(-1, joined.shape[-1])


class JoinedByKeyHead(Joined):
    """ssm_in, which has each key head's query, key, values and gates, as in the first files of Qwen3-Next."""

    def __init__(self, num_heads: int, key_dim: int) -> None:
        super().__init__("attn_qkv", "attn_gate", to="ssm_in")
        self._num_heads, self._key_dim = num_heads, key_dim

    def finished(self, joined: Numbers) -> Numbers:
        keys = self._num_heads * self._key_dim
        values = (len(joined) - 2 * keys) // 2
        parts = np.split(joined, [keys, 2 * keys, 2 * keys + values])
        heads = [part.reshape(self._num_heads, -1, joined.shape[1]) for part in parts]
        return np.concatenate(heads, axis=1).reshape(joined.shape)


def test_the_first_files_of_qwen3_next(tmp_path: Path) -> None:
    """They have in_proj_qkvz as the checkpoint has it."""
    weights = original("qwen3-next").state_dict()
    heads = JoinedByKeyHead(3, 8)

    def change(name: str, numbers: Numbers) -> Iterator[tuple[str, Numbers, str]]:
        has_values = name.startswith("blk.3.")  # The queries, keys and values of attention.
        yield from [(name, numbers, "F32")] if has_values else heads(name, numbers)

    path = rewrite(write_file("qwen3-next", tmp_path), tmp_path / "other.gguf", change)
    with GgufSource(path) as source:
        names = [name for name in source.names() if "linear_attn" in name]
        assert sum("in_proj_qkvz" in name for name in names) == 3
        for name in names:
            assert torch.allclose(source.get(name), weights[name], rtol=1e-6, atol=0), name
        state = read_config(source.config()).layers[0].state
    assert state is not None and state.is_fused and state.has_fused_gates


def without_gates(name: str, numbers: Numbers) -> Iterator[tuple[str, Numbers, str]]:
    if "ffn_gate_exps" not in name:
        yield name, numbers, "F32"


def test_experts_without_gates(tmp_path: Path) -> None:
    path = write_file("qwen3-moe", tmp_path)
    other = rewrite(path, tmp_path / "other.gguf", without_gates)
    with GgufSource(path) as whole, GgufSource(other) as found:
        names = [name for name in whole.names() if "experts" not in name or "gate_proj" not in name]
        assert len(names) < len(whole.names()) and sorted(found.names()) == sorted(names)
        assert found.config() == whole.config()
        for name in names:
            assert torch.equal(found.get(name), whole.get(name)), name


def vector_of_biases(name: str, numbers: Numbers) -> Iterator[tuple[str, Numbers, str]]:
    """ERNIE's biases without their first dimension, as llama.cpp's own programs store them."""
    yield name, numbers.reshape(-1) if name.endswith("exp_probs_b.bias") else numbers, "F32"


def test_biases_of_experts_are_a_row(tmp_path: Path) -> None:
    path = write_file("ernie-4.5-moe", tmp_path)
    other = rewrite(path, tmp_path / "other.gguf", vector_of_biases)
    with GgufSource(path) as expected, GgufSource(other) as found:
        name = "model.layers.1.mlp.moe_statics.e_score_correction_bias"
        assert found.shape(name) == expected.shape(name) == (1, 4)
        assert torch.equal(found.get(name), expected.get(name))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mixtral", separate_experts),
        ("deepseek-v2-lite", JoinedLatents()),
        ("deepseek-v3", JoinedLatents()),
        ("llama3-rope", Joined("attn_q", "attn_k", "attn_v", to="attn_qkv")),
        ("qwen3-moe", Joined("ffn_gate_exps", "ffn_up_exps", to="ffn_gate_up_exps", axis=1)),
    ],
)
def test_other_layouts_hold_the_same_checkpoint(name: str, change: Change, tmp_path: Path) -> None:
    path = write_file(name, tmp_path)
    other = rewrite(path, tmp_path / "other.gguf", change)
    with GgufSource(path) as expected, GgufSource(other) as found:
        assert {one.name for one in found.checkpoint.tensors} != {one.name for one in expected.checkpoint.tensors}
        assert sorted(found.names()) == sorted(expected.names())
        assert read_config(found.config()) == read_config(expected.config())
        for tensor_name in expected.names():
            assert torch.equal(found.get(tensor_name), expected.get(tensor_name)), tensor_name
