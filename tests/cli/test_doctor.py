"""`pagewick doctor` as it is called."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pagewick.api_arguments import load_text
from pagewick.cli import cli
from pagewick.config import BUILTIN_MODEL, EngineConfig
from pagewick.demo import MODEL_DIR
from pagewick.doctor import facts
from pagewick.engine.preflight import WeightBytes
from pagewick.errors import ModelLoadError
from tests.doctor.machines import CUDA_TORCH, GIB, GOOD, spoilt
from tests.images import (
    test_cohere_settings,
    test_idefics3_settings,
    test_lfm2_vl_settings,
    test_minicpm_settings,
)
from tests.images.test_pixtral_model import write_tiny_mistral
from tests.images.tiny_vlm import write_tiny_vlm
from tests.models.checkpoints import VARIANTS, make_model, save, write_checkpoint
from tests.models.encoders import write_encoder
from tests.models.predicting import Predicting
from tests.models.word_pieces import word_pieces, write_tokenizer
from tests.tiny_text import byte_level_backend
from tests.weights.gguf.test_predicting import add_tokenizer

TEMPLATES = Path(__file__).parents[1] / "text/templates"


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(cli, ["doctor", *arguments], env=environment)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A good machine in place of this one."""
    monkeypatch.setattr(facts, "collect", lambda environ, **options: GOOD)
    return monkeypatch


def test_a_good_machine(machine: pytest.MonkeyPatch) -> None:
    result = run()
    assert (result.exit_code, result.stderr) == (0, "")
    assert "ok       port     8000 is free" in result.stdout


def test_a_problem_is_status_1(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(facts, "collect", lambda environ, **options: spoilt("cache", free=0))
    result = run()
    assert result.exit_code == 1
    assert "-> free some space, or set HF_HOME" in result.stdout


def test_json(machine: pytest.MonkeyPatch) -> None:
    found = json.loads(run("--json").stdout)
    assert found["ok"] is True
    assert {finding["level"] for finding in found["findings"]} == {"ok"}


@pytest.mark.parametrize("quantization", [None, "q8_0"])
def test_the_layer_that_predicts_tokens_counts(
    quantization: str | None, machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = Predicting("glm-4.5")
    made.write(tmp_path)
    add_tokenizer(tmp_path)
    flags = [] if quantization is None else ["--quantization", quantization]
    plain, found = (
        json.loads(run(str(tmp_path), "--json", *flags, *more).stdout)
        for more in ([], ["--speculative-method", "mtp", "--num-speculative-tokens", "3"])
    )
    config = EngineConfig(model=str(tmp_path), quantization=quantization, speculative_method="mtp")
    assert found["plan"]["weights"] == WeightBytes.of(config, 1).all > plain["plan"]["weights"]
    layer = sum(one.numel() for part in (made.layer.layers, made.fc, made.norm) for one in part.state_dict().values())
    assert found["num_parameters"] - plain["num_parameters"] == layer + 2 * made.norm.weight.numel()
    assert found["plan"]["kv_bytes_per_token"] == plain["plan"]["kv_bytes_per_token"] * 4 / 3
    # Six rows of hidden states, and three more rows of logits of each sequence.
    logits = 32 * 3 * 193 * 8
    assert found["plan"]["activations"] - plain["plan"]["activations"] == 2048 * 6 * 48 * 4 + logits
    assert "--speculative-method mtp --num-speculative-tokens 3" in found["command"]
    assert "--speculative" not in plain["command"]


def test_a_model_without_a_layer_that_predicts_tokens(machine: pytest.MonkeyPatch) -> None:
    result = run(BUILTIN_MODEL, "--speculative-method", "mtp")
    assert result.exit_code == 1 and "has no layer that predicts further tokens" in result.output


def test_online_is_asked_for(machine: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, str]] = []

    def collect(environ: object, *, online: bool, hub: str) -> facts.Facts:
        asked.append((online, hub))
        return GOOD

    machine.setattr(facts, "collect", collect)
    run()
    run("--online", "--hub", "modelscope")
    assert asked == [(False, "huggingface"), (True, "modelscope")]


def test_online_is_for_the_report_on_the_machine(machine: pytest.MonkeyPatch) -> None:
    refused = run(BUILTIN_MODEL, "--online")
    assert refused.exit_code == 2
    assert refused.stderr == "Error: --online is for the report on this machine: leave out the model, or --online\n"
    assert run(BUILTIN_MODEL, PAGEWICK_ONLINE="1").exit_code == 0, "the variable may be meant for that report"


def test_this_machine() -> None:
    result = run("--json")
    subjects = [finding["subject"] for finding in json.loads(result.stdout)["findings"]]
    assert subjects[:3] == ["Python", "torch", "CPU"]
    assert result.exit_code == (0 if json.loads(result.stdout)["ok"] else 1)


def test_a_model(machine: pytest.MonkeyPatch) -> None:
    result = run(BUILTIN_MODEL)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-1] == f"  pagewick serve {BUILTIN_MODEL}"


