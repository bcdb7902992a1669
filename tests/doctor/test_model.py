"""Models described before they are loaded: from directories, GGUF files and hubs."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from pagewick.config import BUILTIN_MODEL
from pagewick.control_groups import GroupLimits
from pagewick.demo import MODEL_DIR
from pagewick.doctor import machine
from pagewick.doctor.checkpoint import Checkpoint, open_checkpoint, quantized_at_load
from pagewick.doctor.clusters import Cluster, parse_cluster
from pagewick.doctor.findings import Finding, note
from pagewick.doctor.gpus import TorchView
from pagewick.doctor.model import ModelReport, describe, device_of
from pagewick.doctor.plan import Device, Wishes
from pagewick.doctor.rank_weights import weights_of_rank
from pagewick.doctor.report import headline, model_json, model_text
from pagewick.doctor.stored import described_tensors
from pagewick.doctor.support import Verdict, read_model
from pagewick.errors import ModelLoadError, ModelNotFoundError
from pagewick.models.registry import nearest_to, read_config
from pagewick.models.tensors import model_tensors
from pagewick.weights import hub as hubs
from pagewick.weights import remote
from pagewick.weights.gguf import cursor
from pagewick.weights.progress import format_bytes
from tests.doctor.machines import CUDA_TORCH, DRIVER, GIB, GOOD, H200, spoilt
from tests.doctor.test_plan import config_of
from tests.models.checkpoints import write_checkpoint
from tests.weights.conftest import HubServer, _Handler
from tests.weights.conftest import hub as hub  # a stand-in for a Hugging Face hub
from tests.weights.gguf.models import write_file
from tests.weights.gguf.test_header import gguf, string, tensor, value
from tests.weights.test_modelscope import Hub as ModelScopeHub
from tests.weights.test_modelscope import hub as modelscope_hub  # and one for ModelScope

MODEL = "someone/Model-1.5"
CPU = Device("cpu", 16 * GIB, 16 * GIB)

__all__ = ["hub", "modelscope_hub"]


def described(checkpoint: Checkpoint, device: Device = CPU, **wishes: Any) -> ModelReport:
    report = describe(checkpoint, device, Wishes(**wishes))
    # Both kinds of output work for every model of these tests.
    assert json.loads(json.dumps(model_json(report)))["model"] == checkpoint.model
    assert checkpoint.model in model_text(report)
    return report


def first(report: ModelReport) -> tuple[str, str]:
    """The first problem and its fix; empty if there is none."""
    return next(((problem.text, problem.fix) for problem in report.problems), ("", ""))


def number(kind: int, code: str, content: float) -> bytes:
    return value(kind, struct.pack(f"<{code}", content))


def array(content: list[int]) -> bytes:
    return value(9, struct.pack(f"<IQ{len(content)}I", 4, len(content), *content))


def tiny_gguf(
    *,
    arch: str = "llama",
    part: tuple[int, int] | None = None,
    extra: Mapping[str, int | list[int]] | None = None,
    block: tuple[int, int] = (8, 34),
) -> bytes:
    """A Llama of one layer in Q8_0, or one part of two of it. block: number and bytes of another format."""
    sizes: dict[str, int | list[int]] = {
        "block_count": 1, "embedding_length": 64, "feed_forward_length": 96, "attention.head_count": 4,
        "attention.head_count_kv": 2, "context_length": 512, **(extra or {}),
    }  # fmt: skip
    keys = [("general.architecture", value(8, string(arch)))]
    keys += [
        (f"{arch}.{name}", array(size) if isinstance(size, list) else number(4, "I", size))
        for name, size in sizes.items()
    ]
    keys += [(f"{arch}.attention.layer_norm_rms_epsilon", number(6, "f", 1e-5))]
    keys += [("tokenizer.ggml.tokens", value(9, struct.pack("<IQ", 8, 2) + string("a") + string("b")))]
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (64, 50), "output_norm.weight": (64,), "blk.0.attn_norm.weight": (64,),
        "blk.0.ffn_norm.weight": (64,), "blk.0.attn_q.weight": (64, 64), "blk.0.attn_k.weight": (64, 32),
        "blk.0.attn_v.weight": (64, 32), "blk.0.attn_output.weight": (64, 64), "blk.0.ffn_gate.weight": (64, 96),
        "blk.0.ffn_up.weight": (64, 96), "blk.0.ffn_down.weight": (96, 64), "output.weight": (64, 50),
    }  # fmt: skip
    names = list(shapes)
    if part is not None:
        index, count = part
        keys.append(("split.count", number(2, "H", count)))
        names = names[index::count]
    tensors, offset = [], 0
    for name in names:
        size, is_vector = prod(shapes[name]), len(shapes[name]) == 1
        tensors.append(tensor(name, list(shapes[name]), 0 if is_vector else block[0], offset))
        offset += -(-(4 * size if is_vector else size // 32 * block[1]) // 32) * 32
    return gguf(keys, tensors, data=offset)


NUM_IN_MATRICES, NUM_IN_NORMS = 64 * 50 * 2 + 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96, 3 * 64
NUM_TINY = NUM_IN_MATRICES + NUM_IN_NORMS


class TestDirectories:
    def test_the_built_in_model(self) -> None:
        checkpoint = open_checkpoint(BUILTIN_MODEL, {})
        report = described(checkpoint)
        assert (checkpoint.where, checkpoint.is_downloaded) == (str(MODEL_DIR), True)
        assert (report.verdict, report.findings) == (Verdict(True), ())
        assert report.command == f"pagewick serve {BUILTIN_MODEL}"
        assert checkpoint.num_bytes == (MODEL_DIR / "model.safetensors").stat().st_size - header_bytes(MODEL_DIR)

    def test_a_weight_file_stands_for_its_directory(self) -> None:
        found = open_checkpoint(str(MODEL_DIR / "model.safetensors"), {})
        assert found.tensors == open_checkpoint(BUILTIN_MODEL, {}).tensors

    def test_without_a_tokenizer(self, tmp_path: Path) -> None:
        write_checkpoint("llama", tmp_path)
        report = described(open_checkpoint(str(tmp_path), {}))
        assert "tokenizer.json" in first(report)[0] and report.command == ""

    @pytest.mark.parametrize(
        "names", [["tokenizer.json"], ["tokenizer.model"], ["vocab.json", "merges.txt"], ["vocab.txt"]]
    )
    def test_what_a_tokenizer_is_read_from(self, tmp_path: Path, names: list[str]) -> None:
        write_checkpoint("llama", tmp_path)
        for name in names:
            assert not described(open_checkpoint(str(tmp_path), {})).verdict.runs
            (tmp_path / name).touch()
        assert described(open_checkpoint(str(tmp_path), {})).verdict == Verdict(True)

    def test_an_architecture_that_does_not_run(self, tmp_path: Path) -> None:
        write_checkpoint("llama", tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Lllama9ForCausalLM"]}))
        checkpoint = open_checkpoint(str(tmp_path), {})
        report = described(checkpoint)
        reason = "Lllama9ForCausalLM (model_type llama) is not supported yet"
        assert report.verdict == Verdict(False, reason, "Llama4ForCausalLM", "the nearest that runs: Llama4ForCausalLM")
        assert (first(report)[1], report.command, report.plan) == ("the nearest that runs: Llama4ForCausalLM", "", None)
        tensors = load_file(tmp_path / "model.safetensors").values()
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        assert model_json(report)["stored_bytes"] == num_bytes
        assert f"{len(tensors)} tensors, stored as F32, {format_bytes(num_bytes)}" in model_text(report)
        assert describe(checkpoint, parse_cluster("8xH200"), Wishes()).problems == report.problems

    def test_a_name_with_line_breaks_forges_no_lines(self, tmp_path: Path) -> None:
        write_checkpoint("llama", tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        forged = "Llama\nok       all is well"
        for names in ({"architectures": [forged]}, {"architectures": ["Lllama9ForCausalLM"], "model_type": forged}):
            (tmp_path / "config.json").write_text(json.dumps(config | names))
            text = model_text(described(open_checkpoint(str(tmp_path), {})))
            assert r"Llama\nok" in text and not any(line.startswith("ok ") for line in text.splitlines())

    def test_entries_that_are_missing_are_named(self, tmp_path: Path) -> None:
        write_checkpoint("llama", tmp_path)
        (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        report = described(open_checkpoint(str(tmp_path), {}))
        assert "num_attention_heads is missing" in first(report)[0]

    @pytest.mark.parametrize(
        ("name", "text", "words"),
        [
            ("config.json", "{", "not valid JSON"),
            ("model.safetensors", "x" * 100, "truncated or damaged"),
        ],
    )
    def test_malformed(self, name: str, text: str, words: str, tmp_path: Path) -> None:
        write_checkpoint("llama", tmp_path)
        (tmp_path / name).write_text(text)
        with pytest.raises(ModelLoadError, match=words):
            open_checkpoint(str(tmp_path), {})

    def test_no_file(self, tmp_path: Path) -> None:
        (tmp_path / "there.gguf").touch()
        match = r"there is no file .*their\.gguf\n  did you mean .*/there\.gguf\?"
        with pytest.raises(ModelNotFoundError, match=match):
            open_checkpoint(str(tmp_path / "their.gguf"), {})

    def test_none(self, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFoundError, match="there is no directory"):
            open_checkpoint(str(tmp_path / "none"), {})
        with pytest.raises(ModelLoadError, match=r"it has no config\.json"):
            open_checkpoint(str(tmp_path), {})


def header_bytes(directory: Path) -> int:
    (length,) = struct.unpack("<Q", (directory / "model.safetensors").read_bytes()[:8])
    return int(length) + 8


class TestGguf:
    def test_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "tiny.gguf"
        path.write_bytes(tiny_gguf())
        checkpoint = open_checkpoint(str(path), {})
        report = described(checkpoint)
        assert report.num_parameters == NUM_TINY
        expected = NUM_IN_MATRICES // 32 * 34 + 4 * NUM_IN_NORMS  # it is Q8_0
        assert report.formats["Q8_0"] == checkpoint.num_bytes == expected
        model = checkpoint.model_config
        assert model is not None
        assert (model.architecture, model.attention_width, model.vocab_size) == ("LlamaForCausalLM", 4 * 16, 50)
        assert (model.max_position_embeddings, model.tie_word_embeddings) == (512, False)
        assert report.plan is not None and report.plan.weights == expected - 2 * NUM_IN_NORMS  # which are in bfloat16
        assert report.plan.kv_bytes_per_token == 2 * 2 * 16 * 2
        assert report.verdict.runs and report.command == f"pagewick serve {path}"

    def test_a_format_that_cannot_be_multiplied(self, tmp_path: Path) -> None:
        path = tmp_path / "tiny.gguf"
        path.write_bytes(tiny_gguf(block=(9, 36)))
        report = described(open_checkpoint(str(path), {}))
        assert not report.verdict.runs and "stored as Q8_1" in report.verdict.reason

    def test_a_type_with_codes(self, tmp_path: Path) -> None:
        path = tmp_path / "tiny.gguf"
        path.write_bytes(tiny_gguf(block=(20, 18)))
        checkpoint = open_checkpoint(str(path), {})
        report = described(checkpoint)
        assert checkpoint.num_bytes == NUM_IN_MATRICES // 32 * 18 + 4 * NUM_IN_NORMS  # it is IQ4_NL
        # Kept as it is; vectors in bfloat16.
        assert report.plan is not None and report.plan.weights == NUM_IN_MATRICES // 32 * 18 + 2 * NUM_IN_NORMS
        assert report.verdict.runs

    @pytest.mark.parametrize(
        "name", ["attention.head_count", "attention.head_count_kv", "feed_forward_length", "attention.key_length"]
    )
    def test_layers_that_differ(self, name: str, tmp_path: Path) -> None:
        path = tmp_path / "tiny.gguf"
        path.write_bytes(tiny_gguf(extra={name: [2, 4]}))
        verdict = open_checkpoint(str(path), {}).verdict
        assert f"llama.{name} is different in each layer" in verdict.reason and str(path) in verdict.reason

    def test_a_size_that_is_none(self, tmp_path: Path) -> None:
        path = tmp_path / "tiny.gguf"
        path.write_bytes(tiny_gguf(extra={"embedding_length": 0}))
        checkpoint = open_checkpoint(str(path), {})
        assert checkpoint.model_config is None
        assert f"{path}: llama.embedding_length is 0" in checkpoint.verdict.reason

    def test_a_directory_of_it(self, tmp_path: Path) -> None:
        (tmp_path / "tiny.gguf").write_bytes(tiny_gguf())
        assert open_checkpoint(str(tmp_path), {}).is_gguf

    def test_the_command_that_starts_it(self, tmp_path: Path) -> None:
        path = tmp_path / "my model.gguf"
        path.write_bytes(tiny_gguf())
        assert described(open_checkpoint(str(path), {})).command == f"pagewick serve '{path}'"

    def test_several_files(self, tmp_path: Path) -> None:
        paths = [tmp_path / f"tiny-0000{part}-of-00002.gguf" for part in (1, 2)]
        for index, path in enumerate(paths):
            path.write_bytes(tiny_gguf(part=(index, 2)))
        assert described(open_checkpoint(str(paths[0]), {})).num_parameters == NUM_TINY
        paths[1].unlink()
        with pytest.raises(ModelLoadError, match=r"missing: tiny-00002-of-00002\.gguf"):
            open_checkpoint(str(paths[0]), {})

    def test_another_architecture(self, tmp_path: Path) -> None:
        (tmp_path / "a.gguf").write_bytes(tiny_gguf(arch="rwkv9", extra={"ssm.state_size": 16}))
        report = described(open_checkpoint(str(tmp_path / "a.gguf"), {}))
        assert (report.plan, report.num_parameters, report.checkpoint.architecture) == (None, None, "rwkv9")
        assert model_json(report)["stored_bytes"] == report.checkpoint.num_bytes > 0

    def test_latent_attention(self, tmp_path: Path) -> None:
        report = described(open_checkpoint(str(write_file("deepseek-v2-lite", tmp_path)), {}))
        assert report.kv_bytes is not None and report.kv_bytes["bfloat16"] == 2 * (32 + 8) * 2  # of two layers
        assert report.verdict.runs and report.plan is not None

    def test_no_language_model(self, tmp_path: Path) -> None:
        (tmp_path / "a.gguf").write_bytes(gguf([("general.architecture", value(8, string("clip")))], []))
        with pytest.raises(ModelLoadError, match="holds the vision part of a model"):
            open_checkpoint(str(tmp_path / "a.gguf"), {})


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Let the stand-in answer requests for a range with an end; lists the sizes of its answers."""
    sent: list[int] = []

    def send_file(self: Any, data: bytes, cuts: list[int], headers: dict[str, str] | None = None) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        body = data[int(asked[1]) : int(asked[2]) + 1] if asked else data
        sent.append(len(body))
        self.answer(206 if asked else 200, body, headers)

    monkeypatch.setattr(_Handler, "send_file", send_file)
    yield sent


