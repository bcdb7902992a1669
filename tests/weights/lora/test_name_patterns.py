"""Expressions of adapters match as Python's `re` does, as PEFT uses it, and never take long."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pagewick.errors import ModelLoadError
from pagewick.weights.lora.name_patterns import PatternError, matcher_of
from pagewick.weights.lora.reading import read_adapter
from tests.weights.lora.convert import FILES

NAMES = [
    "model.layers.1.self_attn.q_proj", "model.layers.12.self_attn.k_proj", "model.layers.1.mlp.down_proj", "q_proj",
    "model.layers.1.mlp.xq_proj", "lm_head", "model.layers.1.mlp.experts.3.up_proj", "modelxlayers", "é.q$", "a|b", "",
]  # fmt: skip


@pytest.mark.parametrize(
    "pattern",
    [
        "q_proj", "self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers", r"model\.layers\.1\.mlp\.\w+",
        r".*\.(q|k)_proj", r"^model\.layers\.([0-9]|1[0-9])\..*$", "^q_proj$", "q_proj|lm_head", "^q_proj|^lm_head$",
        "^(q_proj|lm_head)$", r"[|]?q_proj", r"a\|b", r"a[|]b", r"q\$", r"q[$]", ".*", "^.*$", ".*head",
        r"layers\.\d+\.mlp\..*", "(?:up|down)_proj", r"layers\.(?P<n>1|2)\.mlp\.[^d]+.{3}",
        r"experts\.\d{1,2}\.up_proj", "", "^$", "é.+",
    ],
)  # fmt: skip
def test_names_that_match(pattern: str) -> None:
    matches = matcher_of(pattern)
    for name in NAMES * 2:
        assert matches(name) is (re.fullmatch(rf"(.*\.)?({pattern})", name) is not None), name


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|a)*b", "(a|aa)+$", "((a*)*)*b", "a?" * 60 + "a" * 60 + "b", ".*" * 30 + "b", "(.*a){25}b"]
)
def test_no_name_takes_long(pattern: str) -> None:
    """Each would take `re` longer than anyone waits."""
    matches = matcher_of(pattern)
    assert not matches("a" * 200 + "c")
    assert matches("a" * 60 + ("" if pattern.endswith("$") else "b"))


@pytest.mark.parametrize("pattern", ["(", "a)", "[", "*a", r"(a)\1", "(?=a)a", "(?<!b)a", "a{2", "a" * 999 + "*."])
def test_what_is_refused(pattern: str) -> None:
    with pytest.raises(PatternError, match=r"^is (no|too complex a) regular expression"):
        matcher_of(pattern)


def test_what_is_too_complex_is_refused() -> None:
    with pytest.raises(PatternError, match=r"^is too complex a regular expression$"):
        matcher_of("(a{1,1000}){1,1000}b")("a" * 300)


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [("(a+)+$", None), ("(?=a)", "is no regular expression"), ("(a{1,1000}){1,1000}b", "is too complex")],
)
def test_an_adapter_that_would_take_for_ever(pattern: str, complaint: str | None, tmp_path: Path) -> None:
    config = json.loads((FILES / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "alpha_pattern": {pattern: 1}}))
    name = "base_model.model." + "a" * 300 + "c"
    save_file(
        {f"{name}.lora_A.weight": torch.ones(2, 3), f"{name}.lora_B.weight": torch.ones(5, 2)},
        tmp_path / "adapter_model.safetensors",
    )
    if complaint is None:
        assert read_adapter(tmp_path, 0, 0).max_rank == 2
        return
    with pytest.raises(ModelLoadError, match=rf"in alpha_pattern {complaint}.*\n  give the names of the modules"):
        read_adapter(tmp_path, 0, 0)
