"""`pagewick convert`: the command, and the directory that it leaves or does not leave."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from pagewick.calibration.quantizing import quantize_layers
from pagewick.cli import cli
from pagewick.config import BUILTIN_MODEL, EngineConfig
from pagewick.demo import MODEL_DIR
from pagewick.engine.preflight import check_models
from pagewick.llm import LLM
from pagewick.quantization.calibrated.results import QuantizedLinear, Recipe
from pagewick.sampling_params import SamplingParams
from pagewick.weights import unfinished
from pagewick.weights.opening import open_source
from pagewick.weights.safetensors import SafetensorsSource
from pagewick.weights.unfinished import UnfinishedCheckpoint
from tests.models.encoders import write_encoder
from tests.models.predicting import Predicting
from tests.models.word_pieces import word_pieces, write_tokenizer
from tests.weights.modules import with_two_layers, write_files
from tests.weights.packed.harness import SIZES, write_packed
from tests.weights.packed.test_byte_formats import CASES
from tests.weights.packed.test_byte_models import writer
from tests.weights.packed.test_readers import AWQ, GPTQ
from tests.weights.packed.writers import awq, gptq

RTN = (BUILTIN_MODEL, "m", "--to", "gptq", "--method", "rtn")
TEXT = " ".join(f"The answer to question {number} is {number * number % 97}." for number in range(400))


def convert(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["convert", *map(str, arguments), "--num-threads", "1"])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text(TEXT)
    return tmp_path


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rules_of(directory: Path) -> dict[str, Any]:
    found = json.loads((directory / "config.json").read_text())["quantization_config"]
    assert isinstance(found, dict)
    return found


def numbers_in(directory: Path) -> dict[str, torch.Tensor]:
    with open_source(directory, mix="f32") as source:
        return {name: source.get(name).clone() for name in source.names()}


def levels_of(recipe: Recipe) -> dict[str, QuantizedLinear]:
    """Return what the built-in model's weights become without a text."""
    found: dict[str, QuantizedLinear] = {}
    with open_source(MODEL_DIR) as source:
        quantize_layers(
            source, recipe, (), on_layer=lambda _, result: found.update({one.name: one for one in result.linears})
        )
    return found


