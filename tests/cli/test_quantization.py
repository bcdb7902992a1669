"""--quantization on the command line: the line at the start, what `pagewick models` shows, and doctor's plan."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pagewick.cli import cli
from pagewick.cli.serve import announce
from pagewick.config import BUILTIN_MODEL
from pagewick.demo import MODEL_DIR
from pagewick.engine.model_info import ModelInfo
from pagewick.quantization.plan import plan_quantization
from pagewick.server.run import ReadyServer
from pagewick.weights.opening import open_source
from pagewick.weights.progress import Progress
from pagewick.weights.quantized_cache import QuantizedCache
from pagewick.weights.quantized_source import quantized_once
from tests.quantization.test_plan import Model
from tests.weights.gguf.random_models import write_random


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Caches of the test's own."""
    for name in ("XDG_CACHE_HOME", "HF_HOME", "MODELSCOPE_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "home"


def run(*arguments: str, text: str | None = None) -> Result:
    return CliRunner().invoke(cli, arguments, input=text)


def keep(model: Path, mix: str) -> None:
    """Do what the first start of a model does."""
    with open_source(model) as source:
        names = [name for name in source.names() if "layers.0.mlp" in name]
        plan = plan_quantization(mix, {name: source.shape(name) for name in names}, {}, Model())
        assert quantized_once(model, source, plan, QuantizedCache.of(os.environ), Progress()) is not None


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A checkpoint of the user's."""
    return write_random(tmp_path / "own.gguf", "dense", "F32")


def listed() -> list[tuple[str, str, list[str]]]:
    return [(one["model"], one["hub"], one["revisions"]) for one in json.loads(run("models", "list", "--json").stdout)]


def test_models_shows_the_weights_that_are_kept_and_removes_them(own: Path) -> None:
    for model, mix in ((own, "q8_0"), (MODEL_DIR, "q4_k"), (MODEL_DIR, "q8_0")):
        keep(model, mix)
    assert listed() == [
        (str(own), "quantized", ["q8_0"]),
        (BUILTIN_MODEL, "quantized", ["q4_k"]),
        (BUILTIN_MODEL, "quantized", ["q8_0"]),
    ]
    shown = run("models", "list").stdout
    assert f"{own} (quantized, q8_0)" in shown and f"{BUILTIN_MODEL} (quantized, q4_k)" in shown
    result = run("models", "remove", str(own), "--yes")
    assert (result.exit_code, "were freed" in result.stdout) == (0, True)
    assert own.exists()
    assert {model for model, _, _ in listed()} == {BUILTIN_MODEL}
    assert run("models", "remove", BUILTIN_MODEL, text="y\n").exit_code == 0
    assert listed() == []
    result = run("models", "remove", BUILTIN_MODEL, "--yes")
    assert result.exit_code == 1 and "is a part of Pagewick" in result.output


def test_a_download_goes_with_its_quantized_weights_or_without(home: Path) -> None:
    snapshot = home / "hub/models--someone--own/snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("a" * 40)
    for file in MODEL_DIR.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    keep(snapshot, "q8_0")
    assert {(model, hub) for model, hub, _ in listed()} == {
        ("someone/own", "huggingface"),
        ("someone/own", "quantized"),
    }
    assert run("models", "remove", "someone/own", "--quantized", "--yes").exit_code == 0
    assert {hub for _, hub, _ in listed()} == {"huggingface"}
    result = run("models", "remove", "someone/own", "--quantized", "--yes")
    assert "no quantized weights of someone/own are kept" in result.output
    keep(snapshot, "q8_0")
    assert run("models", "remove", "someone/own", "--yes").exit_code == 0
    assert listed() == []


def plan(*arguments: str) -> dict[str, Any]:
    result = run("doctor", *arguments, "--json")
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("flag", ["--quantization", "--isq", "--quant", "-q"])
def test_doctor_plans_with_quantized_weights(flag: str) -> None:
    plain, quantized = (plan(BUILTIN_MODEL, *given) for given in ((), (flag, "q4k")))
    assert plain["stored_bytes"] == quantized["stored_bytes"]
    # 4.5 bits, and 6.6 in the tied head, instead of 16.
    assert 0.28 < quantized["plan"]["weights"] / plain["plan"]["weights"] < 0.42
    assert quantized["command"].endswith("--quantization q4_k")
    assert (plain["quantization"], quantized["quantization"]) == (None, "q4_k")
    assert "weights quantized to q4_k" in run("doctor", BUILTIN_MODEL, flag, "q4k").stdout


def test_doctor_chooses_what_fits_and_says_why() -> None:
    found = plan(BUILTIN_MODEL, "--quantization", "auto")
    assert "--quantization" not in found["command"]
    needed = {mix: plan(BUILTIN_MODEL, "-q", mix)["plan"]["weights"] for mix in ("q6_k", "q8_0")}
    memory = f"{int((needed['q6_k'] + needed['q8_0']) / 2 / 0.75)}B"
    found = plan(BUILTIN_MODEL, "-q", "auto", "--memory", memory)
    (reason,) = (finding["text"] for finding in found["findings"] if finding["subject"] == "quantization")
    assert re.fullmatch(
        r"auto is q6_k: [\d.]+ MiB are free, of which weights may take [\d.]+ MiB; they take [\d.]+ MiB in bfloat16, "
        r"[\d.]+ MiB in q8_0, [\d.]+ MiB in q6_k",
        reason,
    )
    assert found["plan"]["weights"] == needed["q6_k"]


def test_doctor_names_what_is_wrong(tmp_path: Path) -> None:
    blocks = write_random(tmp_path / "blocks.gguf", "dense", "Q8_0")
    for arguments, words in (
        ((str(blocks), "-q", "q4k"), "quantized already (Q8_0)"),
        ((BUILTIN_MODEL, "-q", "awq"), "pagewick-demo holds safetensors that are not quantized"),
        ((BUILTIN_MODEL, "-q", "auto", "--gpus", "8xH100"), "with --gpus, name a format"),
        (("-q", "q4k"), "plans for a model, and no model is named"),
    ):
        result = run("doctor", *arguments)
        assert words in f"{result.output} {result.exception}", arguments


def test_the_line_at_the_start_names_the_formats(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = dict.fromkeys(
        ("vocab_size", "embedding_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size",
         "num_kv_blocks", "kv_cache_bytes", "num_parameters", "tensor_parallel_size"), 1,
    )  # fmt: skip
    for weights, shown in (
        ("Q4_K and Q6_K", "weights in Q4_K and Q6_K, bfloat16 on cpu"),
        ("bfloat16", " parameters, bfloat16 on cpu"),
    ):
        info = ModelInfo(
            model_path="m", architecture="A", dtype="bfloat16", device="cpu", kernels="k", weights=weights, **sizes
        )
        announce("m", ReadyServer("http://x", info, needs_key=False, has_chat_template=True))
        assert shown in capsys.readouterr().out
