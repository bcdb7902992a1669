"""The figures in README.md are those of `pagewick doctor` and of the recorded measurements."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.peers_report import rows_of
from pagewick.cli.random_model import SHAPES
from pagewick.demo import MODEL_DIR
from pagewick.doctor.checkpoint import Checkpoint
from pagewick.doctor.findings import format_memory
from pagewick.doctor.formats import count
from pagewick.doctor.plan import Device, Wishes, make_plan
from pagewick.doctor.rank_weights import weights_of_rank
from pagewick.doctor.report import format_count
from pagewick.doctor.stored import described_tensors
from pagewick.doctor.support import Verdict
from pagewick.models.registry import read_config
from pagewick.models.tensors import model_tensors
from pagewick.weights.progress import format_bytes
from tests.models.published import PUBLISHED
from tests.readme.blocks import ROOT, TEXT

CONTEXT = 8192
RESULTS = ROOT / "benchmarks/results"
# Name in README.md -> name of the published config.json.
MODELS = {
    "Qwen3-0.6B": "Qwen3-0.6B",
    "Llama 3.2 1B": "Llama-3.2-1B",
    "Llama 3.1 8B": "Meta-Llama-3.1-8B",
    "Gemma 3 12B": "gemma-3-12b-it",
    "Phi-4": "phi-4",
    "Qwen3-30B-A3B": "Qwen3-30B-A3B",
    "DeepSeek-R1": "DeepSeek-R1",
}
# Model -> the files with its decode rates.
MEASURED = {
    "Qwen3-0.6B": ("peers-qwen3-0.6b-decode.json", "peers-qwen3-0.6b-epyc-llama.cpp.json"),
    "qwen3-moe-1b": ("peers-qwen3-moe-1b.json",),
}
# Line of the table of ratios -> measurement, and the files for the two processors.
RATIOS = {
    "decode, one stream": ("decode 128 + 128", "decode.json", "epyc-llama.cpp.json"),
    "prompt of 512 tokens": ("prefill 512", "prefill.json", "epyc-vllm.json"),
    "16 streams": ("16 streams, 64 + 64", "streams.json", "epyc-vllm.json"),
}


def result(name: str) -> dict[str, Any]:
    found = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def decode_rate(name: str) -> str:
    rates = [
        rate["rates"]["pagewick"]
        for round_ in result(name)["rounds"]
        for rate in round_["rates"]
        if (rate["measurement"], rate["face"]) == ("decode 128 + 128", "HTTP")
    ]
    return f"{statistics.median(rates):.3g}"


def line_of(name: str, config: dict[str, Any]) -> str:
    """A line of the table, without its speed."""
    model = read_config(config)
    context = min(CONTEXT, model.max_position_embeddings)
    tensors = tuple(described_tensors(model, config))
    weights = weights_of_rank(model, Checkpoint(name, name, config, model, Verdict(True), tensors), 1).total
    plan = make_plan(model, lambda num_ranks: weights, Device("cpu", 2**42, 2**42), Wishes(max_model_len=context))
    memory = plan.needed - plan.reserve + plan.rows[-1].num_bytes
    stored = sum(tensor.num_bytes for tensor in tensors)
    rates = [decode_rate(file) for file in MEASURED.get(name, ())]
    cells = [name, format_count(count(list(model_tensors(model)))), format_bytes(stored), format_memory(memory)]
    return f"| {' | '.join(cells)} | {', '.join(rates) or '-'} |"


def config_of_shape(name: str) -> dict[str, Any]:
    """The entries of a random model's config.json that decide its size."""
    rest = {"torch_dtype": "bfloat16", "tie_word_embeddings": True, "max_position_embeddings": 32768}
    return {**asdict(SHAPES[name]), "architectures": [SHAPES[name].architecture], "norm_topk_prob": True, **rest}


@pytest.mark.parametrize("name", [*MODELS, "qwen3-moe-1b", "pagewick-demo"])
def test_sizes(name: str) -> None:
    if name == "pagewick-demo":
        config = json.loads((MODEL_DIR / "config.json").read_text(encoding="utf-8"))
    else:
        config = PUBLISHED[MODELS[name]] if name in MODELS else config_of_shape(name)
    line = line_of(name, config)
    assert line in TEXT.splitlines(), f"README.md should say\n{line}"


@pytest.mark.parametrize("name", RATIOS)
def test_ratios(name: str) -> None:
    measurement, *files = RATIOS[name]
    cells = []
    for file in files:
        (row,) = (
            row for row in rows_of(result(f"peers-qwen3-0.6b-{file}"))
            if (row.name, row.face) == (measurement, "HTTP")
        )  # fmt: skip
        assert row.best_peer is not None
        title = {"vllm": "vLLM"}.get(row.best_peer, row.best_peer)
        cells.append(f"{statistics.median(row.ratios(row.best_peer)):.2f} x {title}")
    assert f"| {name} | {' | '.join(cells)} |" in TEXT.splitlines()
