"""The lines and snippets of the documents, and how each is run here."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DEEP = os.environ.get("PAGEWICK_DEEP") == "1"

# The program's name, and the flags of cargo, a script or mpirun before it, become ours.
PROGRAMS = {
    r"sudo mpirun .* target/release/candle-vllm": "pagewick serve",
    r"target/(release|debug)/candle-vllm": "pagewick serve",
    r"python -m vllm_rs\.": "python -m pagewick.vllm_rs.",
    r"python3 examples/": "python3 examples/",
}
_BUILD_AND_RUN = r"(cargo run|\./run\.sh) (--release )?(--features \S+ )?--"
_ENVIRONMENT = re.compile(r"(\w+)=(\S+) ")
_MODEL = re.compile(r"(--(?:weight-path|weight-file|model-id|m|w|f) |<)([^ <>]+|MODEL NAME>)(?= |$)")


@dataclass(frozen=True)
class Line:
    """A command line of a document; lines.toml explains the fields."""

    document: str
    printed: str
    expect: dict[str, Any]
    real: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """The variables that it sets, for itself or through mpirun."""
        return dict(re.findall(r"(?:^|-x )(\w+)=(\S+)", self._plain))

    @property
    def packed(self) -> str | None:
        """The format in which the model's checkpoint must be: gptq, awq or marlin; None if it must be in none."""
        name = self.expect.get("quantization")
        return name if name in ("gptq", "awq", "marlin") else None

    @property
    def published(self) -> tuple[str, str] | None:
        """The repository on a hub and its GGUF file, if the line names both."""
        given = {flag.strip("- "): value for flag, value in _MODEL.findall(self._plain)}
        model, file = given.get("m", given.get("model-id")), given.get("f", given.get("weight-file", "/"))
        return None if file.startswith("/") or model is None or "weight-path" in given else (model, file)

    def words(self, model: Path, gguf: Path) -> list[str]:
        """Return the command here, with another program's name and these paths of models.

        Names on a hub stay if a GGUF file is among them.
        """
        line = _ENVIRONMENT.sub("", self._plain) if not self._plain.startswith("sudo") else self._plain
        ours = "pagewick serve" if self.document in ("hanzo", "candle-vllm", "candle-vllm-2024") else "vllm_rs"
        ours = ours.replace("vllm_rs", "python -m pagewick.vllm_rs")
        for program, name in {_BUILD_AND_RUN: ours, **PROGRAMS}.items():
            line, count = re.subn(f"^{program}", name, line)
            if count:
                break
        assert count, f"no program in {line}"

        def path_here(match: re.Match[str]) -> str:
            flag, path = match.groups()
            is_in_directory = "--weight-path" in line and "--weight-file" in line
            if self.published is not None or (is_in_directory and flag == "--model-id "):
                return match[0]
            here = gguf.parent if is_in_directory else model
            if path.endswith(".gguf"):
                here = Path(gguf.name) if is_in_directory else gguf
            return f"{flag.replace('<', '')}{here}"

        return shlex.split(_MODEL.sub(path_here, line))

    @property
    def _plain(self) -> str:
        """The line without the brackets that mark optional parts."""
        return re.sub(r"[\[\]]", "", self.printed)


@dataclass(frozen=True)
class Snippet:
    """A program or a curl command of a document; snippets.toml explains the fields."""

    document: str
    kind: str
    printed: str


def read_lines() -> list[Line]:
    return [Line(**entry) for entry in _read("lines.toml")["line"]]


def read_snippets() -> list[Snippet]:
    return [Snippet(**entry) for entry in _read("snippets.toml")["snippet"]]


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((HERE / name).read_text(encoding="utf-8"))
