"""A package index on this machine, which serves our own wheel, and the other packages from the running environment."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.metadata
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

# Packages that pip installs from the index: setuptools builds Pagewick in an environment of its own.
SERVED = ("setuptools",)
# Packages that an environment must not find among the dependencies, because README.md's commands install them.
INSTALLED_BY_COMMANDS = ("pagewick", "__editable__", "pip", "setuptools", "pkg_resources", "_distutils_hack")


def repack(name: str, directory: Path) -> Path:
    """Write the wheel of an installed package, from the files that its RECORD lists."""
    distribution = importlib.metadata.distribution(name)
    wheel = directory / f"{name}-{distribution.version}-py3-none-any.whl"
    record = f"{name}-{distribution.version}.dist-info/RECORD"
    lines = []
    with zipfile.ZipFile(wheel, "w") as archive:
        for entry in distribution.files or ():
            path = Path(str(distribution.locate_file(entry)))
            if ".." in entry.parts or path.suffix == ".pyc" or entry.name in ("RECORD", "INSTALLER", "REQUESTED"):
                continue
            content = path.read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            archive.writestr(str(entry), content)
            lines.append(f"{entry},sha256={digest},{len(content)}")
        archive.writestr(record, "\n".join([*lines, f"{record},,"]) + "\n")
    return wheel


def link_dependencies(directory: Path) -> None:
    """Fill a directory with links to all packages of the running environment that no command installs."""
    directory.mkdir()
    site_packages = Path(str(importlib.metadata.distribution("click").locate_file("")))
    for path in site_packages.iterdir():
        if not path.name.startswith(INSTALLED_BY_COMMANDS) and path.suffix != ".pth":
            (directory / path.name).symlink_to(path)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def running_index(directory: Path) -> Iterator[str]:
    """Serve the packages in `directory`, a folder for each; yield the address for pip."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(directory)))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
