"""Models do not depend on the format or the device of their weights, and the decoder does not depend on a model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pagewick.models.registry import ARCHITECTURES
from tests.architecture.source import ROOT, name_of

FOLDER = ROOT / "pagewick" / "models"
FILES = sorted(FOLDER.glob("*.py"))
# Files that serve all families.
GENERAL = ("config.py", "decoder.py", "blocks.py", "entries.py", "reading.py")
STORAGE = re.compile(
    r"(?i)gguf|ggml|safetensors|quantiz|gptq|\bawq\b|marlin|fp8|int8|int4|\bcuda\b|\bcpu\b|\bmps\b|\.to\(|device"
)
# The modules of families, whose names are those of the families: qwen, deepseek.
FAMILIES = {target.partition(":")[0].rpartition(".")[2] for target in ARCHITECTURES.values()}
MODELS = re.compile(rf"(?i)\b({'|'.join(sorted(FAMILIES))}|mixtral|bigcode|yi|qwq)(?![a-z])")


def lines_with(pattern: re.Pattern[str], path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if pattern.search(line)]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_models_know_no_format_no_quantization_and_no_device(path: Path) -> None:
    allowed = "They never mention a file format, a quantization or a device."
    assert [line for line in lines_with(STORAGE, path) if allowed not in line] == []


@pytest.mark.parametrize("name", GENERAL)
def test_files_for_all_families_name_none(name: str) -> None:
    # An example in an error's text has to name some architecture.
    assert [line for line in lines_with(MODELS, FOLDER / name) if '"architectures": [' not in line] == []


def test_the_patterns_find_what_they_look_for() -> None:
    assert all(STORAGE.search(text) for text in ("a GGUF file", "x.to(y)", "on CUDA", "quantized", "an FP8 weight"))
    assert all(MODELS.search(text) for text in ("as Qwen3 does", "Gemma's norm", "deepseek_v2", "Mixtral"))
    assert not MODELS.search("a philosophy") and not STORAGE.search("deviate")


def test_every_family_file_begins_with_what_differs() -> None:
    for name in FAMILIES:
        text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
        assert text.startswith('"""') and len(text.partition('"""')[2].partition('"""')[0]) > 60, name
