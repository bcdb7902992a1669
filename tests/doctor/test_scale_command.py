"""`pagewick doctor MODEL --gpus`, as it is called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pagewick.cli import cli
from pagewick.config import BUILTIN_MODEL
from pagewick.doctor import model as model_module
from pagewick.doctor.plan import MAX_NUM_SEQS
from pagewick.doctor.support import Verdict
from tests.doctor.test_model import tiny_gguf

QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 100, "num_experts": 16,
    "num_experts_per_tok": 4, "moe_intermediate_size": 32, "torch_dtype": "bfloat16", "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the engine ran every model."""
    monkeypatch.setattr(model_module, "verdict_of", lambda *given: Verdict(True))


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return str(tmp_path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["doctor", *arguments])


def test_text(model: str) -> None:
    result = run(model, "--gpus", "4xL4", "--num-experts-offload-per-rank", "2")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "8 of 16 experts of each layer in host memory" in result.stdout
    assert len(result.stdout.splitlines()) <= 30


def test_every_flag_is_heard(model: str) -> None:
    kind = ("--gpus", "2xMine:3GiB:7GB:5GB:6GB", "--nodes", "2", "--network-bandwidth", "4GB/s")
    wishes = ("--max-model-len", "77", "--max-num-seqs", "3", "--dtype", "fp32", "--kv-cache-dtype", "bf16")
    found = json.loads(run(model, *kind, *wishes, "--num-experts-offload-per-rank", "1", "--json").stdout)
    scale = found["scale"]
    assert scale["cluster"] == {
        "kind": {
            "name": "Mine", "memory": 3 * 2**30, "bandwidth": 7 * 10**9, "host_link": 5 * 10**9,
            "gpu_link": 6 * 10**9, "network": 4 * 10**9,
        },
        "num_gpus": 2, "num_nodes": 2,
    }  # fmt: skip
    assert (scale["num_ranks"], scale["num_offloaded"], found["plan"]["context"]) == (4, 4, 77)
    assert [step["num_sequences"] for step in scale["steps"]] == [1, 3]
    assert found["plan"]["kv_bytes_per_token"] == 2 * 2 * 16 * 2  # a head of 8 takes 16, in 16 bits
    costs = {cost["name"]: cost for cost in scale["steps"][0]["costs"]}
    assert costs["vocabulary head"]["num_bytes"] == 100 * 64 * 4 / 4  # in 32 bits


def test_what_is_left_open(model: str) -> None:
    found = json.loads(run(model, "--gpus", "H100", "--json").stdout)
    scale = found["scale"]
    assert (scale["num_offloaded"], found["plan"]["context"]) == (0, 2048)
    assert [step["num_sequences"] for step in scale["steps"]] == [1, MAX_NUM_SEQS]


def test_a_model_that_is_here() -> None:
    result = run(BUILTIN_MODEL, "--gpus", "2xT4")
    assert result.exit_code == 0
    assert "tokens per second, at most" in result.stdout and "config.json" not in result.stdout


def test_what_does_not_fit_is_status_1(model: str) -> None:
    result = run(model, "--gpus", "Tiny:100MiB:1GB")
    assert result.exit_code == 1
    assert "are needed, and 100 MiB are free" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--nodes", "2"], 2, "--nodes goes with --gpus"),
        (["--gpus", "8xA100"], 1, "near: "),
        (["--gpus", "3xH100"], 1, "smaller: 1, 2"),
        (["--gpus", "H100", "--memory", "1GiB"], 2, "and so does --memory"),
        (["--gpus", "H100", "--device", "cpu"], 2, "and so does --device"),
        (["--gpus", "H100", "--network-bandwidth", "fast"], 1, "'fast' is not a bandwidth"),
        (["--gpus", "H100", "--network-bandwidth", "1GB"], 2, "between nodes"),
        (["--gpus", "H100", "--num-experts-offload-per-rank", "13"], 1, "at most 12"),
        (["--gpus", "H100", "--max-model-len", "2049"], 1, "longer than the model's context"),
        (["--gpus", "2xH100", "--tensor-parallel-size", "1"], 1, "is not the 2 GPUs"),
    ],
)
def test_mistakes(model: str, arguments: list[str], status: int, words: str) -> None:
    result = run(model, *arguments)
    assert result.exit_code == status
    assert words in result.stderr
    assert len(result.stderr.splitlines()) <= 6


@pytest.mark.parametrize(
    "flags",
    [
        ("--gpus", "8xH100"),
        ("--max-num-seqs", "2"),
        ("--memory", "8GiB"),
        ("--dtype", "fp16"),
        ("--device", "cpu"),
    ],
)
def test_plans_without_a_model(flags: tuple[str, str]) -> None:
    result = run(*flags)
    assert result.exit_code == 2
    assert result.stderr.startswith(
        f"Error: {flags[0]} plans for a model, and no model is named; for example: pagewick "
    )


def test_variables_that_are_meant_for_serve_are_no_mistake(model: str) -> None:
    variables = {
        "PAGEWICK_MAX_MODEL_LEN": "64", "PAGEWICK_NUM_EXPERTS_OFFLOAD_PER_RANK": "1", "PAGEWICK_DEVICE": "cpu",
        "PAGEWICK_TENSOR_PARALLEL_SIZE": "1",
    }  # fmt: skip
    for arguments in ([], [BUILTIN_MODEL], [model, "--gpus", "H100"]):
        result = CliRunner().invoke(cli, ["doctor", *arguments], env=variables)
        assert result.stderr == "" and result.stdout


class TestModelsThatCannotBePlanned:
    """The first line is about the model, not about --gpus."""

    def test_another_architecture(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()
        Path(model, "config.json").write_text(json.dumps({**QWEN, "architectures": ["Mamba9ForCausalLM"]}))
        result = run(model, "--gpus", "8xH100")
        assert (result.exit_code, result.stderr) == (1, "")
        assert result.stdout.startswith(f"{model}: Mamba9ForCausalLM; Pagewick does not run it\n")
        assert "Mamba9ForCausalLM is not supported yet" in result.stdout

    @pytest.mark.parametrize(
        ("text", "words"),
        [("{", "is not valid JSON"), ("[]", "does not hold a JSON object"), (None, "it has no config.json")],
    )
    def test_files_that_cannot_be_read(self, text: str | None, words: str, model: str) -> None:
        path = Path(model, "config.json")
        path.unlink() if text is None else path.write_text(text)
        result = run(model, "--gpus", "8xH100")
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith("error: ") and words in result.stderr.splitlines()[0]

    def test_a_directory_in_place_of_the_file(self, model: str) -> None:
        Path(model, "config.json").unlink()
        Path(model, "config.json").mkdir()
        result = run(model, "--gpus", "8xH100")
        assert result.exit_code == 1 and result.stderr.startswith(f"error: cannot read {model}/config.json")

    def test_a_gguf_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()
        path = tmp_path / "tiny.gguf"
        path.write_bytes(tiny_gguf())
        first, *_ = run(str(path), "--gpus", "2xL4").stdout.splitlines()
        assert first == f"{path}: LlamaForCausalLM; fits on 2 x L4, but 2 ranks would cut weights inside a block"
        result = run(str(path), "--gpus", "1xL4")
        first, *_ = result.stdout.splitlines()
        assert first == f"{path}: LlamaForCausalLM; fits on 1 x L4; planned, not run"
        assert result.exit_code == 0 and "tokens per second, at most" in result.stdout
