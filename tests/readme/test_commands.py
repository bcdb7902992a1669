"""Every command and Python program in README.md runs as it is printed, in a fresh shell.

The quick test runs those that need neither a compiler nor pip, in a clone that is installed by hand. With
PAGEWICK_DEEP=1 everything runs in order, from `make serve` on a bare clone, with a package index on this machine. Only
the port is changed: 8000 may be in use.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewick.demo import MODEL_DIR
from pagewick.server.settings import ServerSettings
from tests.readme.blocks import ROOT, TEXT, blocks, commands, without_comment
from tests.readme.newcomer import Newcomer, arrive, install_by_hand, is_server
from tests.readme.package_index import SERVED, link_dependencies, repack, running_index
from tests.weights.conftest import HubServer, running_hub
from tests.weights.gguf.demo import write_demo

# Beginning of a command -> why no test runs it.
NOT_RUN = {"python3 -m venv .venv && .venv/bin/pip install uv": "it downloads PyTorch from PyTorch's own index"}
# The quick test runs the commands that begin with these words.
QUICK = (".venv/bin/pagewick complete", ".venv/bin/pagewick doctor", ".venv/bin/pagewick models")
# Inline code that is a command, and is not run.
INLINE = {
    "apt install g++ make python3-venv": "it needs root",
    "make": "it lists the targets",
    "make test": "it would run itself",
    "make install": "the commands that run need it",
    "make serve": "it is run as a command of a block",
    "source .venv/bin/activate": "it is run below",
    ".venv/bin/pagewick doctor MODEL --max-model-len 8192": "MODEL stands for any; test_figures compares the output",
    ".venv/bin/python -m benchmarks.peers": "the other engines are not installed; --help is run below",
    ".venv/bin/python": "it runs the Python blocks",
}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    """A stand-in for the hub, with the built-in model under the names in README.md."""
    with running_hub(HubServer()) as state:
        files = {path.name: path.read_bytes() for path in MODEL_DIR.iterdir()}
        gguf = {"model-Q8_0.gguf": write_demo(tmp_path / "hub.gguf").read_bytes(), "model-Q4_K_M.gguf": b""}
        for name in set(re.findall(r"\bQwen/[\w.-]+", TEXT)):
            state.add(name, gguf if name.endswith("-GGUF") else files)
        yield state


@pytest.fixture
def newcomer(tmp_path: Path, hub: HubServer) -> Newcomer:
    """A clone in a fresh home; the dependencies are there, Pagewick is not."""
    link_dependencies(tmp_path / "dependencies")
    found = arrive(tmp_path, HF_ENDPOINT=hub.endpoint, PYTHONPATH=str(tmp_path / "dependencies"))
    shutil.copytree(MODEL_DIR, found.clone / "my-model")
    write_demo(found.clone / "my-Q8_0.gguf")
    return found


def program(name: str) -> str:
    """The Python block that uses `name`."""
    (found,) = (block for block in blocks("python") if name in block)
    return found


def test_there_are_commands_and_programs() -> None:
    assert len(commands()) >= 8 and len(blocks("python")) == 2
    assert ServerSettings().port == 8000 and "http://127.0.0.1:8000" in TEXT
    assert set(re.findall(r"^```(\w*)$", TEXT, re.MULTILINE)) == {"bash", "python", ""}


def test_what_is_not_run_is_listed() -> None:
    for beginning in NOT_RUN:
        assert any(command.startswith(beginning) for command in commands()), f"{beginning} is not in README.md"
    text = re.sub(r"^```.*?^```$", "", TEXT, flags=re.DOTALL | re.MULTILINE)
    spans = re.findall(r"`([^`\n]+)`", text)
    assert {
        span for span in spans if re.match(r"(make|apt|source|python3?|pip|\S*bin/\w+)(\s|$)", span)
    } == INLINE.keys()


def test_the_quick_ones(newcomer: Newcomer, hub: HubServer) -> None:
    install_by_hand(newcomer)
    server = next(filter(is_server, commands()))
    with newcomer.serving(server) as models:
        assert '"pagewick-demo"' in models
        assert len(newcomer.run_program(program("from openai import OpenAI"))) > 20
    quick = [command for command in commands() if command.startswith(QUICK)]
    outputs = {without_comment(command): newcomer.run(command) for command in quick}
    assert len(outputs) == len(QUICK)
    assert len(newcomer.run_program(program("from pagewick import LLM"))) > 20
    assert re.search(r"^Qwen/Qwen3-0\.6B: Qwen3ForCausalLM; runs here", "\n".join(outputs.values()), re.MULTILINE)
    assert "model.safetensors" in hub.fetched()


@pytest.mark.skipif(os.environ.get("PAGEWICK_DEEP", "") in ("", "0"), reason="it compiles and installs: minutes")
@pytest.mark.timeout(3600)
def test_all_of_them(newcomer: Newcomer, tmp_path: Path) -> None:
    index = tmp_path / "index"
    for name in SERVED:
        (index / name).mkdir(parents=True)
        repack(name, index / name)
    with running_index(index) as address:
        newcomer.environ["PIP_INDEX_URL"] = address
        for command in commands():
            if command.startswith(tuple(NOT_RUN)):
                continue
            if "once it is published" in command:
                publish(newcomer, index)
            if is_server(command):
                with newcomer.serving(command) as models:
                    wanted = re.search(r"Qwen/[\w.:-]+|\./my-\S+", without_comment(command))
                    assert f'"{wanted[0] if wanted else "pagewick-demo"}"' in models
            else:
                assert newcomer.run(command, stdin="What is Pagewick?\n").strip() or "pip install" in command
        with newcomer.serving(commands()[0]):
            assert len(newcomer.run_program(program("from openai import OpenAI"))) > 20
        assert len(newcomer.run_program(program("from pagewick import LLM"))) > 20
        newcomer.run("source .venv/bin/activate && pagewick --version")
        assert "--measure" in newcomer.run(".venv/bin/python -m benchmarks.peers --help")
        newcomer.run("make -n test install && make")


def publish(newcomer: Newcomer, index: Path) -> None:
    """Build the wheel as `make wheel` does, and put it into the index."""
    newcomer.run("make wheel")
    (index / "pagewick").mkdir()
    for wheel in (newcomer.clone / "dist").glob("*.whl"):
        shutil.copy(wheel, index / "pagewick")


def test_make_knows_the_targets() -> None:
    done = subprocess.run(["make", "-n", "test", "install"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "pytest" in done.stdout