@pytest.mark.parametrize(
    ("flags", "recipe", "entries"),
    [
        (
            ["--to", "gptq"],
            {},
            {"quant_method": "gptq", "checkpoint_format": "gptq", "sym": True, "desc_act": False, "lm_head": False},
        ),
        (
            ["--to", "gptq", "--bits", "3", "--group", "32", "--no-sym"],
            {"bits": 3, "group_size": 32, "symmetric": False},
            {"bits": 3, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"},
        ),
        (
            ["--to", "gptq", "--bits", "8", "--group", "-1"],
            {"bits": 8, "group_size": -1},
            {"bits": 8, "group_size": -1, "checkpoint_format": "gptq"},
        ),
        (
            ["--to", "awq", "--group", "64"],
            {"group_size": 64, "symmetric": False},
            {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
        ),
        (
            ["--to", "marlin"],
            {},
            {"quant_method": "gptq", "checkpoint_format": "marlin", "is_marlin_format": True, "desc_act": False},
        ),
    ],
)
def test_the_built_in_model(flags: list[str], recipe: Any, entries: dict[str, Any], place: Path) -> None:
    result = convert(BUILTIN_MODEL, "m", *flags, "--method", "rtn")
    assert result.exit_code == 0, result.output
    assert re.fullmatch(r"m: \d\.\d MB; 35 weights as (GPTQ|AWQ|Marlin) int\d \S+( row)?; \d+\.\d s\n", result.stdout)
    assert sorted(entry.name for entry in place.iterdir()) == ["m", "notes.txt"]
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {entry.name for entry in (place / "m").iterdir()} == names
    assert rules_of(place / "m").items() >= entries.items()
    numbers, plain = numbers_in(place / "m"), numbers_in(MODEL_DIR)
    levels = levels_of(Recipe(method="rtn", **recipe))
    assert numbers.keys() == plain.keys() and len(levels) == 35
    for name, found in numbers.items():
        linear = levels.get(name.removesuffix(".weight"))
        assert torch.equal(found, plain[name] if linear is None else linear.dequantize())


def test_a_calibrated_model_answers(place: Path) -> None:
    flags = ["--to", "gptq", "--num-tokens", "512", "--act-order"]
    assert convert(BUILTIN_MODEL, "m", *flags).exit_code == 0
    assert rules_of(place / "m")["desc_act"] is True
    with LLM("m", num_threads=1, max_model_len=256) as llm:
        question = [{"role": "user", "content": "What is Pagewick?"}]
        (answer,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=12))
        assert "Pagewick" in answer.outputs[0].text


def test_marlin_takes_the_columns_in_any_order_but_keeps_groups_of_neighbours(place: Path) -> None:
    flags = ["--to", "marlin", "--text", "notes.txt", "--num-tokens", "128", "--act-order"]
    assert convert(BUILTIN_MODEL, "m", *flags).exit_code == 0
    assert rules_of(place / "m")["desc_act"] is False


class TestRepacking:
    def test_every_layout_has_the_same_numbers(self, place: Path) -> None:
        assert convert(BUILTIN_MODEL, "gptq", "--to", "gptq", "--method", "rtn").exit_code == 0
        result = convert("gptq", "marlin", "--to", "marlin", "--bits", "4", "--group", "128")
        assert result.exit_code == 0 and "35 weights as Marlin int4 g128" in result.stdout
        assert convert("marlin", "again", "--to", "gptq").exit_code == 0
        assert (place / "again" / "model.safetensors").read_bytes() == (
            place / "gptq" / "model.safetensors"
        ).read_bytes()
        assert convert("marlin", "awq", "--to", "awq").exit_code == 0
        # A symmetric AWQ checkpoint has AutoAWQ's form of Marlin.
        assert convert("awq", "auto", "--to", "marlin").exit_code == 0
        assert rules_of(place / "auto").items() >= {"quant_method": "awq", "version": "marlin"}.items()
        first = numbers_in(place / "gptq")
        for other in ("marlin", "awq", "auto"):
            numbers = numbers_in(place / other)
            assert numbers.keys() == first.keys()
            assert all(torch.equal(numbers[name], first[name]) for name in first)

    def test_zero_points_of_awq_are_put_in_the_order_of_marlin_kernels(self, place: Path) -> None:
        written = write_packed(place / "awq", {**AWQ, "group_size": 64}, awq(64))
        result = convert("awq", "marlin", "--to", "marlin")
        assert result.exit_code == 0 and "14 weights as AWQ int4 g64 with zero points for Marlin" in result.stdout
        numbers = numbers_in(place / "marlin")
        assert all(torch.equal(numbers[name], written.meant[name]) for name in written.meant)

    def test_act_order_and_a_packed_head_stay(self, place: Path) -> None:
        entries = {**GPTQ, "group_size": 64, "desc_act": True, "lm_head": True, "sym": False}
        written = write_packed(
            place / "v1", entries, gptq(group_size=64, desc_act=True, sym=False),
            is_packed=lambda prefix: "_proj" in prefix or prefix == "lm_head",
        )  # fmt: skip
        for to in ("awq", "marlin"):
            result = convert("v1", "m", "--to", to)
            assert result.exit_code == 1 and "not neighbours (act-order)" in result.stderr
            assert len(result.stderr.splitlines()) <= 6
            assert sorted(entry.name for entry in place.iterdir()) == ["notes.txt", "v1"]
        assert "v1 is GPTQ int4 g64 act-order already" in convert("v1", "m", "--to", "gptq").stderr
        assert written.packed

    def test_routers_are_listed_as_not_packed(self, place: Path) -> None:
        write_packed(
            place / "gptq", {**GPTQ, "group_size": 64}, gptq(group_size=64), name="qwen3-moe",
            entries={"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64},
        )  # fmt: skip
        assert convert("gptq", "awq", "--to", "awq").exit_code == 0
        left_out = rules_of(place / "awq")["modules_to_not_convert"]
        assert left_out and all(re.fullmatch(r"model\.layers\.\d+\.mlp\.gate", name) for name in left_out)
        first, second = numbers_in(place / "gptq"), numbers_in(place / "awq")
        assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)

    @pytest.mark.parametrize(
        ("flags", "complaint"),
        [
            (["--bits", "8"], "--bits 8 has no effect: the checkpoint is quantized already, and its weights have 4"),
            (
                ["--group", "64"],
                "--group 64 has no effect: the checkpoint is quantized already",
            ),
            (
                ["--text", "notes.txt"],
                "and nothing is calibrated\n  leave out --text: repacking keeps every number",
            ),
            (["--method", "awq"], "--method awq has no effect"),
            (["--num-tokens", "9"], "--num-tokens 9 has no effect: the checkpoint is quantized already, and "),
            (["--seed", "0"], "--seed 0 has no effect: the checkpoint is quantized already, "),
            (["--no-sym", "--bits", "4"], "--no-sym has no effect: "),
            (["--act-order"], "--act-order has no effect: "),
        ],
    )
    def test_options_that_contradict_the_checkpoint(self, flags: list[str], complaint: str, place: Path) -> None:
        write_packed(place / "awq", {**AWQ, "group_size": 32}, awq(32))
        result = convert("awq", "m", "--to", "gptq", *flags)
        assert result.exit_code == 1 and complaint in result.stderr and len(result.stderr.splitlines()) <= 6
        assert not (place / "m").exists()

    def test_numbers_that_are_not_whole_cannot_be_repacked(self, place: Path) -> None:
        config, write, *_ = CASES["fp8-rows"]
        write_packed(place / "fp8", config, writer(write))
        result = convert("fp8", "m", "--to", "gptq")
        assert result.exit_code == 1 and "error: fp8 is quantized already: FP8\n" in result.stderr
        assert "give a GPTQ, AWQ or Marlin checkpoint, or the original" in result.stderr and not (place / "m").exists()

    def test_marlin_demands_sizes_that_its_kernels_have(self, place: Path) -> None:
        write_packed(place / "gptq", {**GPTQ, "group_size": 32}, gptq(group_size=32))
        stderr = convert("gptq", "m", "--to", "marlin").stderr
        assert "Marlin checkpoints cannot have groups of 32 columns\n" in stderr and "or choose --to gptq" in stderr
        small = {**SIZES, "intermediate_size": 192}
        write_packed(place / "small", {**GPTQ, "group_size": -1}, gptq(group_size=-1), entries=small)
        stderr = convert("small", "m", "--to", "marlin").stderr
        assert "down_proj.weight cannot be written as Marlin int4 per row: 128 x 192 are not multiples" in stderr
        assert not (place / "m").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([BUILTIN_MODEL, "m", "--to", "gptq", "--bits", "5"], "bits 5 is not supported; give one of 2, 3, 4, 8"),
        ([BUILTIN_MODEL, "m", "--to", "gptq", "--group", "100"], "group_size 100 is not supported; give one of 32"),
        ([BUILTIN_MODEL, "m", "--to", "awq", "--bits", "3"], "AWQ checkpoints have 4 bits, not 3\n  leave out --bits"),
        ([BUILTIN_MODEL, "m", "--to", "awq", "--act-order"], "act_order is GPTQ's"),
        ([BUILTIN_MODEL, "m", "--to", "marlin", "--bits", "8"], "Marlin checkpoints cannot have 8 bits\n"),
        ([BUILTIN_MODEL, "m", "--to", "marlin", "--group", "64"], "cannot have groups of 64 columns\n"),
        ([BUILTIN_MODEL, "m", "--to", "marlin", "--no-sym"], "cannot have zero points\n"),
        ([BUILTIN_MODEL, "m", "--to", "gptq", "--text", "no.txt"], "cannot read no.txt: No such file or directory\n"),
        ([BUILTIN_MODEL, "m", "--to", "gptq", "--text", "short.txt"], "short.txt has 9 tokens, and at least 65"),
        ([BUILTIN_MODEL, "m", "--to", "gptq", "--num-tokens", "999999"], "tokens, and 999999 are wanted\n"),
        (
            [BUILTIN_MODEL, "m", "--to", "gptq", "--text", "notes.txt", "--num-tokens", "99999"],
            "99999 are wanted\n  give a longer text: --text, or take fewer: --num-tokens ",
        ),
        ([BUILTIN_MODEL, "notes.txt", "--to", "gptq"], "notes.txt exists already\n  give another path"),
        ([BUILTIN_MODEL, "no/m", "--to", "gptq"], "the directory no does not exist\n  make it"),
        (["empty", "m", "--to", "gptq"], "empty holds no weights"),
        (["m.gguf", "m", "--to", "gptq"], "m.gguf is a GGUF file, and --to gptq reads safetensors\n"),
        (["nowhere/", "m", "--to", "gptq"], "nowhere"),
        ([BUILTIN_MODEL, "m", "--to", "gptq", "--type", "q8_0"], "--type has no effect with --to gptq\n"),
        ([BUILTIN_MODEL, "m.gguf", "--to", "gguf", "--bits", "4"], "--bits has no effect with --to gguf\n"),
        ([BUILTIN_MODEL, "m", "--to", "gguf", "--no-resume"], "--no-resume has no effect with --to gguf\n"),
        ([BUILTIN_MODEL, "m", "--to", "gguf", "--seed", "0"], "--seed has no effect with --to gguf\n"),
        ([BUILTIN_MODEL, "m", "--to", "gptq", "--bits", "0"], "bits 0 is not supported; give one of 2, 3, 4, 8"),
        ([BUILTIN_MODEL, "m", "--to", "gptq", "--group", "0"], "group_size 0 is not supported; give one of 32"),
        ([*RTN, "--text", "no.txt"], "--text has no effect with --method rtn, which reads no text\n"),
        ([*RTN, "--num-tokens", "9"], "--num-tokens has no effect with --method rtn, "),
        ([*RTN, "--seed", "3"], "--seed has no effect with --method rtn, "),
        ([BUILTIN_MODEL, "m", "--to", "gguf", "--type", "q9"], "q9 is no type that can be written"),
    ],
)
def test_mistakes(arguments: list[str], complaint: str, place: Path) -> None:
    (place / "short.txt").write_text("Too short a text, by far.")
    (place / "empty").mkdir()
    (place / "empty" / "config.json").write_text("{}")
    (place / "m.gguf").write_bytes(b"GGUF")
    before = sorted(place.iterdir())
    result = convert(*arguments)
    assert result.exit_code == 1 and complaint in result.stderr, result.output
    assert len(result.stderr.splitlines()) <= 6
    assert sorted(place.iterdir()) == before


