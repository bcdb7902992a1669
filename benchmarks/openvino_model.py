"""The model of a comparison in OpenVINO's format, written by optimum-intel, and the process that runs it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

from benchmarks.accuracy import LogitsCommand
from benchmarks.weight_files import BF16
from pagewick.cli.random_model import bench_cache_dir
from pagewick.errors import ConfigError

VARIABLE: Final = "PAGEWICK_PEER_OPENVINO"
SCRIPT: Final = Path(__file__).with_name("peer_openvino.py")
LOGITS_SCRIPT: Final = Path(__file__).with_name("logits_openvino.py")
# The nearest format: signed bytes with a scale per row, or 4 bits with a scale and a zero point per group of 128.
_NEAREST: Final = {BF16: "fp16", "q8_0": "int8", "q4_0": "int4", "q4_k_m": "int4"}
_FOUR_BITS: Final = ("--group-size", "128", "--ratio", "1.0")
_PACKAGE: Final = "openvino_genai"
_WEIGHTS: Final = "openvino_model.bin"


class OpenVino:
    """environment: the directory of a virtual environment with openvino-genai and optimum-intel.

    name: with its version and the format. num_bytes: of the weights. Raises ConfigError if it lacks them, or if the
    model cannot be written.
    """

    def __init__(self, environment: Path, model: Path, name: str) -> None:
        self.python = environment / "bin" / "python"
        self.weights = _NEAREST[name]
        found = environment.glob(f"lib/*/site-packages/{_PACKAGE}-*.dist-info")
        versions = [file.name.removeprefix(f"{_PACKAGE}-").removesuffix(".dist-info") for file in found]
        self.name = " ".join(["OpenVINO", *versions, self.weights])
        program = environment / "bin" / "optimum-cli"
        if not program.is_file():
            raise ConfigError(
                f"{VARIABLE}: there is no optimum-cli in {environment}; it must be the directory of a virtual "
                "environment with openvino-genai and optimum-intel (benchmarks/README.md has the commands)"
            )
        self.directory = bench_cache_dir() / f"{model.name}-openvino-{self.weights}"
        if not self.directory.is_dir():
            self._write(program, model)
        self.num_bytes = (self.directory / _WEIGHTS).stat().st_size

    def logits_command(self, num_threads: int) -> LogitsCommand:
        return LogitsCommand([str(self.python), str(LOGITS_SCRIPT), str(self.directory), str(num_threads)])

    def _write(self, program: Path, model: Path) -> None:
        unfinished = self.directory.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        command = [str(program), "export", "openvino", "-m", str(model), "--task", "text-generation-with-past"]
        command += ["--weight-format", self.weights, *(_FOUR_BITS if self.weights == "int4" else ()), str(unfinished)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ConfigError(f"optimum-cli cannot convert {model}: {done.stderr.strip()[-400:]}")
        unfinished.rename(self.directory)
