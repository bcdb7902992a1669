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

# Missing features: words of the one error that names each.
MISSING = {
    "quantization": "quantized weights are not supported yet",
    "GGUF": "GGUF file",
    "fp8": "fp8 KV cache",
}
# The program's name, and the flags of cargo, a script or mpirun before it, become ours.
PROGRAMS = {
    r"sudo mpirun .* target/release/candle-vllm": "pagewick serve",
    r"target/(release|debug)/candle-vllm": "pagewick serve",
    r"python -m vllm_rs\.": "python -m pagewick.vllm_rs.",
    r"python3 examples/": "python3 examples/",
}
_BUILD_AND_RUN = r"(cargo run|\./run\.sh) (--release )?(--features \S+ )?--"
_ENVIRONMENT = re.compile(r"(\w+)=(\S+) ")
_MODEL = re.compile(r"(--(?:weight-path|model-id|m|w) |<)([^ <>]+|MODEL NAME>)(?= |$)")


@dataclass(frozen=True)
class Line:
    """A command line of a document; lines.toml explains the fields."""

    document: str
    printed: str
    expect: dict[str, Any]
    missing: tuple[str, ...] = ()
    real: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """The variables that it sets, for itself or through mpirun."""
        return dict(re.findall(r"(?:^|-x )(\w+)=(\S+)", self._plain))

    def words(self, model: Path, gguf: Path) -> list[str]:
        """Return the command here, with another program's name and these paths of models."""
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
            return f"{flag.replace('<', '')}{gguf if path.endswith('.gguf') else model}"

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
    missing: tuple[str, ...] = ()


def read_lines() -> list[Line]:
    return [Line(**{**entry, "missing": tuple(entry.get("missing", ()))}) for entry in _read("lines.toml")["line"]]


def read_snippets() -> list[Snippet]:
    return [Snippet(**entry) for entry in _read("snippets.toml")["snippet"]]


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((HERE / name).read_text(encoding="utf-8"))