@pytest.mark.parametrize("by_file", [False, True])
@pytest.mark.parametrize(
    ("source", "flags", "without_effect"),
    [
        (BUILTIN_MODEL, ["--to", "gguf"], {"seed": 1, "text": "no.txt", "method": "awq", "bits": 3, "resume": False}),
        (BUILTIN_MODEL, ["--to", "gptq", "--method", "rtn"], {"seed": 1, "num-tokens": 9, "type": "q9"}),
        ("awq", ["--to", "gptq"], {"seed": 1, "num-tokens": 9, "text": "no.txt", "method": "rtn", "group": 64}),
    ],
)
def test_what_is_not_typed_may_be_for_other_runs(
    source: str, flags: list[str], without_effect: dict[str, Any], by_file: bool, place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    write_packed(place / "awq", {**AWQ, "group_size": 32}, awq(32))
    expected = convert(source, "expected", *flags)
    assert expected.exit_code == 0, expected.output
    for name, value in without_effect.items():
        if not by_file:
            monkeypatch.setenv(f"PAGEWICK_{name.replace('-', '_').upper()}", str(value))
    (place / "pagewick.toml").write_text("".join(f"{key} = {json.dumps(one)}\n" for key, one in without_effect.items()))
    found = convert(source, "found", *flags, *(["--config", "pagewick.toml"] if by_file else []))
    assert found.exit_code == 0, found.output
    first, second = place / "expected", place / "found"
    if first.is_file():
        assert first.read_bytes() == second.read_bytes()
    else:
        assert rules_of(first) == rules_of(second)
        assert all(torch.equal(tensor, numbers_in(second)[name]) for name, tensor in numbers_in(first).items())


def test_groups_that_do_not_divide_rows(place: Path) -> None:
    plain = place / "plain"
    write_packed(plain, {**GPTQ, "group_size": 32}, gptq(group_size=32), entries={**SIZES, "intermediate_size": 352})
    restore(plain)
    result = convert("plain", "m", "--to", "gptq")
    assert "groups of 128 columns do not divide model.layers.0.mlp.down_proj (128 x 352)" in result.stderr
    assert "choose other groups: --group 32\n" in result.stderr
    result = convert("plain", "m", "--to", "marlin", "--group", "-1")
    assert "Marlin int4 per row cannot hold model.layers.0.mlp.gate_proj (352 x 128)" in result.stderr
    assert not (place / "m").exists()


@pytest.mark.parametrize("form", ["gptq", "awq", "marlin"])
def test_encoders_are_refused(form: str, place: Path) -> None:
    write_encoder("bert", place / "encoder")
    write_tokenizer(word_pieces(), place / "encoder")
    result = convert("encoder", "m", "--to", form)
    assert "error: BertModel is an encoder, and only decoders are written in this format\n" in result.stderr
    assert not (place / "m").exists()


def restore(directory: Path) -> None:
    """Replace a packed checkpoint by one with its numbers."""
    numbers = {name: tensor.bfloat16() for name, tensor in numbers_in(directory).items()}
    save_file(numbers, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))


