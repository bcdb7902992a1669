"""LocalRanks: start and watch the other ranks of this machine if no external launcher did. Imports no torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType

from pagewick.child_processes import module_command
from pagewick.parallel.rendezvous import open_listener
from pagewick.parallel.topology import LAUNCHER_VARIABLE, Topology

_PARENT_VARIABLE = "PAGEWICK_PARENT_PID"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def environment_of(topology: Topology, local_rank: int) -> dict[str, str]:
    """Return torchrun's variables for the rank `local_rank` on `topology`'s node, and the name of the launcher."""
    return {
        "RANK": str(topology.rank - topology.local_rank + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(topology.world_size),
        "LOCAL_WORLD_SIZE": str(topology.local_world_size),
        "GROUP_RANK": str(topology.node_rank),
        "MASTER_ADDR": topology.master_addr,
        "MASTER_PORT": str(topology.master_port),
        LAUNCHER_VARIABLE: "spawn",
    }


def die_with_parent(parent_pid: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent dies. A child calls this before anything else.

    `parent_pid` defaults to the variable that LocalRanks sets; without either, nothing happens. The kernel watches
    the thread that started this process, so the parent must start children from a thread that stays alive. Only
    Linux has this; elsewhere a rank notices when its next collective finds the connection closed.
    """
    if parent_pid is None:
        if _PARENT_VARIABLE not in os.environ:
            return
        parent_pid = int(os.environ[_PARENT_VARIABLE])
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have died before the call above.
    if os.getppid() != parent_pid:
        raise SystemExit("the parent process is gone")


class LocalRanks:
    """The other ranks of this node, as child processes that live as long as the `with` block.

    `topology` is the given one, with a port even if it had none. `listener` is the socket on which rank 0's store
    will listen (None on nodes other than the first); the caller passes it to `init_collectives`.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        module: str,
        arguments: Sequence[str] = (),
        stdin_payload: bytes = b"",
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Start `python -m module arguments` once per missing rank; each reads `stdin_payload` from stdin.

        `environ` (default: this process's) is extended by `environment_of`. Raises ConfigError if the master
        port cannot be listened on, OSError if a process cannot be started.
        """
        self.listener: socket.socket | None = None
        self.topology = topology
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        if topology.rank == 0:
            self.listener = open_listener(topology)
            self.topology = replace(topology, master_port=self.listener.getsockname()[1])
        try:
            for local_rank in range(1, topology.local_world_size):
                self._start(local_rank, [module, *arguments], os.environ if environ is None else environ)
            for process in self._processes.values():
                assert process.stdin is not None
                # A child that is already gone is reported by `poll`.
                with contextlib.suppress(BrokenPipeError), process.stdin as stream:
                    stream.write(stdin_payload)
        except BaseException:
            self.terminate(grace_s=0)
            raise

    def _start(self, local_rank: int, command: list[str], environ: Mapping[str, str]) -> None:
        variables = environment_of(self.topology, local_rank)
        self._processes[int(variables["RANK"])] = subprocess.Popen(
            [*module_command(), *command],
            stdin=subprocess.PIPE,
            # Standard output belongs to rank 0; the others write to standard error.
            stdout=2,
            env={**environ, **variables, _PARENT_VARIABLE: str(os.getpid())},
            # Ctrl-C reaches rank 0 only, which then ends the others in order.
            start_new_session=True,
        )

    def poll(self) -> int | None:
        """Return the lowest rank among the children that have ended for any reason, or None. Does not wait."""
        return next((rank for rank, process in self._processes.items() if process.poll() is not None), None)

    def wait(self, timeout_s: float) -> bool:
        """Wait for all children to end by themselves; return whether they did within `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
        return True

    def terminate(self, grace_s: float = 5.0) -> None:
        """End all children: SIGTERM, then SIGKILL after `grace_s` seconds in total. May be called twice."""
        if self.listener is not None:
            self.listener.close()
        for process in self._processes.values():
            process.terminate()
        if not self.wait(grace_s):
            for process in self._processes.values():
                process.kill()
                process.wait()

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.terminate()