def checkpoint_files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


class TestHubs:
    def test_only_descriptions_are_fetched(self, hub: HubServer, ranges: list[int]) -> None:
        files = checkpoint_files(MODEL_DIR)
        hub.add(MODEL, files)
        checkpoint = open_checkpoint(MODEL, os.environ)
        local = open_checkpoint(BUILTIN_MODEL, {})
        assert (checkpoint.model_config, checkpoint.tensors) == (local.model_config, local.tensors)
        assert not checkpoint.is_downloaded
        assert set(hub.fetched()) == {"config.json", "model.safetensors"}
        assert sum(ranges) < 2**18 + 5000 < len(files["model.safetensors"]) / 30
        assert described(checkpoint).command == f"pagewick serve {MODEL}"

    def test_a_server_that_ignores_ranges(self, hub: HubServer) -> None:
        hub.add(MODEL, checkpoint_files(MODEL_DIR))
        assert open_checkpoint(MODEL, os.environ).tensors == open_checkpoint(BUILTIN_MODEL, {}).tensors

    def test_shards(self, hub: HubServer, ranges: list[int], tmp_path: Path) -> None:
        write_checkpoint("llama", tmp_path, max_shard_size="20KB")
        hub.add(MODEL, checkpoint_files(tmp_path))
        assert set(open_checkpoint(MODEL, os.environ).tensors) == set(open_checkpoint(str(tmp_path), {}).tensors)

    @pytest.mark.parametrize("model", [MODEL, f"{MODEL}:q8_0", f"{MODEL}/tiny-Q8_0.gguf"])
    def test_a_gguf_repository(self, hub: HubServer, ranges: list[int], model: str) -> None:
        names = ("tiny-Q2_K.gguf", "tiny-BF16.gguf", "mmproj-F16.gguf", "README.md")
        hub.add(MODEL, {"tiny-Q8_0.gguf": tiny_gguf(), **dict.fromkeys(names, b"")})
        checkpoint = open_checkpoint(model, os.environ)
        assert checkpoint.where == f"tiny-Q8_0.gguf of the hub's {MODEL}"
        report = described(checkpoint)
        assert (report.num_parameters, report.verdict.runs) == (NUM_TINY, True)
        assert report.command == f"pagewick serve {model}"
        assert set(hub.fetched()) == {"tiny-Q8_0.gguf"}

    def test_a_split_gguf_file(self, hub: HubServer, ranges: list[int]) -> None:
        names = [f"Q8_0/tiny-0000{part}-of-00002.gguf" for part in (1, 2)]
        hub.add(MODEL, {name: tiny_gguf(part=(index, 2)) for index, name in enumerate(names)})
        assert described(open_checkpoint(f"{MODEL}:Q8_0", os.environ)).num_parameters == NUM_TINY

    def test_only_the_header_of_a_gguf_file_is_fetched(
        self, hub: HubServer, ranges: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Except for the factors of its rotary embedding, which may be anywhere in it."""
        path = write_file("llama3-rope", tmp_path)
        hub.add(MODEL, {path.name: path.read_bytes()})
        for place, name in ((remote, "_FIRST_BYTES"), (remote, "_MORE_BYTES"), (cursor, "_CHUNK_BYTES")):
            monkeypatch.setattr(place, name, 1024)
        checkpoint = open_checkpoint(MODEL, os.environ)
        assert checkpoint.model_config == open_checkpoint(str(path), {}).model_config
        assert ranges[-1] == 8 * 4 and sum(ranges) < path.stat().st_size / 4

    def test_a_quantization_that_is_not_there(self, hub: HubServer) -> None:
        hub.add(MODEL, {"tiny-Q8_0.gguf": tiny_gguf()})
        with pytest.raises(ModelLoadError, match=r"holds no GGUF model in Q6_K\n  it holds Q8_0"):
            open_checkpoint(f"{MODEL}:Q6_K", os.environ)

    def test_a_gguf_file_in_the_cache(self, hub: HubServer) -> None:
        hub.add(MODEL, {"tiny-Q8_0.gguf": tiny_gguf()})
        path = hubs.resolve_model(f"{MODEL}:Q8_0")
        hub.requests.clear()
        assert open_checkpoint(f"{MODEL}:Q8_0", os.environ).where == str(path)
        assert hub.requests == []

    def test_what_is_in_the_cache_is_used(self, hub: HubServer, tmp_path: Path) -> None:
        from pagewick.weights.hub import resolve_model

        hub.add(MODEL, checkpoint_files(MODEL_DIR))
        directory = resolve_model(MODEL)
        hub.requests.clear()
        assert open_checkpoint(MODEL, os.environ).where == str(directory)
        assert hub.requests == []

    def test_offline(self, hub: HubServer) -> None:
        with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE is set"):
            open_checkpoint(MODEL, {**os.environ, "HF_HUB_OFFLINE": "1"})
        assert hub.requests == []

    def test_there_is_no_such_model(self, hub: HubServer) -> None:
        with pytest.raises(ModelNotFoundError, match=f"has no model {MODEL}"):
            open_checkpoint(MODEL, os.environ)

    def test_gated(self, hub: HubServer) -> None:
        hub.add(MODEL, checkpoint_files(MODEL_DIR), gated=True)
        with pytest.raises(ModelLoadError, match="is gated"):
            open_checkpoint(MODEL, os.environ)

    @pytest.mark.parametrize(
        ("files", "words"),
        [
            ({"model.safetensors": b""}, "has no config.json"),
            ({"config.json": b"{}"}, "no weights"),
            ({"config.json": b"[]", "model.safetensors": b""}, f"{MODEL}/config.json does not hold a JSON object"),
            ({"config.json": b"{}", "model.safetensors": b"x"}, f"{MODEL}/model.safetensors is truncated"),
            ({"config.json": b"{}", "model.safetensors.index.json": b"{}", "a.safetensors": b""}, "has no weight_map"),
        ],
    )
    def test_malformed(self, hub: HubServer, ranges: list[int], files: dict[str, bytes], words: str) -> None:
        hub.add(MODEL, files)
        with pytest.raises(ModelLoadError) as caught:
            open_checkpoint(MODEL, os.environ)
        assert words in str(caught.value)
        assert "/tmp" not in str(caught.value)

    def test_modelscope(self, modelscope_hub: ModelScopeHub) -> None:
        modelscope_hub.models[MODEL, "master"] = checkpoint_files(MODEL_DIR)
        checkpoint = open_checkpoint(MODEL, os.environ, hub="modelscope")
        assert checkpoint.tensors == open_checkpoint(BUILTIN_MODEL, {}).tensors
        assert set(modelscope_hub.fetched()) == {"config.json", "model.safetensors"}
        with pytest.raises(ModelNotFoundError, match="no revision 'v2'"):
            open_checkpoint(MODEL, os.environ, hub="modelscope", revision="v2")


class TestVerdicts:
    CONFIG = json.loads((MODEL_DIR / "config.json").read_text())

    def test_the_engines_reader_is_asked(self) -> None:
        assert read_model(self.CONFIG)[1] == Verdict(True)
        changes: list[tuple[dict[str, Any], str]] = [
            ({"hidden_act": "swoosh"}, "swoosh"),
            ({"rope_scaling": {"rope_type": "spiral", "factor": 4.0}}, "spiral"),
            ({"architectures": None}, "names no architecture"),
        ]
        for change, word in changes:
            model, verdict = read_model(self.CONFIG | change)
            assert model is None and word in verdict.reason

    @pytest.mark.parametrize("name", ["Qwen3ForSequenceClassification", "LlamaForSequenceClassification", "Qwen3Model"])
    def test_rerankers_and_embedding_models_run(self, name: str) -> None:
        config = {**json.loads((MODEL_DIR / "config.json").read_text()), "architectures": [name]}
        model, verdict = read_model(config)
        assert verdict == Verdict(True) and model is not None and model.architecture == name
        assert (model.labels is not None) is name.endswith("Classification")

    @pytest.mark.parametrize(
        ("name", "nearest"),
        [
            ("Qwen2ForCausalLM", "Qwen3ForCausalLM"),
            ("LLaMAForCausalLM", "LlamaForCausalLM"),
            ("LlamaForCasualLM", "LlamaForCausalLM"),
            ("Llama4ForConditionalGeneration", "LlamaForCausalLM"),
            ("Qwen3NextForCausalLM", "Qwen3ForCausalLM"),
            # These resemble Llama in letters only.
            ("MambaForCausalLM", ""),
            ("JambaForCausalLM", ""),
            ("LlavaForConditionalGeneration", ""),
            ("X", ""),
        ],
    )
    def test_nearest(self, name: str, nearest: str) -> None:
        assert nearest_to(name, ["LlamaForCausalLM", "Qwen3ForCausalLM"]) == nearest

    def test_what_is_not_near_is_not_named(self) -> None:
        for stem in ("Bloom", "Zamba", "Mpt", "Persimmon"):
            assert nearest_to(f"{stem}ForCausalLM") == "", stem
        for name, nearest in (
            ("Qwen2AudioForConditionalGeneration", "Qwen2"),
            ("GraniteMoeWideForCausalLM", "GraniteMoe"),
        ):
            assert nearest_to(name) == f"{nearest}ForCausalLM"


class TestPlaces:
    def test_of_this_machine(self) -> None:
        assert device_of(GOOD) == Device("cpu", 60 * GIB, 64 * GIB)
        gpus = spoilt(torch=replace(CUDA_TORCH, gpus=(H200, H200)), driver=DRIVER)
        assert device_of(gpus) == Device("cuda", 139 * GIB, 141 * GIB, 2)
        assert device_of(gpus, kind="cpu").kind == "cpu"

    def test_a_container(self) -> None:
        found = device_of(spoilt(limits=GroupLimits(memory=8 * GIB, memory_used=GIB)))
        assert found == Device("cpu", 7 * GIB, 8 * GIB)

    def test_as_the_user_says(self) -> None:
        assert device_of(GOOD, memory=24 * GIB, kind="cuda") == Device("cuda", 24 * GIB, 24 * GIB, 1, is_planned=True)


class TestReports:
    def huge(self) -> Checkpoint:
        """A model of 8 billion parameters with a context of 8,192 tokens."""
        config = config_of(max_position_embeddings=8192)
        model = read_config(config)
        tensors = tuple(described_tensors(model, config))
        return Checkpoint("m", "m", config, model, Verdict(True), tensors, frozenset(["tokenizer.json"]))

    def test_too_large(self) -> None:
        report = described(self.huge(), Device("cpu", 12 * GIB, 13 * GIB))
        assert headline(report) == (
            "does not fit here: 16.3 GiB are needed, and 12.0 GiB are free: 4.3 GiB are missing"
        )
        assert first(report)[1] == "use --quantization q8_0, which takes 8.5 GB" and report.command == ""

    def test_half_would_fit(self) -> None:
        report = described(self.huge(), Device("cpu", 24 * GIB, 24 * GIB), dtype="float32")
        assert first(report)[1].startswith("use --dtype bfloat16, which takes half as much; or ")

    def test_quantizing_at_load_on_a_gpu(self) -> None:
        checkpoint = quantized_at_load(self.huge(), "q4_k")
        roomy = described(checkpoint, Device("cuda", 24 * GIB, 24 * GIB))
        # In pieces of 2**25 numbers; those in Q6_K need most: 2 + 37 bytes each, and an eighth.
        text = "quantizing takes 1.4 GiB of a GPU beside the weights, until they are loaded"
        assert int(2**25 * 39 * 9 / 8) == 1_472_200_704
        assert note("quantization", text) in roomy.findings and roomy.plan is not None
        memory = roomy.plan.weights + roomy.plan.runtime + 1_472_200_704
        enough, tight = (described(checkpoint, Device("cuda", size, size)) for size in (memory, memory - 2**20))
        assert not any("quantizing" in finding.text for finding in enough.problems)
        assert [finding.text for finding in tight.problems] == [f"{text}: 1.0 MiB are missing"]
        on_cpu = described(checkpoint, Device("cpu", 24 * GIB, 24 * GIB))
        assert not any("quantizing" in finding.text for finding in on_cpu.findings)

    def test_several_gpus_of_this_machine_are_used(self) -> None:
        report = described(self.huge(), Device("cuda", 12 * GIB, 12 * GIB, count=4))
        assert report.plan is not None and report.plan.tensor_parallel_size == 2
        assert report.command == "pagewick serve m --tensor-parallel-size 2"

    def test_more_gpus_than_there_are(self) -> None:
        report = described(self.huge(), Device("cuda", 12 * GIB, 12 * GIB, count=1))
        assert first(report)[1].startswith("use 2 such GPUs: --tensor-parallel-size 2; or ")

    def test_a_context_that_does_not_fit(self) -> None:
        checkpoint = open_checkpoint(BUILTIN_MODEL, {})
        roomy = described(checkpoint).plan
        assert roomy is not None
        tight = Device("cpu", roomy.weights + roomy.runtime + roomy.activations + 512 * 2**20 + 3 * 2**20, 8 * GIB)
        assert described(checkpoint, tight).command.endswith("pagewick-demo --max-model-len 1216")
        report = described(checkpoint, tight, max_model_len=2048)
        assert headline(report) == (
            "does not fit here: 2,048 tokens take 5.0 MiB of KV cache, and 3.0 MiB are left: 2.0 MiB are missing"
        )
        assert first(report)[1] == "use --max-model-len 1216; or --kv-cache-dtype int8, which takes half of bfloat16"
        tighter = replace(tight, memory=tight.memory - 3 * 2**19)
        report = described(checkpoint, tighter, max_model_len=2048)
        assert first(report)[1].endswith("; or --kv-cache-dtype int4, which takes about a quarter of bfloat16")

    def test_all_is_said(self) -> None:
        text = model_text(described(open_checkpoint(BUILTIN_MODEL, {})))
        for words in (
            "Qwen3ForCausalLM; runs here\n", "5 layers, 4 heads, 2 KV heads of 64", "context 2,048 tokens",
            "bfloat16    10.0 MB", "needed: ", "tensor parallel sizes that work: 1, 2, 4",
            "KV cache per token: 5.0 KiB in float32, 2.5 KiB in bfloat16 or float16, 1.3 KiB in int8 or",
            "Start it:\n  pagewick serve",
        ):  # fmt: skip
            assert words in text, words

    def test_json_has_the_numbers(self) -> None:
        report = described(open_checkpoint(BUILTIN_MODEL, {}))
        found = model_json(report)
        assert (found["ok"], found["runs"], found["num_parameters"]) == (True, True, report.num_parameters)
        assert found["weight_bytes"]["float32"] == 4 * report.num_parameters
        assert found["kv_bytes_per_token"]["bfloat16"] == 2560
        assert found["kv_bytes_per_token"]["int8"] == 5 * 2 * 2 * (64 + 4)
        assert found["plan"]["rows"][-1]["num_tokens"] == 2048

    def test_the_command_repeats_what_was_asked(self) -> None:
        checkpoint = open_checkpoint(BUILTIN_MODEL, {})
        wishes = Wishes(max_model_len=512, dtype="float32", kv_cache_dtype="float16", tensor_parallel_size=2)
        report = describe(checkpoint, CPU, wishes, flags=["--revision", "a b"])
        assert report.command == (
            f"pagewick serve {BUILTIN_MODEL} --revision 'a b' --tensor-parallel-size 2 --dtype float32 "
            "--kv-cache-dtype float16 --max-model-len 512"
        )

    def test_quantized_weights_stay_as_they_are(self) -> None:
        checkpoint = open_checkpoint(BUILTIN_MODEL, {})
        assert checkpoint.model_config is not None
        packed = [
            replace(one, dtype="Q8_0", label="GPTQ int8") if len(one.shape) == 2 else one for one in checkpoint.tensors
        ]
        quantized = replace(checkpoint, tensors=tuple(packed))
        sizes = [weights_of_rank(checkpoint.model_config, one, 1, "float32").total for one in (quantized, checkpoint)]
        norms = sum(one.num_elements for one in checkpoint.tensors if len(one.shape) == 1)
        assert sizes == [(checkpoint.num_bytes // 2 - norms) // 32 * 34 + 4 * norms, 2 * checkpoint.num_bytes]
        assert "free; weights as stored)" in model_text(described(quantized))


def large(directory: Path) -> str:
    """Write a model of 235 billion parameters whose files have headers and a size, and no bytes on the disk."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288, "num_experts": 128,
        "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 151936, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "torch_dtype": "bfloat16",
        "max_position_embeddings": 40960,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").touch()
    header, offset = {}, 0
    for entry in model_tensors(read_config(config)):
        end = offset + 2 * entry.num_elements
        header[entry.name] = {"dtype": "BF16", "shape": entry.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    return str(directory)


class TestHeadlines:
    """The first line says that a model runs only if it does so on this machine."""

    def line(self, model: str, place: Device | Cluster, hindrances: Sequence[Finding] = (), **wishes: Any) -> str:
        report = describe(open_checkpoint(model, {}), place, Wishes(**wishes), hindrances=hindrances)
        text = headline(report)
        assert model_text(report).splitlines()[0] == f"{model}: {report.checkpoint.architecture}; {text}"
        assert (report.command != "") == (text.startswith("runs here") or ("planned" in text and " on " not in text))
        return text

    def test_22_gib_are_free_and_440_are_needed(self, tmp_path: Path) -> None:
        model = large(tmp_path)
        assert self.line(model, Device("cpu", 22 * GIB, 24 * GIB)) == (
            "does not fit here: 440.1 GiB are needed, and 22.0 GiB are free: 418.1 GiB are missing"
        )
        assert re.fullmatch(
            r"does not fit on 4 x H100: 11\d.. GiB are needed on each GPU, and 80.0 GiB are free: .* GiB are missing",
            self.line(model, parse_cluster("4xH100")),
        )
        assert self.line(model, parse_cluster("8xH100")) == "fits on 8 x H100 with up to 8,192 tokens; planned, not run"

    def test_without_a_cache_nothing_is_said_about_sequences(self, tmp_path: Path) -> None:
        report = described(open_checkpoint(large(tmp_path), {}), Device("cpu", 22 * GIB, 24 * GIB))
        text = model_text(report)
        assert "0.0 KiB" not in text and "at once" not in text
        assert first(report)[1] == "use a smaller model, or a machine with more memory"

    @pytest.mark.parametrize(
        ("place", "expected"),
        [
            (CPU, "runs here"),
            (Device("cpu", GIB, GIB, is_planned=True), "fits in 1.0 GiB (cpu); planned, not run"),
            (Device("cuda", GIB, GIB, is_planned=True), "fits in 1.0 GiB (cuda); planned, not run"),
            (Device("cuda", GIB, GIB), "fits here; planned, not run: GPUs are untested so far"),
            (Device("mps", GIB, GIB), "fits here; planned, not run: GPUs are untested so far"),
            (parse_cluster("2xL4"), "fits on 2 x L4; planned, not run"),
            (parse_cluster("2xH100", 2), "fits on 2 nodes of 2 x H100; planned, not run"),
        ],
    )
    def test_places(self, place: Device | Cluster, expected: str) -> None:
        assert self.line(BUILTIN_MODEL, place) == expected

    def test_a_shorter_context(self) -> None:
        needed = describe(open_checkpoint(BUILTIN_MODEL, {}), Device("cpu", GIB, GIB), Wishes()).plan.needed
        tight = Device("cpu", needed + 3 * 2**20, GIB)
        assert self.line(BUILTIN_MODEL, tight) == "runs here with the flags below"
        assert self.line(BUILTIN_MODEL, CPU, max_model_len=100) == "runs here with up to 100 tokens"

    def test_weights_that_are_missing(self, tmp_path: Path) -> None:
        shutil.copy(MODEL_DIR / "config.json", tmp_path)
        assert self.line(str(tmp_path), CPU) == "fits here, but there are no weights beside config.json"

    def test_a_machine_that_runs_nothing(self) -> None:
        broken = spoilt(torch=TorchView(error="No module named 'torch'"))
        hindrances = machine.hindrances(broken, open_checkpoint(BUILTIN_MODEL, {}))
        line = self.line(BUILTIN_MODEL, CPU, hindrances)
        assert line == "fits here, but torch cannot be imported: No module named 'torch'"

    def test_a_disk_that_is_too_small_for_the_download(self) -> None:
        checkpoint = open_checkpoint(BUILTIN_MODEL, {})
        remote = replace(checkpoint, is_downloaded=False)
        (found,) = machine.hindrances(spoilt("cache", free=10**6), remote)
        assert found.text == "the download takes 10.0 MB, and 1.0 MB are free in /cache/hub"
        assert "HF_HOME" in found.fix
        assert machine.hindrances(spoilt("cache", free=10**6), checkpoint) == []
        assert machine.hindrances(GOOD, remote) == []

    def test_a_limit_of_the_container_counts(self, tmp_path: Path) -> None:
        place = device_of(spoilt(limits=GroupLimits(memory=2 * GIB, memory_used=GIB + GIB // 2)))
        assert self.line(BUILTIN_MODEL, place).startswith("does not fit here: 805 MiB are needed, and 512 MiB are free")

    def test_a_model_in_another_format(self, tmp_path: Path) -> None:
        (tmp_path / "a.gguf").write_bytes(tiny_gguf(block=(9, 36)))
        assert self.line(str(tmp_path / "a.gguf"), CPU) == "Pagewick does not run it; it fits here"

    def test_both_problems_are_told(self, tmp_path: Path) -> None:
        config = json.loads((Path(__file__).parent / "data/DeepSeek-R1-AWQ/config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "aqlm"}}))
        data = str(tmp_path)
        assert self.line(data, CPU) == "Pagewick does not run it; it does not fit here"
        report = described(open_checkpoint(data, {}))
        assert [finding.subject for finding in report.problems] == ["model", "memory"]
