"""`pagewick quantize`: the command, and the file that it leaves or does not leave."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from pagewick.cli import cli
from pagewick.cli.quantize import model_name
from pagewick.demo import MODEL_DIR
from pagewick.llm import LLM
from pagewick.sampling_params import SamplingParams
from pagewick.weights.description import describe
from pagewick.weights.gguf import writing
from pagewick.weights.gguf.checkpoint import open_gguf
from pagewick.weights.gguf.export import Export
from pagewick.weights.progress import Progress
from tests.weights.modules import modules, write_files
from tests.weights.packed.writers import gptq


def quantize(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["quantize", *map(str, arguments), "--num-threads", "1"])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_built_in_model(place: Path) -> None:
    result = quantize("pagewick-demo", "--to", "Q8_0")
    assert result.exit_code == 0 and "pagewick-demo-Q8_0.gguf: 5.4 MB; tensors: 36 Q8_0, 21 F32" in result.stdout
    assert "writing pagewick-demo-Q8_0.gguf: 100%" in result.stderr
    path = place / "pagewick-demo-Q8_0.gguf"
    assert list(place.iterdir()) == [path] and open_gguf(path).values["general.name"] == "pagewick-demo"
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()
    with LLM(str(path), num_threads=1, max_model_len=256) as llm:
        question = [{"role": "user", "content": "What is Pagewick?"}]
        (answer,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=12))
        assert "Pagewick" in answer.outputs[0].text


def test_a_checkpoint_that_is_quantized_already_is_quantized_again_from_its_numbers(place: Path) -> None:
    shutil.copytree(MODEL_DIR, place / "gptq")
    path, packed, meant = place / "gptq" / "model.safetensors", {}, {}
    for name, tensor in load_file(path).items():
        packed[name] = meant[name] = tensor
        if "_proj" in name:
            parts, meant[name] = gptq(group_size=32, desc_act=True)(
                name.removesuffix(".weight"), packed.pop(name).float()
            )
            # AutoGPTQ gave a bias of zeros to every weight.
            packed |= {**parts, name.replace(".weight", ".bias"): tensor.new_zeros(len(tensor))}
    save_file({name: tensor.contiguous() for name, tensor in packed.items()}, path)
    config = json.loads((MODEL_DIR / "config.json").read_text())
    rules = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    (place / "gptq" / "config.json").write_text(json.dumps({**config, "quantization_config": rules}))
    result = quantize("gptq", "--to", "q8_0", "-o", "packed.gguf")
    assert result.exit_code == 0, result.output
    assert (
        "note: gptq is quantized already, as GPTQ int4 g32 act-order: its weights are rounded again\n" in result.stderr
    )
    (place / "gptq" / "config.json").write_text(json.dumps(config))
    save_file(meant, path)
    assert quantize("gptq", "--to", "q8_0", "-o", "plain.gguf").exit_code == 0
    assert (place / "packed.gguf").read_bytes() == (place / "plain.gguf").read_bytes()


def test_a_head_of_its_own_that_config_json_ties_is_not_dropped(place: Path) -> None:
    shutil.copytree(MODEL_DIR, place / "model")
    path = place / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path)
    assert quantize("model", "--to", "q8_0", "-o", "tied.gguf").exit_code == 0
    tensors["lm_head.weight"][-1] = 0
    save_file(tensors, path)
    result = quantize("model", "--to", "q8_0", "-o", "own.gguf")
    assert result.exit_code == 1 and "lm_head.weight differs from model.embed_tokens.weight" in result.stderr
    assert not (place / "own.gguf").exists()


@pytest.mark.parametrize(("mode", "pooling"), [("mean", "mean"), ("lasttoken", "last")])
def test_the_files_of_sentence_transformers_become_a_key(mode: str, pooling: str, place: Path) -> None:
    shutil.copytree(MODEL_DIR, place / "model")
    listed = {"modules.json": modules(["Transformer", "Pooling"]), "1_Pooling/config.json": {"pooling_mode": mode}}
    write_files(place / "model", listed)
    result = quantize("model", "--to", "q8_0", "-o", "m.gguf")
    assert result.exit_code == 0, result.output
    assert describe(place / "m.gguf").config["embedding_pooling"] == pooling


def test_a_model_that_does_not_sample_by_default_stays_so(place: Path) -> None:
    """A GGUF file has no do_sample, so the temperature says it."""
    shutil.copytree(MODEL_DIR, place / "model")
    advice = {"do_sample": False, "temperature": 0.6, "top_p": 0.9}
    (place / "model" / "generation_config.json").write_text(json.dumps(advice))
    assert quantize("model", "--to", "q8_0", "-o", "m.gguf").exit_code == 0
    values = open_gguf(place / "m.gguf").values
    assert (values["general.sampling.temp"], values["general.sampling.top_p"]) == (0, pytest.approx(0.9))


def umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def test_a_file_that_exists_is_kept_unless_forced(place: Path) -> None:
    path = place / "m.gguf"
    path.write_bytes(b"mine")
    result = quantize("pagewick-demo", "--to", "q8_0", "-o", path)
    assert result.exit_code == 1
    assert result.stderr == f"error: {path} exists already\n  choose another place, or replace it with --force\n"
    assert path.read_bytes() == b"mine"
    assert quantize("pagewick-demo", "--to", "q8_0", "-o", path, "--force").exit_code == 0
    assert len(open_gguf(path).tensors) == 57 and list(place.iterdir()) == [path]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["pagewick-demo", "--to", "q9"],
            "error: q9 is no type that can be written\n  choose from: f32, f16, bf16, q4_0",
        ),
        (["pagewick-demo", "-o", "no/m.gguf"], "the directory no does not exist"),
        (["pagewick-demo", "-o", "."], "is a directory\n  give the name of a file in it: model.gguf"),
        (["nowhere/", "-o", "m.gguf"], "nowhere"),
        (["pagewick-demo", "--imatrix", "no.gguf", "-o", "m.gguf"], "cannot read no.gguf: No such file"),
    ],
)
def test_mistakes(arguments: list[str], complaint: str, place: Path) -> None:
    result = quantize(*arguments)
    assert result.exit_code == 1 and complaint in result.stderr and len(result.stderr.splitlines()) <= 6
    assert list(place.iterdir()) == []


def test_the_model_itself_is_not_overwritten(place: Path) -> None:
    path = place / "m.gguf"
    assert quantize("pagewick-demo", "--to", "f16", "-o", path).exit_code == 0
    before = path.read_bytes()
    result = quantize(path, "--to", "f32", "-o", path, "--force")
    assert result.exit_code == 1 and "m.gguf is the model itself" in result.stderr and path.read_bytes() == before
    assert "is quantized already" not in quantize(path, "--to", "q4_0", "-o", place / "q.gguf").output


def test_a_full_disk_is_noticed_before_the_work(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda path: usage(10, 10, 1000))
    result = quantize("pagewick-demo", "-o", "m.gguf")
    assert result.exit_code == 1 and "m.gguf needs 3.3 MB, and 1.0 kB are free on its disk" in result.stderr
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("command", ["quantize", "imatrix"])
def test_a_place_that_cannot_be_written_is_noticed_before_the_work(
    command: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "notes.txt").write_text("too short, which is found out later")
    monkeypatch.setattr(writing.os, "access", lambda path, mode: (path, mode) != (Path("there"), os.W_OK))
    (place / "there").mkdir()
    more = ["--text", "notes.txt"] if command == "imatrix" else []
    result = CliRunner().invoke(cli, [command, "pagewick-demo", "-o", "there/m.gguf", *more])
    assert result.exit_code == 1
    assert result.stderr == "error: there cannot be written\n  make it writable, or choose another place\n"


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_file_that_is_not_finished_leaves_nothing(
    failure: BaseException, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def fail(self: Export, tensor: object, file: object, progress: Progress) -> None:
        seen.append([entry.name for entry in place.iterdir()])
        raise failure

    monkeypatch.setattr(Export, "_write_tensor", fail)
    result = quantize("pagewick-demo", "-o", "m.gguf")
    assert result.exit_code == 1 and list(place.iterdir()) == []
    assert seen[0][0].startswith(".m.gguf.") and seen[0][0].endswith(".unfinished")
    if isinstance(failure, OSError):
        assert "cannot write m.gguf: No space left on device\n  free space, or choose" in result.stderr


def test_a_signal_to_terminate_leaves_nothing(place: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from pagewick.weights.gguf.export import Export\n"
        "Export._write_tensor = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\n"
        "from pagewick.cli import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", program, "quantize", "pagewick-demo", "-o", "m.gguf"]
    result = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    assert result.returncode not in (0, -signal.SIGTERM) and "Traceback" not in result.stderr
    assert list(place.iterdir()) == []


def test_help_names_every_type() -> None:
    from pagewick.weights.gguf.export import TYPES

    text = CliRunner().invoke(cli, ["quantize", "--help"]).output
    words = re.findall(r"\w+", text)
    assert set(TYPES) <= set(words)


def test_names_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").mkdir()
    assert model_name("pagewick-demo") == "pagewick-demo"
    assert model_name("Qwen/Qwen3-0.6B") == "Qwen3-0.6B"
    assert model_name("my-model/") == model_name("./my-model") == "my-model"
    assert model_name("a/b:Q8_0") == "b-Q8_0"
    assert model_name("x/m.gguf") == "m"
