"""Expressions of checkpoints and adapters match as Python's `re` does, and never take long."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from pagewick.errors import ModelLoadError
from pagewick.weights.lora.reading import read_adapter
from pagewick.weights.name_patterns import PatternError, Place, matcher_of
from tests.weights.lora.convert import FILES

NAMES = [
    "model.layers.1.self_attn.q_proj", "model.layers.12.self_attn.k_proj", "model.layers.1.mlp.down_proj", "q_proj",
    "model.layers.1.mlp.xq_proj", "lm_head", "model.layers.1.mlp.experts.3.up_proj", "modelxlayers", "é.q$", "a|b", "",
]  # fmt: skip


PATTERNS = [
    # Published adapters and checkpoints have these.
    "q_proj", "self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers", r"model\.layers\.1\.mlp\.\w+",
    r".*\.(q|k)_proj", r"^model\.layers\.([0-9]|1[0-9])\..*$", "^q_proj$", ".*lm_head", ".*mlp.gate$", ".*self_attn.*",
    r".*\.(?:1[0-5])\..*", r".*\.12\..*(?:up|down|k).*", "-:.*down.*", r".*\bself_attn\..*",
    r".*experts\.\d+\.up_proj$",
    r"^(?!mtp\.).*layers\.\d+\.mlp.*_proj$", r"(?!(?:lm_head|q_proj)$)(?:.*_proj|lm_head)", r"(?!.*experts).*proj",
    r"^(?!model\.layers\.1\.mlp\.experts(?:\.|$)).*", r"^(?!.*experts).*$", r"(?!.*(?:mtp|model)\.\d+\.).*_proj$",
    # No known checkpoint has these.
    "q_proj|lm_head", "^q_proj|^lm_head$", "^(q_proj|lm_head)$", r"[|]?q_proj", r"a\|b", r"a[|]b", r"q\$", r"q[$]",
    ".*", "^.*$", ".*head", r"layers\.\d+\.mlp\..*", "(?:up|down)_proj", r"layers\.(?P<n>1|2)\.mlp\.[^d]+.{3}", "",
    "^$", "é.+", r"experts\.\d{1,2}\.up_proj", "a{2", "(?i)LM_HEAD", "(?i:[^L]M_)", r"(^|\.)q_proj$",
    r"(?:^|l)m_head\Z", r"\w+?\b.", r"\S\s",
    r"\Blm|q\B", r"(?=lm|q)\w*(?<x>_)?".replace("?<", "?P<"), "[^a-y]", r"[\W\d]", "(?s:.)q", "(?!)", "(l|q)?$",
    "(?:x?y?)*q", "^^a$$", "a^b", "(?:$)?q", "(m$|q){0,1}", ".*.*.*proj",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_names_that_match(pattern: str) -> None:
    found = {
        Place.START: lambda name: re.match(pattern, name),
        Place.ANYWHERE: lambda name: re.search(pattern, name),
        Place.END: lambda name: re.fullmatch(rf"(.*\.)?({pattern})", name),
    }
    if "(?i)" in pattern:
        del found[Place.END]  # Such a flag may only be the first there.
    for place, find in found.items():
        matches = matcher_of(pattern, place)
        for name in NAMES * 2:
            assert matches(name) is (find(name) is not None), (name, place)


ATOMS = ["a", "b", ".", "[ab]", "[^a]", r"\.", r"\w", r"\W", "1", "^", "$", r"\b", r"\B", r"\Z"]


@settings(max_examples=10_000 if os.environ.get("PAGEWICK_DEEP") else 100)
@given(
    st.recursive(
        st.sampled_from(ATOMS),
        lambda inner: st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map("(?:{0[0]}|{0[1]})".format),
            st.tuples(st.sampled_from(ATOMS[:9]), st.sampled_from(["*", "+?", "{1,2}"])).map("".join),
            st.tuples(inner, st.sampled_from(["?", "??", "{1}"])).map("({0[0]}){0[1]}".format),
            inner.map("(?={})".format),
            inner.map("(?!{})".format),
        ),
        max_leaves=8,
    ),
    st.lists(st.text("ab.1\n", min_size=1, max_size=6), min_size=8, max_size=8),
)
def test_other_expressions_match_as_well_or_are_refused(pattern: str, names: list[str]) -> None:
    for place, find in ((Place.START, re.match), (Place.ANYWHERE, re.search)):
        try:
            matches = matcher_of(pattern, place)
        except PatternError as error:
            assert ("repeats an anchor" in str(error) and "{1}" in pattern) or "*" in pattern
            continue
        for name in names:
            assert matches(name) is (find(pattern, name) is not None), (name, place)


@pytest.mark.parametrize("place", Place)
@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|a)*b", "(a|aa)+$", "((a*)*)*b", "a?" * 60 + "a" * 60 + "b", ".*" * 30 + "b", "(.*a){25}b"]
)
def test_no_name_takes_long(pattern: str, place: Place) -> None:
    """Each would take `re` longer than anyone waits."""
    matches = matcher_of(pattern, place)
    assert not matches("a" * 200 + "c")
    assert matches("a" * 60 + ("" if pattern.endswith("$") else "b"))


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(", "is no regular expression .missing"), ("a)", "is no"), ("[", "is no"), ("*a", "is no"),
        (r"(a)\1", "has references"), ("a++", "possessive"), ("(?>a|b)c", "atomic"),
        ("(a)?(?(1)b|c)", "has references"),
        ("(?<!b)a", "looks behind"), ("(?:^a)*", "repeats an anchor"),
        ("(?m)^a", "has flags"), ("(?a:a)", "has flags"),
        ("a" * 10_000 + "b", "is too complex"), ("(" * 4000 + ")" * 4000, "is too complex"),
        ("a{1,99999999999}", "is too complex"),
    ],
)  # fmt: skip
def test_what_is_refused(pattern: str, words: str) -> None:
    with pytest.raises(PatternError, match=words):
        matcher_of(pattern, Place.START)


def test_what_is_too_complex_is_refused() -> None:
    with pytest.raises(PatternError, match=r"^is too complex a regular expression$"):
        matcher_of("(a{1,1000}){1,1000}b", Place.START)("a" * 300)


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [("(a+)+$", None), ("(?<=a)", "looks behind"), ("(a{1,1000}){1,1000}b", "is too complex")],
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
