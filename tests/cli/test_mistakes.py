"""Mistakes of users, each in a real process, which must end soon with a short error that says what to do.

A few processes run at the same time; those in the table TORCH_FREE must not even have imported torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from pagewick.demo import MODEL_DIR
from pagewick.models.registry import read_config
from pagewick.models.tensors import model_tensors
from tests.weights.conftest import HubServer, running_hub

PROMPT = ("-p", "Pagewick is", "--max-tokens", "1")
# Runs the command, and says at the end of stderr whether torch was imported.
SCRIPT = """
import atexit, sys
atexit.register(lambda: print("torch" if "torch" in sys.modules else "no torch", file=sys.stderr))
from pagewick.cli import main
main()
"""
MAX_LINES = 6
# Only a process that hangs takes this long: others take a second, or a few where torch is needed.
TIMEOUT_S = 90
MACHINE_BYTES = psutil.virtual_memory().total


@dataclass(frozen=True)
class Mistake:
    """A command, the words that its error must have, and whether finding the error may need torch.

    {name} in the command and in the words stands for a directory or a file of the fixture `world`.
    """

    name: str
    command: tuple[str, ...]
    words: tuple[str, ...]
    needs_torch: bool = False
    environment: dict[str, str] = field(default_factory=dict)


def complete(name: str, model: str, *words: str, flags: tuple[str, ...] = (), **options: Any) -> Mistake:
    return Mistake(name, ("complete", model, *PROMPT, *flags), words, **options)


def serve(name: str, *flags: str, words: tuple[str, ...], **options: Any) -> Mistake:
    port = () if any(flag.startswith("--port") for flag in flags) else ("--port", "0")
    return Mistake(name, ("serve", *port, *flags), words, **options)


MISTAKES = [
    # The model is not there.
    complete("missing path", "./nowhere", "no directory ./nowhere", "check the path"),
    complete("path misspelt", "{here}/gellu", "did you mean {here}/gelu?"),
    complete("a file, not a directory", "{gelu}/config.json", "is a file", "directory", "{gelu}"),
    complete("damaged GGUF file", "{here}/model.gguf", "not a usable GGUF file", "download or copy it again"),
    complete("empty directory", "{empty}", "{empty} is not a model directory", "no config.json", "give a directory"),
    complete("adapter, not a model", "{adapter}", "holds a LoRA adapter", "give its model", "--lora {adapter}"),
    complete("directory of directories", "{here}/outer", "did you mean {here}/outer/inner?"),
    complete("unknown repository", "some/model", "has no model some/model", "check the spelling"),
    complete("gated repository", "some/gated", "gated", "accept them at", "set HF_TOKEN"),
    complete("offline", "some/model", "HF_HUB_OFFLINE is set", "not in the cache", "start once without",
             environment={"HF_HUB_OFFLINE": "1"}),
    complete("no network", "some/model", "cannot reach http://127.0.0.1:9", "check the network", "built-in",
             environment={"HF_ENDPOINT": "http://127.0.0.1:9"}),
    # It is not usable.
    complete("unknown architecture", "{bloom}", "BloomForCausalLM is not supported", "pagewick models supported"),
    complete("architecture that is no name", "{noname}", "config.json names no architecture", "LlamaForCausalLM"),
    complete("very long entry", "{long}", "quantized with qqqq", "qqq ... qqq", "use another checkpoint of this model"),
    complete("device", "{device}", "tokenizer.json is a pipe, a device or a socket", "delete it"),
    complete("activation", "{gelu}", "hidden_act is 'mish'", "must be one of"),
    complete("rope scaling", "{yarn}", "rope_type is 'spiral'", "llama3"),
    complete("quantized", "{aqlm}", "quantized with aqlm (4 bits)", "use another checkpoint of this model"),
    complete("config.json is cut off", "{badconfig}", "config.json is not valid JSON", "download or copy"),
    complete("weights are cut off", "{truncated}", "model.safetensors is truncated or damaged", "download or copy"),
    complete("header is wrong", "{badheader}", "model.safetensors is truncated or damaged", "download or copy"),
    complete("missing shard", "{noshard}", "missing: model-00002-of-00002.safetensors", "download or copy"),
    complete("pickle", "{pickled}", "only pickle checkpoints", "refused", "save_pretrained"),
    complete("broken tokenizer.json", "{badtokenizer}", "tokenizer.json is not a usable tokenizer", "download"),
    complete("no tokenizer.json", "{notokenizer}", "has no tokenizer.json", "save_pretrained"),
    complete("no chat template", "{notemplate}", "no chat template", "chat model", flags=("--chat",), needs_torch=True),
    complete("weights of another model", "{othershape}", "its shape is [4096, 256]", "config.json says [4096, 128]",
             needs_torch=True),
    # The machine cannot.
    complete("weights larger than memory", "{huge}", "not enough memory", "GiB are free", "smaller model",
             needs_torch=True),
    complete("KV cache larger than memory", "pagewick-demo", "--kv-cache-memory asks for 1048576.0 GiB", "lower it",
             flags=("--kv-cache-memory", "1024TiB"), needs_torch=True),
    complete("KV blocks larger than memory", "pagewick-demo", "--num-kv-blocks asks for", "lower it",
             flags=("--num-kv-blocks", str(10**12)), needs_torch=True),
    complete("KV cache too small", "pagewick-demo", "the KV cache may use 1024 bytes", "raise --kv-cache-memory",
             flags=("--kv-cache-memory", "1KiB"), needs_torch=True),
    complete("no GPU", "pagewick-demo", "--device cuda is not available on this machine",
             "it has: cpu; give one, or none", flags=("--device", "cuda"), needs_torch=True,
             environment={"CUDA_VISIBLE_DEVICES": ""}),
    complete("heads cannot be divided", "pagewick-demo", "--tensor-parallel-size 3 does not divide", "1, 2, 4",
             flags=("--tensor-parallel-size", "3")),
    complete("context too long", "pagewick-demo", "--max-model-len 100000 is longer", "use at most 2048",
             flags=("--max-model-len", "100000")),
    complete("draft with other tokens", "pagewick-demo", "different vocabularies", "same family",
             flags=("--speculative-model", "{othertokens}")),
    complete("disk that cannot be written", "pagewick-demo", "cannot be kept in /proc/here", "--kv-cache-disk",
             flags=("--kv-cache-disk", "/proc/here"), needs_torch=True),
    # The server cannot listen, or would let anybody in.
    serve("port taken", "--port={port}", words=("cannot listen on 127.0.0.1:{port}", "another port with --port")),
    serve("an address of another machine", "--host", "203.0.113.7", "--api-key", "sixteen-letters-",
          words=("cannot listen on 203.0.113.7", "--host")),
    serve("a host without a key", "--host", "0.0.0.0", words=("lets others reach the server", "--api-key-file")),
    serve("key too short", "--api-key", "abc", words=("3 characters", "must have 8", "openssl rand")),
    serve("no key file", "--api-key-file", "{here}/nokeys", words=("{here}/nokeys cannot be read", "check the path")),
    serve("key file for everybody", "--api-key-file", "{here}/openkeys", words=("open to other users", "chmod 600")),
    serve("no chat template file", "--chat-template", "{here}/no.jinja",
          words=("cannot read the chat template", "check the path")),
    serve("broken chat template", "--chat-template", "{here}/bad.jinja", words=("chat template is not valid",)),
    serve("served architecture", "{bloom}", words=("BloomForCausalLM is not supported",)),
    serve("served weights larger than memory", "{huge}", words=("not enough memory",)),
    # The command line is wrong.
    serve("flag misspelt", "--max-modell-len", "3", words=("--max-modell-len", "did you mean --max-model-len?")),
    serve("flag twice", "--seed", "1", "--seed", "2", words=("--seed is given twice", "leave one out")),
    serve("flag of other programs", "--enable-moe-shared-loras", words=("--enable-moe", "not supported yet")),
    serve("format of checkpoints", "--quant", "aqlm", words=("--quantization aqlm", "cannot be loaded yet")),
    serve("another format of checkpoints", "--quant", "awq",
          words=("--quantization awq: pagewick-demo holds safetensors that are not quantized", "leave the flag out")),
    serve("flag of another command", "--plain", words=("--plain", "pagewick chat")),
    serve("no number", "--max-model-len", "long", words=("--max-model-len", "'long' is not a valid integer")),
    serve("no such dtype", "--dtype", "int8", words=("--dtype must be one of auto, float32", "got 'int8'")),
    serve("model twice", "a/b", "--model", "c/d", words=("the model is given twice", "leave one out")),
    serve("no TOML", "--config", "{here}/bad.toml", words=("bad.toml is not valid TOML", "line 1")),
    serve("no flag in a file", "--config", "{here}/key.toml", words=("prot is not a flag", "did you mean port?")),
    serve("variable", words=("PAGEWICK_MAX_MODEL_LEN", "'long' is not a valid integer"),
          environment={"PAGEWICK_MAX_MODEL_LEN": "long"}),
    Mistake("unknown command", ("sevre",), ("No such command 'sevre'", "did you mean serve?")),
    Mistake("no command", ("--port", "8000"), ("--port comes after a command", "pagewick serve --port")),
    Mistake("nothing to complete", ("complete",), ("nothing to complete", "--prompts")),
    Mistake("prompt without its flag", ("complete", "What is it?"), ("stands where a model does", "after -p")),
    Mistake("engine flags for a server", ("chat", "--url", "http://127.0.0.1:9/v1", "-q", "q4_k_m"),
            ("-q has no effect with --url", "leave it out")),
    complete("revision of a model on this disk", "{gelu}", "--revision has no effect", "on this disk", "leave it out",
             flags=("--revision", "main")),
    complete("no tokenizer there", "pagewick-demo", "--tokenizer: there is no directory ./none",
             flags=("--tokenizer", "./none")),
    complete("no draft model there", "pagewick-demo", "--speculative-model: there is no directory ./none",
             flags=("--speculative-model", "./none")),
    complete("no adapter there", "pagewick-demo", "--lora-modules sql: there is no directory ./none",
             flags=("--lora-modules", "sql=./none")),
    complete("no speculation with a draft model", "pagewick-demo", "--speculative-method none", "leave one of them out",
             flags=("--speculative-method", "none", "--speculative-model", "{gelu}")),
    serve("size of no disk", "--kv-cache-disk-size", "1GiB", words=("without --kv-cache-disk", "leave it out")),
    serve("no time for requests", "--request-timeout", "0", words=("--request-timeout must be a number above 0",)),
    Mistake("no server", ("chat", "--url", "http://127.0.0.1:9/v1"), ("http://127.0.0.1:9/v1", "the server runs")),
    Mistake("no prompts", ("complete", "--file", "{here}/none.txt"), ("cannot read {here}/none.txt", "check the path")),
]  # fmt: skip
TORCH_FREE = [mistake for mistake in MISTAKES if not mistake.needs_torch]


def write_model(directory: Path, *, without: tuple[str, ...] = (), config: Any = None, **files: bytes) -> None:
    """Write the built-in model without some files, with other entries of config.json, and other files (__: a dot)."""
    directory.mkdir(parents=True)
    for file in MODEL_DIR.iterdir():
        if file.name not in without and file.name.replace(".", "__") not in files:
            (directory / file.name).symlink_to(file)
    if config is not None:
        changed = {**json.loads((MODEL_DIR / "config.json").read_text(encoding="utf-8")), **config}
        (directory / "config.json").unlink()
        (directory / "config.json").write_text(json.dumps(changed), encoding="utf-8")
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_bytes(content)


def write_huge_model(directory: Path) -> None:
    """Write a model that is twice as large as this machine's memory, as a sparse file."""
    width = 2**24
    changes = {"intermediate_size": width, "num_hidden_layers": 1 + 2 * MACHINE_BYTES // (3 * 256 * width * 2)}
    config = json.loads((MODEL_DIR / "config.json").read_text(encoding="utf-8")) | changes
    header: dict[str, Any] = {}
    end = 0
    for tensor in model_tensors(read_config(config)):
        start, end = end, end + 2 * tensor.num_elements
        header[tensor.name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    write_model(directory, config=changes, model__safetensors=struct.pack("<Q", len(encoded)) + encoded)
    os.truncate(directory / "model.safetensors", 8 + len(encoded) + end)


def write_other_tokens(directory: Path) -> None:
    """Write the built-in model with two tokens exchanged."""
    tokenizer = json.loads((MODEL_DIR / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    first, second = (token for token, token_id in vocabulary.items() if token_id in (300, 301))
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    write_model(directory, tokenizer__json=json.dumps(tokenizer).encode())


def write_world(here: Path) -> None:
    """Write every model and file of the table below `here`."""
    weights = (MODEL_DIR / "model.safetensors").read_bytes()
    tokenizer_config = json.loads((MODEL_DIR / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokenizer_config.pop("chat_template")
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    index = json.dumps({"weight_map": dict(zip("ab", names, strict=True))}).encode()
    (here / "empty").mkdir()
    (here / "adapter").mkdir()
    (here / "adapter" / "adapter_config.json").write_text("{}")
    write_model(here / "outer" / "inner")
    write_model(here / "bloom", config={"architectures": ["BloomForCausalLM"]})
    write_model(here / "gelu", config={"hidden_act": "mish"})
    write_model(here / "yarn", config={"rope_scaling": {"rope_type": "spiral", "factor": 4.0}})
    write_model(here / "aqlm", config={"quantization_config": {"quant_method": "aqlm", "bits": 4}})
    write_model(here / "noname", config={"architectures": ["\x1b[2J\n\n\n\n\n\nX"]})
    write_model(here / "long", config={"quantization_config": {"quant_method": "q" * 10**5}})
    write_model(here / "device", without=("tokenizer.json",))
    (here / "device" / "tokenizer.json").symlink_to("/dev/zero")
    write_model(here / "othershape", config={"hidden_size": 128})
    write_model(here / "badconfig", config__json=b'{"architectures": ')
    write_model(here / "truncated", model__safetensors=weights[: len(weights) // 3])
    write_model(here / "badheader", model__safetensors=struct.pack("<Q", 9) + b"{{{{{{{{{")
    write_model(here / "noshard", without=("model.safetensors",), model__safetensors__index__json=index)
    shutil.copy(MODEL_DIR / "model.safetensors", here / "noshard" / names[0])
    write_model(here / "pickled", without=("model.safetensors",), pytorch_model__bin=b"\x80")
    write_model(here / "badtokenizer", tokenizer__json=b'{"version": "1.0", "model"')
    write_model(here / "notokenizer", without=("tokenizer.json",))
    write_model(here / "notemplate", tokenizer_config__json=json.dumps(tokenizer_config).encode())
    write_huge_model(here / "huge")
    write_other_tokens(here / "othertokens")
    texts = {
        "bad.toml": "port = = 3",
        "key.toml": "[serve]\nprot = 3",
        "bad.jinja": "{% for x in %}",
        "model.gguf": "GGUF",
    }
    for name, text in texts.items():
        (here / name).write_text(text, encoding="utf-8")
    (here / "openkeys").write_text("a-key-that-is-long-enough\n", encoding="utf-8")
    (here / "openkeys").chmod(0o644)


Ended = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The directory or file of every {name}, and the address of a hub with a gated model."""
    here = tmp_path_factory.mktemp("world")
    write_world(here)
    with socket.socket() as taken, running_hub(HubServer()) as hub:
        hub.add("some/gated", {"config.json": b"{}", "model.safetensors": b"x"}, gated=True)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        names = {path.name: str(path) for path in here.iterdir() if path.is_dir()}
        yield names | {"here": str(here), "port": str(taken.getsockname()[1]), "hub": hub.endpoint}


@pytest.fixture(scope="module")
def ended(world: dict[str, str]) -> Iterator[Callable[[Mistake], Ended]]:
    """A function that waits for a mistake's process to end; two processes run at the same time."""

    # Read here, not in the threads: pytest changes the environment with every test.
    left = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PAGEWICK_"))}

    def run(mistake: Mistake) -> Ended:
        own = {"HF_HOME": f"{world['here']}/hf", "HF_ENDPOINT": world["hub"], "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
        arguments = [part.format_map(world) for part in mistake.command]
        return subprocess.run(
            [sys.executable, "-c", SCRIPT, *arguments],
            env={**left, **own, **mistake.environment},
            cwd=world["here"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    with ThreadPoolExecutor(2) as pool:
        futures: dict[str, Future[Ended]] = {mistake.name: pool.submit(run, mistake) for mistake in MISTAKES}
        yield lambda mistake: futures[mistake.name].result()
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_the_error_of_a_mistake_is_short_and_says_what_to_do(
    mistake: Mistake, ended: Callable[[Mistake], Ended], world: dict[str, str]
) -> None:
    result = ended(mistake)
    *lines, torch = result.stderr.splitlines()
    text = " ".join(" ".join(lines).split())
    assert result.returncode in (1, 2), text
    assert len(lines) <= MAX_LINES and max(map(len, lines)) < 2100, result.stderr
    assert "Traceback" not in text
    assert re.search(r"\b[Ee]rror: ", text), text
    for word in mistake.words:
        assert word.format_map(world) in text, text
    assert torch == "no torch" or mistake.needs_torch


def test_the_same_commands_without_a_mistake_work(ended: Callable[[Mistake], Ended], world: dict[str, str]) -> None:
    """Without its mistake, a model of the table works; otherwise the table would prove nothing."""
    command = [sys.executable, "-m", "pagewick", "complete", f"{world['here']}/outer/inner", *PROMPT, "--tp", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert result.returncode == 0, result.stderr


def test_the_table_has_many_mistakes_and_few_need_torch() -> None:
    assert len(MISTAKES) == len({mistake.name for mistake in MISTAKES}) >= 24
    assert len(TORCH_FREE) > 2 * (len(MISTAKES) - len(TORCH_FREE))
