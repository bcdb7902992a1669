"""The engines that are compared: which are installed, and how each is started as a library and as a server."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol

import click

import pagewick
from benchmarks import openvino_model, peer_llama_cpp, peer_pagewick, peer_vllm
from benchmarks.accuracy import LogitsCommand, pagewick_logits
from benchmarks.limits import StoredWeights
from benchmarks.measurements import MAX_LEN, MAX_STREAMS, Face
from benchmarks.openvino_model import OpenVino
from benchmarks.peer import Peer
from benchmarks.peer_llama_cpp import IkLlamaCpp, LlamaCpp, RepackedIkLlamaCpp
from benchmarks.peer_vllm import Vllm
from benchmarks.server_process import ServerProcess, free_port
from benchmarks.weight_files import BF16, bits_per_weight, gguf_file, stored_weights
from pagewick.cli.benchmarking.scenarios import Scenario, Timing
from pagewick.cli.random_model import SHAPES
from pagewick.errors import ConfigError

IK_KINDS = {"ik_llama.cpp": IkLlamaCpp, "ik_llama.cpp-rtr": RepackedIkLlamaCpp}
ENGINES = ("pagewick", "llama.cpp", *IK_KINDS, "openvino", "vllm", "transformers")
CLIENT_NICENESS = 19


class Runner(Protocol):
    """An engine that is ready, as a library or as a server."""

    def run(self, scenario: Scenario, seed: int) -> Timing:
        """Run a scenario once."""

    def close(self) -> None:
        """End its processes."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """An engine in the comparison.

    name: with its version. library, server: start it at each face; None if it does not have that face. fields: more
    fields for its server's requests. max_http_len: the longest sequence, in tokens, that its server supports. bits: of
    a weight, scales included.
    """

    key: str
    name: str
    library: Callable[[], Runner] | None = None
    server: Callable[[], ServerProcess] | None = None
    served_model: str = "m"
    fields: dict[str, object] = field(default_factory=dict)
    max_http_len: int = MAX_LEN
    bits: float = 16.0
    logits: Callable[[], LogitsCommand] | None = None
    is_kept: bool = True

    def at(self, faces: Collection[str]) -> Contestant:
        """Return it with these faces only."""
        return replace(
            self,
            library=self.library if Face.LIBRARY in faces else None,
            server=self.server if Face.HTTP in faces else None,
        )

    def can_run(self, scenario: Scenario, face: Face) -> bool:
        if face is Face.LIBRARY:
            return self.library is not None
        return self.server is not None and scenario.max_len <= self.max_http_len

    def client(self, server: ServerProcess, vocab_size: int) -> Peer:
        """Return the client of a server; its high niceness lets the server have the processors first."""
        arguments = (server.url, self.served_model, vocab_size, json.dumps(self.fields))
        return Peer("benchmarks.peer_http", *arguments, niceness=CLIENT_NICENESS)


@dataclass(frozen=True)
class Field:
    """The model and the settings of a comparison.

    model: the checkpoint in bf16. logs: the directory of the servers' log files. format: the weights', one of FORMATS.
    """

    shape: str
    model: Path
    num_threads: int
    logs: Path
    format: str = BF16

    def contestants(self, wanted: Iterable[str]) -> list[Contestant]:
        """Return the wanted engines that are installed, in the order of ENGINES; explain on stderr what is left out."""
        makers: dict[str, Callable[[], Contestant | None]] = {
            "pagewick": self._pagewick, "llama.cpp": self._llama_cpp, "openvino": self._openvino,
            "vllm": self._vllm, "transformers": self._transformers,
            **{key: partial(self._ik_llama_cpp, key) for key in IK_KINDS},
        }  # fmt: skip
        found = (makers[key]() for key in ENGINES if key in set(wanted))
        return [one for one in found if one is not None]

    @property
    def vocab_size(self) -> int:
        return SHAPES[self.shape].vocab_size

    @cached_property
    def gguf(self) -> Path:
        """The model in a GGUF file, written by llama.cpp. Raises ConfigError if that is not installed."""
        tree = _directory(peer_llama_cpp.VARIABLE, "llama.cpp")
        if tree is None:
            raise ConfigError(f"{peer_llama_cpp.VARIABLE} must be set: llama.cpp's tools write the GGUF files")
        return gguf_file(tree, self.model, self.format)

    @cached_property
    def weights(self) -> StoredWeights:
        """The sizes of our weights."""
        return stored_weights(None if self.format == BF16 else self.gguf, SHAPES[self.shape])

    @property
    def _bits(self) -> float:
        return bits_per_weight(self.weights.all, SHAPES[self.shape])

    def _pagewick(self) -> Contestant:
        model = self.model if self.format == BF16 else self.gguf

        def serve() -> ServerProcess:
            port = free_port()
            command = peer_pagewick.server_command(
                model, self.num_threads, port, max_len=MAX_LEN, num_streams=MAX_STREAMS
            )
            return ServerProcess(command, port, self.logs / "pagewick.log", model=str(model))

        name = f"Pagewick {pagewick.__version__}"
        # Several streams at once need more sequences than the default of one.
        library = ("benchmarks.peer_pagewick", model, "cpu", self.num_threads, MAX_LEN, MAX_STREAMS)
        return Contestant(
            "pagewick", name, lambda: Peer(*library), serve, served_model=str(model), bits=self._bits,
            logits=lambda: pagewick_logits(model, "auto", self.num_threads),
        )  # fmt: skip

    def _llama_cpp(self) -> Contestant | None:
        tree = _directory(peer_llama_cpp.VARIABLE, "llama.cpp")
        if tree is None:
            return None
        llama_cpp = LlamaCpp(tree, self.gguf, self.num_threads)

        def serve() -> ServerProcess:
            port = free_port()
            command = llama_cpp.server_command(port, MAX_STREAMS)
            log = self.logs / "llama.cpp.log"
            return ServerProcess(command, port, log, model="m", environment=llama_cpp.environment)

        return Contestant(
            "llama.cpp", llama_cpp.name, lambda: llama_cpp, serve, fields={"cache_prompt": False},
            max_http_len=peer_llama_cpp.SLOT_LEN, bits=self._bits,
            logits=lambda: llama_cpp.logits_command(self.vocab_size, self.logs), is_kept=False,
        )  # fmt: skip

    def _ik_llama_cpp(self, key: str) -> Contestant | None:
        tree = _directory(peer_llama_cpp.IK_VARIABLE, key)
        if tree is None:
            return None
        ik_llama_cpp = IK_KINDS[key](tree, self.gguf, self.num_threads)
        return Contestant(
            key, ik_llama_cpp.name, lambda: ik_llama_cpp, bits=self._bits,
            logits=lambda: ik_llama_cpp.logits_command(self.vocab_size, self.logs), is_kept=False,
        )  # fmt: skip

    def _openvino(self) -> Contestant | None:
        environment = _directory(openvino_model.VARIABLE, "openvino")
        if environment is None:
            return None
        found = OpenVino(environment, self.model, self.format)
        arguments = (openvino_model.SCRIPT, found.directory, self.num_threads, MAX_STREAMS, MAX_LEN)
        bits = bits_per_weight(found.num_bytes, SHAPES[self.shape])
        return Contestant(
            "openvino", found.name, lambda: Peer(*arguments, python=found.python), bits=bits,
            logits=lambda: found.logits_command(self.num_threads),
        )  # fmt: skip

    def _vllm(self) -> Contestant | None:
        environment = _directory(peer_vllm.VARIABLE, "vllm")
        if environment is None or self._is_left_out("vllm"):
            return None
        vllm = Vllm(environment)

        def serve() -> ServerProcess:
            port = free_port()
            command = vllm.server_command(self.model, port, max_len=MAX_LEN, num_streams=MAX_STREAMS)
            variables = vllm.server_environment(self.num_threads)
            return ServerProcess(command, port, self.logs / "vllm.log", model="m", environment=variables)

        return Contestant("vllm", vllm.name, None, serve)

    def _transformers(self) -> Contestant | None:
        if self._is_left_out("transformers"):
            return None
        if importlib.util.find_spec("transformers") is None:
            click.echo("left out: transformers is not installed; make test installs it", err=True)
            return None
        name = f"transformers {importlib.metadata.version('transformers')}"
        library = ("benchmarks.peer_transformers", self.model, "cpu", self.num_threads)
        return Contestant("transformers", name, lambda: Peer(*library))

    def _is_left_out(self, engine: str) -> bool:
        """Say on stderr that an engine has no such weights on a CPU, if that is so."""
        if self.format != BF16:
            click.echo(f"left out: {engine}, which is compared in bf16 only", err=True)
        return self.format != BF16


@contextmanager
def open_runners(contestants: Iterable[Contestant], field: Field) -> Iterator[dict[tuple[str, Face], Runner]]:
    """Yields every contestant at every face that it has, loaded; all of them end with the block."""
    runners: dict[tuple[str, Face], Runner] = {}
    with ExitStack() as stack:
        for one in contestants:
            if one.library is not None:
                runners[one.key, Face.LIBRARY] = runner = one.library()
                stack.callback(runner.close)
            if one.server is not None:
                server = one.server()
                stack.callback(server.stop)
                runners[one.key, Face.HTTP] = client = one.client(server, field.vocab_size)
                stack.callback(client.close)
        yield runners


def _directory(variable: str, name: str) -> Path | None:
    value = os.environ.get(variable, "")
    if not value:
        click.echo(f"left out: {name}, because {variable} is not set (benchmarks/README.md)", err=True)
        return None
    return Path(value).expanduser().absolute()