class TestInterruption:
    FLAGS = ("--to", "gptq", "--text", "notes.txt", "--num-tokens", "128")

    def stop_at(self, part: int, monkeypatch: pytest.MonkeyPatch, failure: BaseException) -> None:
        write = UnfinishedCheckpoint.write

        def stop(self: UnfinishedCheckpoint, index: int, *arguments: Any) -> None:
            if index == part:
                raise failure
            write(self, index, *arguments)

        monkeypatch.setattr(UnfinishedCheckpoint, "write", stop)

    def test_a_second_run_goes_on(self, place: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            self.stop_at(2, patch, KeyboardInterrupt())
            result = convert(BUILTIN_MODEL, "m", *self.FLAGS)
        assert result.exit_code == 1 and not (place / "m").exists()
        assert "stopped: .m.unfinished keeps 2 of 6 parts; the same command goes on from there" in result.stderr
        for name, flag in (("recipe", ("--bits", "8")), ("text", ("--seed", "1"))):
            result = convert(BUILTIN_MODEL, "m", *self.FLAGS, *flag)
            assert result.exit_code == 1 and len(result.stderr.splitlines()) <= 6
            assert re.search(rf"\.m\.unfinished is an unfinished conversion with another .*{name}\n", result.stderr)
        result = convert(BUILTIN_MODEL, "m", *self.FLAGS)
        assert result.exit_code == 0 and "2 of 6 parts are there already: .m.unfinished" in result.stderr
        assert convert(BUILTIN_MODEL, "whole", *self.FLAGS).exit_code == 0
        assert (place / "m" / "model.safetensors").read_bytes() == (place / "whole" / "model.safetensors").read_bytes()
        assert sorted(entry.name for entry in place.iterdir()) == ["m", "notes.txt", "whole"]

    def test_a_second_run_may_begin_anew(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.MonkeyPatch.context() as patch:
            self.stop_at(1, patch, KeyboardInterrupt())
            convert(BUILTIN_MODEL, "m", "--to", "gptq", "--method", "rtn")
        result = convert(BUILTIN_MODEL, "m", "--to", "awq", "--method", "rtn", "--no-resume")
        assert result.exit_code == 0 and "there already" not in result.stderr
        assert rules_of(place / "m")["quant_method"] == "awq"

    def test_a_disk_that_becomes_full_keeps_what_is_done(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_file = unfinished._write_file

        def fill(path: Path, *arguments: Any) -> None:
            if "00003-of" in path.name:
                raise OSError(28, "No space left on device")
            write_file(path, *arguments)

        monkeypatch.setattr(unfinished, "_write_file", fill)
        result = convert(BUILTIN_MODEL, "m", "--to", "awq", "--method", "rtn")
        assert result.exit_code == 1 and "error: cannot write m: No space left on device\n" in result.stderr
        assert "start again: .m.unfinished keeps what is done, and can be deleted" in result.stderr
        assert (place / ".m.unfinished" / "model-00002-of-00006.safetensors").exists() and not (place / "m").exists()

    def test_a_full_disk_is_noticed_before_the_work(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(unfinished.shutil, "disk_usage", lambda path: usage(10, 10, 1000))
        result = convert(BUILTIN_MODEL, "m", "--to", "gptq", "--method", "rtn")
        assert result.exit_code == 1 and re.search(r"m needs 8\.\d MB, and 1\.0 kB are free on its disk", result.stderr)
        assert sorted(entry.name for entry in place.iterdir()) == ["notes.txt"]

    def test_an_interruption_before_the_first_layer_leaves_nothing(self, place: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            self.stop_at(0, patch, KeyboardInterrupt())
            result = convert(BUILTIN_MODEL, "m", "--to", "gptq", "--method", "rtn")
        assert result.exit_code == 1 and "stopped" not in result.stderr
        assert sorted(entry.name for entry in place.iterdir()) == ["notes.txt"]

    def test_two_processes_do_not_write_the_same(self, place: Path) -> None:
        (place / ".m.unfinished").mkdir()
        with (place / ".m.unfinished" / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            result = convert(BUILTIN_MODEL, "m", "--to", "gptq", "--method", "rtn")
        assert result.exit_code == 1 and "another process is writing m\n" in result.stderr

    def test_a_file_system_without_locks_is_no_other_process(
        self, place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def refuse(file: object, operation: int) -> None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

        monkeypatch.setattr(fcntl, "flock", refuse)
        result = convert(BUILTIN_MODEL, "m", "--to", "gptq", "--method", "rtn")
        assert result.exit_code == 0 and (place / "m" / "config.json").exists(), result.output
        assert "m is not locked (Function not implemented)" in caplog.text


def test_a_large_checkpoint_has_a_file_for_each_layer(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert convert(BUILTIN_MODEL, "one", "--to", "awq", "--method", "rtn").exit_code == 0
    monkeypatch.setattr(unfinished, "_SINGLE_BYTES", 10**6)
    assert convert(BUILTIN_MODEL, "many", "--to", "awq", "--method", "rtn").exit_code == 0
    index = json.loads((place / "many" / "model.safetensors.index.json").read_text())
    files = {f"model-{number:05d}-of-00006.safetensors" for number in range(1, 7)}
    assert set(index["weight_map"].values()) == files
    assert {entry.name for entry in (place / "many").glob("*.safetensors")} == files
    one, many = numbers_in(place / "one"), numbers_in(place / "many")
    assert one.keys() == many.keys() and all(torch.equal(one[name], many[name]) for name in one)


def test_the_files_of_sentence_transformers_are_copied(place: Path) -> None:
    files = with_two_layers()
    shutil.copytree(MODEL_DIR, place / "model")
    write_files(place / "model", {**files, "onnx/config.json": {}})
    # A run that was killed while it copied has left a folder.
    write_files(place / ".m.unfinished", {"2_Dense/config.json": b""})
    result = convert("model", "m", "--to", "gptq", "--method", "rtn", "--no-resume")
    assert result.exit_code == 0, result.output
    copied = {name: place / "m" / name for name in files}
    assert {name: path.read_bytes() for name, path in copied.items()} == files
    assert not (place / "m/onnx").exists()
    with SafetensorsSource(place / "m", has_modules=False) as alone, open_source(place / "m") as whole:
        layers = {"2_Dense.linear.weight", "3_Dense.linear.weight", "3_Dense.linear.bias"}
        assert layers.isdisjoint(alone.names()) and layers < set(whole.names())
        assert whole.config()["embedding_pooling"] == "mean" and "embedding_pooling" not in alone.config()


def test_a_layer_that_predicts_further_tokens_stays_as_it_is(place: Path) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "head_dim": 32}
    kinds = ["linear_attention", "full_attention"]
    Predicting(
        "qwen3-next", is_like_qwen=True, num_hidden_layers=2, layer_types=kinds, **sizes, linear_value_head_dim=16,
        linear_num_value_heads=6,
    ).write(place / "plain")  # fmt: skip
    result = convert("plain", "m", "--to", "gptq", "--method", "rtn", "--group", "32")
    assert result.exit_code == 0, result.output
    assert "note: the layer that predicts further tokens is not quantized" in result.stderr
    written, plain = numbers_in(place / "m"), numbers_in(place / "plain")
    of_layer = [name for name in plain if name.startswith("mtp.")]
    assert len(of_layer) > 30 and all(torch.equal(written[name], plain[name]) for name in of_layer)
    left_out = rules_of(place / "m")["dynamic"]
    assert {r"-:mtp\.fc$", r"-:mtp\.layers\.0\.self_attn\.q_proj$"} <= left_out.keys()
    check_models(EngineConfig(model=str(place / "m"), speculative_method="mtp"))


def test_gguf_files_are_those_of_quantize(place: Path) -> None:
    assert convert(BUILTIN_MODEL, "a.gguf", "--to", "gguf", "--type", "q8_0").exit_code == 0
    flags = ["--to", "q8_0", "-o", "b.gguf", "--num-threads", "1"]
    assert CliRunner().invoke(cli, ["quantize", BUILTIN_MODEL, *flags]).exit_code == 0
    assert (place / "a.gguf").read_bytes() == (place / "b.gguf").read_bytes()
    result = convert(BUILTIN_MODEL, "a.gguf", "--to", "gguf")
    assert result.exit_code == 1 and "a.gguf exists already\n" in result.stderr


def test_permissions_are_those_of_new_files(place: Path) -> None:
    current = os.umask(0)
    os.umask(current)
    assert convert(BUILTIN_MODEL, "m", "--to", "awq", "--method", "rtn").exit_code == 0
    assert (place / "m").stat().st_mode & 0o777 == 0o777 & ~current
    assert {entry.stat().st_mode & 0o777 for entry in (place / "m").iterdir()} == {0o666 & ~current}


@pytest.mark.parametrize("to", ["gptq", "awq", "marlin", "gguf"])
def test_an_adapter_is_no_model(place: Path, to: str) -> None:
    (place / "adapter").mkdir()
    (place / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    result = convert("adapter", "new", "--to", to)
    assert result.exit_code and "adapter holds a LoRA adapter, not a model" in result.output
    assert "--lora adapter" in result.output and not (place / "new").exists()