def test_a_model_with_everything_overridden(machine: pytest.MonkeyPatch) -> None:
    machine_flags = ("--memory", "24GiB", "--device", "cuda", "--tensor-parallel-size", "2")
    model_flags = ("--dtype", "fp32", "--kv-cache-dtype", "bf16", "--max-model-len", "1000")
    found = json.loads(run(BUILTIN_MODEL, "--json", *machine_flags, *model_flags).stdout)
    plan = found["plan"]
    assert plan["device"] == {"kind": "cuda", "memory": 24 * GIB, "total": 24 * GIB, "count": 1, "is_planned": True}
    assert (plan["dtype"], plan["kv_cache_dtype"], plan["context"]) == ("float32", "bfloat16", 1000)
    assert found["command"].startswith(
        f"pagewick serve {BUILTIN_MODEL} --device cuda --tensor-parallel-size 2 --dtype float32 "
        "--kv-cache-dtype bfloat16 --max-model-len 1000 --kv-cache-memory "
    )
    # The command line understands the flags that doctor recommends.
    from pagewick.cli.serve import command

    _, _, *arguments = found["command"].split()
    assert command.make_context("serve", arguments).params["engine_max_model_len"] == 1000


def test_flags_come_from_the_environment_too(machine: pytest.MonkeyPatch) -> None:
    result = run(BUILTIN_MODEL, PAGEWICK_MAX_MODEL_LEN="100", PAGEWICK_DTYPE="float32")
    assert result.stdout.splitlines()[-1] == f"  pagewick serve {BUILTIN_MODEL} --dtype float32 --max-model-len 100"


