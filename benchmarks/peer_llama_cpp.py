"""llama.cpp and ik_llama.cpp as contestants: their own tools, from the source trees in which they were built.

llama-batched-bench takes the place of a library. It decodes random tokens and samples none, which is less work than the
others do. Every run is a new process, whose loading time is not counted. The HTTP server is llama-server. Logits come
from a program of ours, logits_llama.c, that is linked to the libraries of the tree.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path

from benchmarks.accuracy import LogitsCommand
from benchmarks.compiled import compile_program
from pagewick.cli.benchmarking.scenarios import Scenario, Timing
from pagewick.errors import ConfigError

VARIABLE = "PAGEWICK_PEER_LLAMA_CPP"
IK_VARIABLE = "PAGEWICK_PEER_IK_LLAMA_CPP"
# llama-server gives every slot the same part of its context, and is slower where they share one.
SLOT_LEN = 640
TOOLS = ("llama-batched-bench", "llama-server")
REPACK = "-rtr"
LOGITS_SOURCE = Path(__file__).with_name("logits_llama.c")
# The other libraries of the tree are found when the program starts.
_SHARED = ("-Wl,--allow-shlib-undefined",)


class LlamaCpp:
    """tree: the source, with build/bin below it. gguf: the model's file. Raises ConfigError if tools are missing."""

    title = "llama.cpp"
    variable = VARIABLE
    tools: tuple[str, ...] = TOOLS
    options: tuple[str, ...] = ("--output-format", "jsonl")
    # Options of the compiler for logits_llama.c.
    definitions: tuple[str, ...] = ()

    def __init__(self, tree: Path, gguf: Path, num_threads: int) -> None:
        self._tree, self._bin = tree, tree / "build" / "bin"
        missing = [tool for tool in self.tools if not (self._bin / tool).is_file()]
        if missing:
            raise ConfigError(
                f"{self.variable}: there is no {' and no '.join(missing)} in {self._bin}; it must be the directory of "
                f"{self.title}'s source, built (benchmarks/README.md has the commands)"
            )
        self._gguf = gguf
        self._num_threads = num_threads
        self._threads = ["-t", str(num_threads), "-tb", str(num_threads)]
        # Options that someone tries; the engine's name in the result tells them.
        self._tried = shlex.split(os.environ.get(f"{self.variable}_OPTIONS", ""))
        self.name = " ".join(part for part in (self.title, self._version(tree), *self._tried) if part)

    def run(self, scenario: Scenario, seed: int) -> Timing:
        """Run a scenario once; the tool draws its own tokens, and a new process has no cache of them."""
        streams, prompt_len = scenario.num_streams, scenario.num_prompt_tokens
        # A prefill gives the first token: one step fewer than there are tokens.
        num_steps = max(scenario.num_output_tokens - 1, 1)
        sizes = {"-npp": prompt_len, "-ntg": num_steps, "-npl": streams, "-c": streams * (prompt_len + num_steps)}
        command = [str(self._bin / "llama-batched-bench"), "-m", str(self._gguf), *self._threads]
        command += [*self.options, *self._tried, *(str(part) for pair in sizes.items() for part in pair)]
        # ik_llama.cpp leaves a log file where it runs.
        there = tempfile.gettempdir()
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment, cwd=there)
        # ik_llama.cpp prints its results to stderr, among its messages.
        found = self.read_output(done.stdout + done.stderr)
        if done.returncode or len(found) != 1:
            raise ConfigError(f"llama-batched-bench ended with {done.returncode}: {done.stderr.strip()[-400:]}")
        return timing_of(scenario, found[0])

    def read_output(self, output: str) -> list[dict[str, float]]:
        """Return a dictionary for each line of llama-batched-bench's results."""
        return [json.loads(line) for line in output.splitlines() if line.startswith("{")]

    def close(self) -> None:
        """Nothing runs between measurements."""

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "LD_LIBRARY_PATH": str(self._bin)}

    def logits_command(self, vocab_size: int, directory: Path) -> LogitsCommand:
        """Compile logits_llama.c into a directory, and return its command. Raises ConfigError."""
        libraries = sorted({file.parent for file in (self._tree / "build").rglob("lib*.so")})
        if not any((place / "libllama.so").is_file() for place in libraries):
            raise ConfigError(
                f"{self.variable}: there is no libllama.so in {self._tree / 'build'}; build shared libraries"
            )
        options = [f"-I{self._tree / place}" for place in ("include", "ggml/include")]
        options += [part for place in libraries for part in (f"-L{place}", f"-Wl,-rpath,{place}")]
        program = compile_program(
            LOGITS_SOURCE, directory / "logits_llama", [*self.definitions, *options, "-lllama", *_SHARED],
            f"computing {self.title}'s logits",
        )  # fmt: skip
        arguments = [str(program), str(self._gguf), str(self._num_threads), str(vocab_size)]
        return LogitsCommand(arguments, self.environment)

    def server_command(self, port: int, num_streams: int) -> list[str]:
        command = [str(self._bin / "llama-server"), "-m", str(self._gguf), *self._threads, "--alias", "m", "--no-ui"]
        command += ["-c", str(num_streams * SLOT_LEN), "-np", str(num_streams), "--cache-ram", "0"]
        return [*command, *self._tried, "--host", "127.0.0.1", "--port", str(port)]

    def _version(self, tree: Path) -> str:
        """Return the tensor library's version from its build files, since the source has no version of its own."""
        text = (tree / "ggml" / "CMakeLists.txt").read_text(encoding="utf-8")
        parts = [re.search(rf"GGML_VERSION_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
        return "(ggml " + ".".join(part.group(1) if part else "?" for part in parts) + ")"


class IkLlamaCpp(LlamaCpp):
    """ik_llama.cpp, which fuses experts, gates and sums by itself.

    Its llama-batched-bench prints a table: | PP | TG | B | N_KV | T_PP s | S_PP t/s | T_TG s | ...
    """

    title = "ik_llama.cpp"
    variable = IK_VARIABLE
    tools = TOOLS[:1]
    options: tuple[str, ...] = ("-fa", "on")
    definitions: tuple[str, ...] = ("-DPW_IK",)

    def read_output(self, output: str) -> list[dict[str, float]]:
        rows = (
            [cell.strip() for cell in line.split("|")[1:-1]] for line in output.splitlines() if line.startswith("|")
        )
        return [{"t_pp": float(row[4]), "t_tg": float(row[6])} for row in rows if row[0].isdigit()]

    def _version(self, tree: Path) -> str:
        return ""


class RepackedIkLlamaCpp(IkLlamaCpp):
    """ik_llama.cpp with rows of weights interleaved when it loads them, which is faster for few tokens.

    For 32 rows and more it otherwise converts weights to another format in each product.
    """

    options = (REPACK, *IkLlamaCpp.options)
    definitions = (*IkLlamaCpp.definitions, "-DPW_REPACK")

    def _version(self, tree: Path) -> str:
        return REPACK


def timing_of(scenario: Scenario, found: dict[str, float]) -> Timing:
    """Convert a line of llama-batched-bench to a Timing, without the step that it makes after a prefill."""
    first = found["t_pp"]
    if scenario.is_prefill:
        return Timing(first, first, 0)
    return Timing(first, first + found["t_tg"], scenario.num_streams * (scenario.num_output_tokens - 1))
