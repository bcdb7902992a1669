"""The benchmarks for GPUs, dry: every line runs on a CPU with small models, and no figure means anything."""

from __future__ import annotations

import ast
import json
import logging
import os
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import pagewick.vllm_rs
from benchmarks import gpu, gpu_serving
from benchmarks.gpu_models import FORMATS, SHAPES, Place, RandomSource
from benchmarks.gpu_parts import PARTS
from benchmarks.gpu_serving import Sizes
from pagewick.models.registry import read_config
from pagewick.quantization.ggml import dequantize

DRY = Place("cpu", is_dry=True)


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(gpu.main, [str(argument) for argument in arguments])


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pagewick's own module with vllm.rs's names stands in for it."""
    monkeypatch.setitem(sys.modules, "vllm_rs", pagewick.vllm_rs)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# One item of each kind in every run; all of them with PAGEWICK_DEEP=1.
SAMPLE = {
    "kernels": ["Qwen3-30B-A3B q4_k", "Llama-3.1-8B fp8"],
    "agreement": ["auto"],
    "responses": ["graphs in flight"],
    "decode-8b": ["Llama-3.1-8B int4-g128"],
    "prompts": ["Qwen3-0.6B"],
    "serving": ["Qwen3-0.6B"],
    "peers": ["transformers Qwen3-0.6B", "vllm.rs Qwen3-0.6B"],
}


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize(("part", "item"), [(part, item) for part, items in SAMPLE.items() for item in items])
def test_a_dry_run_of_every_kind(part: str, item: str, tmp_path: Path) -> None:
    done = call("--part", part, "--item", item, "--dry-run", "--out", tmp_path)
    assert done.exception is None, done.output
    result = json.loads(gpu.result_file(tmp_path, part, item).read_text())
    assert (result["part"], result["item"]) == (part, item)
    figures = result["figures"]
    assert figures and "skipped" not in figures
    assert all(isinstance(value, str) or value > 0 for value in figures.values())
    # A few tokens of the dry run may differ by a close runner-up.
    assert figures.get("verdict", "agrees") == "agrees" or figures["equal argmaxes"] > 0.8
    shown = call("--show", "--out", tmp_path)
    assert f"| {part} | {item} | {next(iter(figures))} |" in shown.output


@pytest.mark.usefixtures("peers")
def test_all_parts(tmp_path: Path) -> None:
    if os.environ.get("PAGEWICK_DEEP") != "1":
        pytest.skip("takes minutes; PAGEWICK_DEEP=1")
    done = call("--part", "all", "--dry-run", "--in-process", "--out", tmp_path)
    assert done.exception is None
    assert len(list(tmp_path.glob("*.json"))) == sum(len(items) for items in PARTS.values())


def test_items_are_resumed_and_parts_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []

    def run(place: Place, name: str) -> dict[str, float | str]:
        runs.append(name)
        return {"figure": 1234.5}

    monkeypatch.setattr(gpu, "PARTS", {"p": {name: (run, {"name": name}) for name in ("a", "b c")}})
    arguments = ["--part", "p", "--dry-run", "--in-process", "--out", str(tmp_path)]
    assert "no time is left; run the part again" in call(*arguments, "--seconds", "0").output
    assert runs == []
    gpu.write(tmp_path, "p", "a", {"figure": 1.0})
    output = call(*arguments).output
    assert runs == ["b c"] and "p, a: done before" in output
    assert "| p | a | figure | 1 | none |" in output and "| p | b c | figure | 1,234 | none |" in output
    call(*arguments, "--again")
    assert runs == ["b c", "a", "b c"]


def test_an_item_is_a_process_that_ends_with_its_part(tmp_path: Path) -> None:
    assert "ended after 0 s" in gpu._run_apart(DRY, "decode-small", "Qwen3-0.6B bf16", tmp_path, 0.01)
    problem = gpu._run_apart(DRY, "decode-small", "none", tmp_path, 300)
    assert problem.startswith("failed (status 1): Error: --item none is none of one --part")
    assert "--item none" in (tmp_path / "decode-small-none.log").read_text()


def test_an_item_that_fails_costs_no_other_item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[str, float]] = []
    broken = {"a"}

    def run_apart(place: Place, part: str, item: str, out: Path, seconds: float) -> str:
        limits.append((item, seconds))
        if item in broken:
            return "failed (signal 11): Segmentation | fault; p-a.log has more"
        gpu.write(out, part, item, {"figure": 5.0})
        return ""

    monkeypatch.setattr(gpu, "PARTS", {"p": dict.fromkeys(("a", "b", "c"), (gpu.run_item, {}))})
    monkeypatch.setattr(gpu, "_run_apart", run_apart)
    done = call("--part", "p", "--dry-run", "--out", tmp_path, "--seconds", "100")
    assert done.exit_code == 1 and [item for item, _ in limits] == ["a", "b", "c"]
    # The last item may use what is left.
    assert limits[0][1] == limits[1][1] == 50 and limits[2][1] > 99
    assert "| p | a | no result | failed (signal 11): Segmentation / fault; p-a.log has more | |" in done.output
    assert "| p | c | figure | 5 |" in done.output
    # Items that have never run come before those that have failed.
    limits.clear()
    broken.clear()
    gpu.result_file(tmp_path, "p", "c").unlink()
    done = call("--part", "p", "--dry-run", "--out", tmp_path)
    assert done.exit_code == 0 and [item for item, _ in limits] == ["c", "a"] and "no result" not in done.output


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("", "it said nothing"),
        ("Traceback:\n  raise ValueError\npagewick.errors.ConfigError: no GPU\n  pagewick doctor says why\n",
         "pagewick.errors.ConfigError: no GPU pagewick doctor says why"),
        ("KeyError: 3\n\nDuring handling:\nRuntimeError: two\nA note.\n", "RuntimeError: two A note."),
        ("warning\nSegmentation fault\n", "Segmentation fault"),
        ("RuntimeError: " + 1000 * "x", ("RuntimeError: " + 1000 * "x")[:400]),
    ],
    ids=["nothing", "traceback", "two", "no exception", "long"],
)  # fmt: skip
def test_the_reason_of_a_failure_is_its_last_exception(said: str, reason: str) -> None:
    assert gpu.reason_in(said) == reason


def test_torchs_threads_are_set_up_before_it_is_imported() -> None:
    """Otherwise idle threads spin, and the parts that the CPU computes for comparison take many times as long."""
    nodes = ast.parse(Path(gpu.__file__).read_text(encoding="utf-8")).body
    names = [node.names[0].name if isinstance(node, ast.Import) else str(node.module)
             for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]  # fmt: skip
    assert names.index("pagewick") < min(names.index("torch"), names.index("benchmarks.gpu_models"))


def test_warnings_are_figures() -> None:
    def run(place: Place) -> gpu.Figures:
        for number in (1, 2, 1):
            logging.getLogger("pagewick.engine").warning("no graphs: %d", number)
        logging.getLogger("pagewick.engine").info("ready")
        return {"figure": 5.0}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "PARTS", {"p": {"a": (run, {}), "b": (lambda place: {"figure": 5.0}, {})}})
        assert gpu.run_item(DRY, "p", "a") == {"figure": 5.0, "warnings": "no graphs: 1; no graphs: 2"}
        assert gpu.run_item(DRY, "p", "b") == {"figure": 5.0}


def test_an_exception_in_this_process_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(place: Place) -> gpu.Figures:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(gpu, "PARTS", {"p": {"a": (run, {}), "b": (lambda place: {"figure": 5.0}, {})}})
    done = call("--part", "p", "--dry-run", "--in-process", "--out", tmp_path)
    assert done.exit_code == 1 and "| p | a | no result | failed: RuntimeError: no kernel image | |" in done.output
    assert "| p | b | figure | 5 |" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--part", "x"], "there is no part x; there are kernels, "), (["--part", "prompts", "--item", "x"], "--item x"),
     ([], "give --part, --list or --show")],
)  # fmt: skip
def test_mistakes(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = call(*arguments, "--out", tmp_path)
    assert done.exit_code == 1 and message in done.output


def test_parts_are_those_that_are_wanted() -> None:
    assert call("--list").output.count("\n") == len(PARTS) == 9
    assert [*PARTS["prompts"]][2:] == [f"Llama-3.1-8B fp8{how}" for how in ("", " fp8", " fp8 rows")]
    assert len(PARTS["decode-small"]) == len(PARTS["decode-8b"]) == len(FORMATS) == 5
    assert Sizes().prompts == (512, 8192) and Sizes().num_requests == 256 and Sizes().request_tokens == (100, 1024)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_their_known_number_of_weights(name: str) -> None:
    source = RandomSource(SHAPES[name], None, "cpu")
    count = sum(torch.Size(source.shape(one)).numel() for one in source.names())
    assert count / 1e9 == pytest.approx({"Qwen3-0.6B": 0.596, "Llama-3.1-8B": 8.03, "Qwen3-30B-A3B": 30.53}[name], 5e-3)
    active = {"Qwen3-0.6B": 0.596, "Llama-3.1-8B": 7.50, "Qwen3-30B-A3B": 3.04}[name]
    assert source.bytes_in_step() / 2e9 == pytest.approx(active, rel=2e-2)


def row_scales_of(rows: torch.Tensor) -> torch.Tensor:
    """The scales of each group of rows of fp8_g128."""
    return rows.unflatten(1, (-1, 132))[..., :4].contiguous().view(torch.float32).squeeze(-1)


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "bf16"])
def test_quantized_weights_are_numbers_of_a_known_size(form: str) -> None:
    source, kind = RandomSource(DRY.shape("Llama-3.1-8B"), FORMATS[form], "cpu"), FORMATS[form]
    assert kind is not None
    name = "model.layers.0.mlp.up_proj.weight"
    rows = source.get(name)
    assert (rows.dtype, tuple(rows.shape), source.stored_type(name)) == (torch.uint8, source.shape(name), kind)
    numbers = dequantize(kind, rows, 256)
    assert float(numbers.std()) == pytest.approx(256**-0.5, rel=0.05) and bool(numbers.isfinite().all())
    assert source.stored_type("model.embed_tokens.weight") == torch.bfloat16
    if form == "fp8":
        assert row_scales_of(rows).unique(dim=1).shape[1] == 2
        uniform = RandomSource(DRY.shape("Llama-3.1-8B"), FORMATS[form], "cpu", has_row_scales=True).get(name)
        assert row_scales_of(uniform).unique(dim=1).shape[1] == 1
        assert float(dequantize(kind, uniform, 256).std()) == pytest.approx(256**-0.5, rel=0.05)
    assert read_config(source.config()).num_layers == 2 and gpu_serving.median([1, 5, 2]) == 2
