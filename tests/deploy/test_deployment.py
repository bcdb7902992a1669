"""The files that run Pagewick for others: they name flags, paths and routes that exist, and give no privileges."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from pagewick.cli import cli
from tests.architecture.source import ROOT
from tests.architecture.test_documents import flags_of

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
UNIT = ROOT / "deploy" / "pagewick.service"
# The largest rating of `systemd-analyze security` for the unit, of 10; it has 1.4 without network namespaces.
MAX_EXPOSURE = 16
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")


def stages() -> dict[str, list[str]]:
    """Return the instructions of each stage of the Dockerfile, in one line each."""
    lines = [line for line in DOCKERFILE.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    found: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("FROM "):
            found[line.split(" AS ")[1]] = []
        list(found.values())[-1].append(line)
    return found


def serve_flag(name: str) -> bool:
    return f"--{name.lower().replace('_', '-')}" in flags_of("serve")


def test_the_container_runs_without_root_and_is_checked() -> None:
    runtime = stages()["runtime"]
    assert [line for line in runtime if line.startswith("USER ")] == ["USER 10001:10001"]
    assert runtime.index("USER 10001:10001") > max(i for i, line in enumerate(runtime) if line.startswith("RUN "))
    assert any(line.startswith("HEALTHCHECK ") and "/opt/healthcheck.py" in line for line in runtime)
    assert "VOLUME /cache" in runtime
    assert not [line for line in stages()["cpu"] if line.startswith(("RUN ", "USER "))]
    assert [line for line in stages()["cuda"] if line.startswith("USER ")][-1] == "USER 10001:10001"
    assert not any(line.startswith("RUN ") for line in stages()["cuda"][stages()["cuda"].index("USER 10001:10001") :])
    # Without a target, the last stage is built.
    assert list(stages())[-1] == "cpu"


def test_triton_has_a_compiler_and_a_directory_for_its_kernels() -> None:
    cuda = " ".join(stages()["cuda"])
    assert " gcc " in cuda and " libc6-dev " in cuda
    assert "TRITON_CACHE_DIR=/cache/" in cuda
    unit = (ROOT / "deploy" / "gpu.conf").read_text(encoding="utf-8")
    assert "\nEnvironment=TRITON_CACHE_DIR=%C/pagewick/" in unit and "CacheDirectory=pagewick" in UNIT.read_text()


def test_the_container_copies_files_that_exist_and_are_not_ignored() -> None:
    patterns = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = [pattern.removeprefix("!") for pattern in patterns if pattern.startswith("!")]
    assert "*" in patterns
    for line in DOCKERFILE.splitlines():
        if line.startswith("COPY ") and "--from=" not in line:
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
                assert any(fnmatch.fnmatch(source.split("/")[0], pattern) for pattern in sent), source


def test_its_variables_are_flags() -> None:
    compose = (ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8")
    names = set(re.findall(r"\bPAGEWICK_([A-Z_]+)[=:](?!-)", DOCKERFILE + compose)) - {"REQUIRE_NATIVE"}
    assert names == {"HOST", "SHUTDOWN_TIMEOUT"}
    assert all(serve_flag(name) for name in names)


def test_compose_gives_no_privileges() -> None:
    document: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))
    service = document["services"]["pagewick"]
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert service["build"]["target"] in stages()
    command, *flags = service["command"]
    assert command == "serve" and {flag for flag in flags if flag.startswith("--")} <= flags_of("serve")
    grace = int(service["stop_grace_period"].removesuffix("s"))
    assert grace > int(service["environment"]["PAGEWICK_SHUTDOWN_TIMEOUT"])


def test_the_unit_starts_the_server_with_flags_that_exist() -> None:
    command = re.search(r"^ExecStart=/opt/pagewick/bin/pagewick (\S+) (.*)$", UNIT.read_text(encoding="utf-8"), re.M)
    assert command is not None
    assert cli.get_command(click.Context(cli), command[1]) is not None
    assert set(re.findall(r"--[\w-]+", command[2])) <= flags_of(command[1])


@needs_systemd
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "pagewick.service"
    # The program has to exist where this runs.
    unit.write_text(UNIT.read_text(encoding="utf-8").replace("/opt/pagewick/bin/pagewick", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "pagewick" in line]) == (0, [])


@needs_systemd
def test_the_unit_is_hardened() -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", f"--threshold={MAX_EXPOSURE}", str(UNIT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout[-300:]


def checked_health(port: str) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, str(ROOT / "deploy" / "healthcheck.py")]
    environment = {**os.environ, "PAGEWICK_PORT": port}
    return subprocess.run(script, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_health_check_says_what_the_server_says(status: int, code: int) -> None:
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *values: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert checked_health(str(server.server_port)).returncode == code
        thread.join()
    assert asked == ["/health/ready"]


def test_the_health_check_fails_without_a_server() -> None:
    done = checked_health("1")
    assert done.returncode == 1 and "refused" in done.stderr and "Traceback" not in done.stderr


def test_scripts_are_executable_and_parse() -> None:
    scripts = [path for folder in ("deploy", "release") for path in sorted((ROOT / folder).iterdir())]
    scripts = [path for path in scripts if path.is_file() and path.read_bytes().startswith(b"#!")]
    assert len(scripts) >= 7
    for path in scripts:
        assert os.access(path, os.X_OK), path
        if b"bash" in path.read_bytes().splitlines()[0]:
            subprocess.run(["bash", "-n", str(path)], check=True)


def test_one_version_of_uv_is_used() -> None:
    pinned = re.search(r"^uv==(\S+)$", (ROOT / "release" / "requirements.txt").read_text(encoding="utf-8"), re.M)
    assert pinned is not None
    assert f"uv=={pinned[1]}" in (ROOT / "deploy" / "install").read_text(encoding="utf-8")