def test_a_model_that_does_not_fit(machine: pytest.MonkeyPatch) -> None:
    result = run(BUILTIN_MODEL, "--memory", "300MiB")
    assert result.exit_code == 1
    assert "problem  " in result.stdout and "pagewick serve" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["/no/where"], 1, "there is no directory /no/where"),
        ([BUILTIN_MODEL, "--tensor-parallel-size", "3"], 1, "sizes that work: 1, 2, 4"),
        ([BUILTIN_MODEL, "--max-model-len", "9999"], 1, "longer than the model's context of 2048"),
        ([BUILTIN_MODEL, "--memory", "much"], 2, "'much' is not a size"),
        ([BUILTIN_MODEL, "--memory", "5"], 2, "5 has no unit; write 5GiB"),
        ([BUILTIN_MODEL, "--dtype", "int3"], 2, "int3"),
    ],
)
def test_mistakes(machine: pytest.MonkeyPatch, arguments: list[str], status: int, words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == status
    assert words in result.stderr
    assert len(result.stderr.splitlines()) <= 6


def test_a_plan_for_a_gpu_that_is_not_there(machine: pytest.MonkeyPatch) -> None:
    result = run(BUILTIN_MODEL, "--device", "cuda")
    assert result.exit_code == 1
    assert "torch sees no GPU here" in result.stderr
    assert "--memory 24GiB" in result.stderr and "--device cpu" in result.stderr
    assert len(result.stderr.splitlines()) <= 6
    assert run(BUILTIN_MODEL, "--device", "cuda", "--memory", "24GiB").exit_code == 0
    machine.setattr(facts, "collect", lambda environ, **options: replace(GOOD, torch=CUDA_TORCH))
    assert run(BUILTIN_MODEL, "--device", "cuda").exit_code == 0


def chat_lines(machine: pytest.MonkeyPatch, model: Path, template: str | None) -> list[str]:
    """Return what doctor says about chats if the built-in model has another chat template."""
    shutil.copytree(MODEL_DIR, model)
    place = model / "tokenizer_config.json"
    config = json.loads(place.read_text(encoding="utf-8"))
    place.write_text(json.dumps({**config, "chat_template": template}), encoding="utf-8")
    result = run(str(model))
    return [line for line in result.stdout.splitlines() if line.startswith(("ok ", "note ", "problem "))]


@pytest.mark.parametrize(
    ("template", "tools"),
    [
        ("qwen3", "ok       tools     the chat template describes them; calls have the format hermes"),
        ("mistral-v0.3", "ok       tools     the chat template describes them; calls have the format mistral"),
        (
            "deepseek-r1",
            "note     tools     the system message describes them, because the chat template knows no tools; calls "
            "have the format deepseek_v3",
        ),
        (
            "phi-3",
            "note     tools     the first message describes them, because the chat template knows no tools; calls "
            "have the format hermes",
        ),
    ],
)
def test_where_tools_are_described(machine: pytest.MonkeyPatch, tmp_path: Path, template: str, tools: str) -> None:
    source = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    thoughts = "ok       thoughts  they are between <think> and </think>"
    assert chat_lines(machine, tmp_path / "model", source) == [tools, thoughts]


def test_how_a_model_reads_images(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_tiny_vlm(tmp_path)
    settings = tmp_path / "preprocessor_config.json"

    def line() -> str:
        return next(line for line in run(str(tmp_path)).stdout.splitlines() if " images " in line)

    assert line() == ("ok       images    each has a token for every 8 x 8 pixels, 60 at most (--max-image-pixels)")
    settings.write_text("{")
    assert line().startswith("problem  images") and "preprocessor_config.json cannot be read" in line()
    settings.unlink()
    assert line().startswith("note     images    they are refused, because preprocessor_config.json is missing")


def test_a_plan_for_a_gpu_has_room_for_the_largest_picture(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_tiny_vlm(tmp_path)
    settings = tmp_path / "preprocessor_config.json"
    entries = json.loads(settings.read_text(encoding="utf-8"))

    def activations(side: int) -> int:
        settings.write_text(json.dumps({**entries, "max_pixels": side**2, "size": None}), encoding="utf-8")
        plan = json.loads(run(str(tmp_path), "--json", "--device", "cuda", "--memory", "24GiB").stdout)["plan"]
        return int(plan["activations"])

    assert activations(64) < activations(128)


def test_how_a_model_reads_images_in_rows(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_tiny_mistral(tmp_path)
    (line,) = (line for line in run(str(tmp_path)).stdout.splitlines() if " images " in line)
    said = "each has a token for every 8 x 8 pixels and one for every row of these, 30 at most (--max-image-pixels)"
    assert line == f"ok       images    {said}"


@pytest.mark.parametrize(
    ("name", "tokens", "said"),
    [
        ("smolvlm", [*test_idefics3_settings.SPECIAL, *test_idefics3_settings.PLACES], "4 tokens, 108 at most"),
        # As with Idefics3 8B: the names of tiles are words.
        ("smolvlm", test_idefics3_settings.SPECIAL, "4 tokens, 295 at most"),
        ("lfm2-vl", test_lfm2_vl_settings.SPECIAL, "4 tokens, 39 at most"),
        ("command-a-vision", test_cohere_settings.SPECIAL, "9 tokens, 72 at most"),
        # A narrow picture has 32 tokens; there are 7, with 3 texts around each, and the number of the image.
        ("minicpm-v-4.6", test_minicpm_settings.SPECIAL, "4 tokens, 248 at most"),
    ],
)
def test_how_a_model_reads_images_in_tiles(
    name: str, tokens: list[str], said: str, machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_checkpoint(name, tmp_path)
    backend = byte_level_backend()
    backend.add_special_tokens(tokens)
    backend.save(str(tmp_path / "tokenizer.json"))
    (line,) = (line for line in run(str(tmp_path)).stdout.splitlines() if " images " in line)
    assert line.split(maxsplit=2)[2] == f"large ones are cut into tiles of {said} (--max-image-pixels)"


def test_a_model_without_a_template(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (line,) = chat_lines(machine, tmp_path / "model", None)
    assert line.startswith("note     chat  there is no chat template")


@pytest.mark.parametrize("version", ["V3.2", "V4"])
def test_where_the_template_of_deepseek_is(version: str, machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its repository has code in its place."""
    name = f"deepseek-{version.lower()}"
    save(make_model(name, {**VARIANTS[name].all_entries(), "vocab_size": 400}), tmp_path)
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    file = f"models/templates/deepseek-ai-DeepSeek-{version}.jinja"
    assert f"-> pagewick serve --chat-template FILE, with {file}" in run(str(tmp_path)).stdout


@pytest.mark.parametrize(
    ("task", "num_labels", "line"),
    [
        ("Model", 1, "ok       embeddings  they have 48 numbers, of all tokens, as a mean; it writes no text"),
        ("ForSequenceClassification", 1, "ok       labels  scores of pairs of texts; it writes no text"),
        ("ForSequenceClassification", 3, "ok       labels  3 classes of texts; it writes no text"),
    ],
)
def test_what_an_encoder_does(
    task: str, num_labels: int, line: str, machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_encoder("bert", tmp_path, task, num_labels=num_labels)
    write_tokenizer(word_pieces(), tmp_path)
    lines = run(str(tmp_path)).stdout.splitlines()
    assert line in lines and not any(" chat " in one for one in lines)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("chat_template.jinja", "{% for %}", "the chat template is not valid: "),
        ("generation_config.json", '{"temperature": "hot"}', "generation_config.json is wrong: temperature must be"),
        ("generation_config.json", '{"eos_token_id": "x"}', "generation_config.json: eos_token_id is 'x'"),
        ("generation_config.json", "{", "generation_config.json is not valid JSON"),
        ("tokenizer.json", "{}", "tokenizer.json is not a usable tokenizer"),
    ],
)
def test_a_file_that_stops_the_start_is_a_problem_in_the_words_of_the_start(
    machine: pytest.MonkeyPatch, tmp_path: Path, file: str, content: str, message: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL_DIR, model)
    (model / file).write_text(content, encoding="utf-8")
    with pytest.raises(ModelLoadError, match=re.escape(message)) as refused:
        load_text(EngineConfig(model=str(model)), None)
    cause, *fix = str(refused.value).splitlines()
    result = run(str(model))
    assert result.exit_code == 1
    assert f"; fits here, but {cause}\n" in result.stdout
    assert f"problem  files  {cause}\n" in result.stdout
    assert not fix or f"-> {fix[-1].strip()}" in result.stdout
    assert "pagewick serve /" not in result.stdout


def test_a_malformed_gguf_file(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "w.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 100)
    result = run(str(path))
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {path} is not a usable GGUF file")


def test_the_arithmetic_needs_no_torch() -> None:
    script = (
        "import sys\nfrom pagewick.doctor.checkpoint import open_checkpoint\n"
        "from pagewick.doctor.model import describe\nfrom pagewick.doctor.plan import Device, Wishes\n"
        f"found = open_checkpoint({BUILTIN_MODEL!r}, {{}})\n"
        "describe(found, Device('cpu', 2**33, 2**33), Wishes())\n"
        "import pagewick.doctor.machine, pagewick.doctor.report\n"
        "print({'torch', 'numpy', 'huggingface_hub'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("flags", [(), ("--gpus", "2xH100")])
def test_weights_of_another_model_are_told_without_loading_them(
    machine: pytest.MonkeyPatch, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL_DIR, model)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}), encoding="utf-8")
    result = run(str(model), "--json", *flags)
    found = json.loads(result.stdout)
    assert (result.exit_code, found["ok"], found["runs"]) == (1, False, False)
    assert found["problem"].startswith("the model has no place for 11 tensors: model.layers.4.")
    assert "do not belong together" in found["fix"]
