"""llama.cpp as a contestant: its own tools, from the source tree in which they were built.

llama-batched-bench takes the place of a library. It decodes random tokens and samples none, which is less work than the
others do. Every run is a new process, whose loading time is not counted. The HTTP server is llama-server.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from pagewick.cli.bench import Scenario, Timing
from pagewick.errors import ConfigError

VARIABLE = "PAGEWICK_PEER_LLAMA_CPP"
# llama-server gives every slot the same part of its context, and is slower where they share one.
SLOT_LEN = 640
TOOLS = ("llama-batched-bench", "llama-server")
# The converter identifies a tokenizer by the ids of a certain text. It does not know ours, which was trained here and
# splits words as Qwen2's does. It also looks for a sentencepiece file first, with a library that may not be installed;
# there is no such file.
CONVERT = """
import runpy, sys
from pathlib import Path
tree, model, file = sys.argv[1:4]
sys.path[:0] = [tree, str(Path(tree) / "gguf-py")]
from conversion.base import TextModel

def no_sentencepiece(self):
    raise FileNotFoundError("tokenizer.model")

TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
TextModel._set_vocab_sentencepiece = no_sentencepiece
sys.argv = ["convert_hf_to_gguf.py", model, "--outtype", "bf16", "--outfile", file]
runpy.run_path(str(Path(tree) / "convert_hf_to_gguf.py"), run_name="__main__")
"""


class LlamaCpp:
    """tree: llama.cpp's source, with build/bin below it. gguf: the converted model's file, written if it is missing.

    Raises ConfigError if the tools are missing or the model cannot be converted.
    """

    def __init__(self, tree: Path, model: Path, gguf: Path, num_threads: int) -> None:
        self._bin = tree / "build" / "bin"
        missing = [tool for tool in TOOLS if not (self._bin / tool).is_file()]
        if missing:
            raise ConfigError(
                f"{VARIABLE}: there is no {' and no '.join(missing)} in {self._bin}; it must be the directory of "
                "llama.cpp's source, built (benchmarks/README.md has the commands)"
            )
        self._gguf = gguf
        self._threads = ["-t", str(num_threads), "-tb", str(num_threads)]
        if not gguf.is_file():
            self._convert(tree, model)
        self.name = f"llama.cpp {self._version(tree)}"

    def run(self, scenario: Scenario, seed: int) -> Timing:
        """Run a scenario once; the tool draws its own tokens, and a new process has no cache of them."""
        streams, prompt_len = scenario.num_streams, scenario.num_prompt_tokens
        # A prefill gives the first token: one step fewer than there are tokens.
        num_steps = max(scenario.num_output_tokens - 1, 1)
        sizes = {"-npp": prompt_len, "-ntg": num_steps, "-npl": streams, "-c": streams * (prompt_len + num_steps)}
        command = [str(self._bin / "llama-batched-bench"), "-m", str(self._gguf), *self._threads]
        command += ["--output-format", "jsonl"]
        command += [str(part) for pair in sizes.items() for part in pair]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or len(lines) != 1:
            raise ConfigError(f"llama-batched-bench ended with {done.returncode}: {done.stderr.strip()[-400:]}")
        return timing_of(scenario, json.loads(lines[0]))

    def close(self) -> None:
        """Nothing runs between measurements."""

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "LD_LIBRARY_PATH": str(self._bin)}

    def server_command(self, port: int, num_streams: int) -> list[str]:
        command = [str(self._bin / "llama-server"), "-m", str(self._gguf), *self._threads, "--alias", "m", "--no-ui"]
        command += ["-c", str(num_streams * SLOT_LEN), "-np", str(num_streams), "--cache-ram", "0"]
        return [*command, "--host", "127.0.0.1", "--port", str(port)]

    def _version(self, tree: Path) -> str:
        """Return the tensor library's version from its build files, since the source has no version of its own."""
        text = (tree / "ggml" / "CMakeLists.txt").read_text(encoding="utf-8")
        parts = [re.search(rf"GGML_VERSION_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
        return "(ggml " + ".".join(part.group(1) if part else "?" for part in parts) + ")"

    def _convert(self, tree: Path, model: Path) -> None:
        unfinished = self._gguf.with_suffix(".unfinished")
        command = [sys.executable, "-c", CONVERT, str(tree), str(model), str(unfinished)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ConfigError(f"llama.cpp cannot convert {model}: {done.stderr.strip()[-400:]}")
        unfinished.rename(self._gguf)


def timing_of(scenario: Scenario, found: dict[str, float]) -> Timing:
    """Convert a line of llama-batched-bench to a Timing, without the step that it makes after a prefill."""
    first = found["t_pp"]
    if scenario.is_prefill:
        return Timing(first, first, 0)
    return Timing(first, first + found["t_tg"], scenario.num_streams * (scenario.num_output_tokens - 1))
