"""A newcomer: a fresh home, a fresh clone, and a fresh shell for every command."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.readme.blocks import ROOT, without_comment

LIBRARY = Path("pagewick/kernels/cpu/libpagewick_cpu.so")
PATIENCE_SECONDS = 1200


@dataclass(frozen=True)
class Newcomer:
    """clone: the working directory. environ: all variables of a shell. port: where servers listen instead of 8000."""

    clone: Path
    environ: dict[str, str]
    port: int

    def run(self, command: str, stdin: str = "") -> str:
        """Run a command in a shell of its own; return its output. Fails unless the command succeeds."""
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.clone, env=self.environ, input=stdin, text=True, timeout=PATIENCE_SECONDS,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: status {done.returncode}\n{done.stdout}"
        return done.stdout

    def run_program(self, source: str) -> str:
        """Save a Python program and run it, as README.md says. The address of the server has our port."""
        (self.clone / "hello.py").write_text(source.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}"))
        return self.run(".venv/bin/python hello.py")

    @contextlib.contextmanager
    def serving(self, command: str) -> Iterator[str]:
        """Run a command that serves a model until Ctrl-C; yield the list of models that the server gives."""
        log = self.clone.parent / "server.log"
        with log.open("w") as output:
            server = subprocess.Popen(
                ["bash", "-c", command], cwd=self.clone, env=self.environ, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            yield self._wait_for(server, f"http://127.0.0.1:{self.port}/v1/models", log)
            os.killpg(server.pid, signal.SIGINT)
            server.wait(PATIENCE_SECONDS)
            assert "Traceback" not in log.read_text(), log.read_text()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()

    def _wait_for(self, server: subprocess.Popen[bytes], address: str, log: Path) -> str:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline and server.poll() is None:
            with contextlib.suppress(OSError), opener.open(address, timeout=5) as response:
                return str(response.read(), "utf-8")
            time.sleep(0.1)
        raise AssertionError(f"no server at {address}\n{log.read_text()}")


def arrive(home: Path, **variables: str) -> Newcomer:
    """Make a home and a clone with this checkout's files as they are now, without anything that was installed."""
    clone = home / "clone"
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.split(b"\0")
    for name in filter(None, names):
        source, target = ROOT / os.fsdecode(name), clone / os.fsdecode(name)
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    python = Path(sys.base_prefix, "bin")
    environ = {
        "HOME": str(home), "PATH": f"{python}:/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8",
        "PAGEWICK_PORT": str(port), "OMP_NUM_THREADS": "1", "PIP_CONFIG_FILE": os.devnull, **variables,
    }  # fmt: skip
    return Newcomer(clone, environ, port)


def install_by_hand(newcomer: Newcomer) -> None:
    """Do what `make install` does, without compiling and without pip, which take minutes."""
    environment = newcomer.clone / ".venv"
    venv.create(environment, symlinks=True)
    (site_packages,) = environment.glob("lib/python3*/site-packages")
    (site_packages / "pagewick.pth").write_text(f"{newcomer.clone}\n")
    script = environment / "bin/pagewick"
    script.write_text(f"#!{environment}/bin/python\nfrom pagewick.cli import main\nmain()\n")
    script.chmod(0o755)
    if (ROOT / LIBRARY).exists():
        shutil.copyfile(ROOT / LIBRARY, newcomer.clone / LIBRARY)
    (environment / ".installed").touch()


def is_server(command: str) -> bool:
    return " serve" in without_comment(command)
