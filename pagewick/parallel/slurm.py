"""Slurm's two compressed notations: lists of hosts and tasks per node (slurm.schedmd.com: srun, scontrol)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

from pagewick.errors import ConfigError


def expand_nodelist(text: str, variable: str) -> list[str]:
    """Return the hosts of a list such as `gpu1,node[01-03,07]` or `rack[1-2]n[5,6]`, in order.

    Raises ConfigError, naming `variable`, where the list is missing or unreadable.
    """
    if not text.strip():
        raise ConfigError(f"{variable} is missing: start with srun")
    if not re.fullmatch(r"(?:[\w.\-]|\[[\d,\-]+\])+(?:,(?:[\w.\-]|\[[\d,\-]+\])+)*", text.strip()):
        raise ConfigError(f"{variable}={text!r} is not a Slurm host list such as node[01-03,07]")
    hosts: list[str] = []
    for pattern in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text.strip()):
        # Splitting on a group leaves literals at even and bracket contents at odd positions.
        pieces = re.split(r"\[([^\]]*)\]", pattern)
        choices = [_expand_ranges(piece, variable) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        hosts.extend("".join(parts) for parts in itertools.product(*choices))
    return hosts


def _expand_ranges(text: str, variable: str) -> list[str]:
    """Expand `01-03,07` to 01 02 03 07; the first number of a range gives the width."""
    numbers: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(last) < int(first):
            raise ConfigError(f"{variable} has the unreadable range {part!r}; expected for example 01-03")
        numbers.extend(str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return numbers


def tasks_of_node(environ: Mapping[str, str], world_size: int, node_rank: int, num_nodes: int) -> int:
    """Return how many of the `world_size` tasks run on node `node_rank`.

    Reads lists such as `2(x3),1` (three nodes with two tasks, one with one). A list that describes the whole job, and
    so does not add up to this step's tasks, is ignored in favour of an even distribution. Raises ConfigError if the
    tasks cannot be distributed.
    """
    if node_rank >= num_nodes:
        raise ConfigError(f"SLURM_NODEID={node_rank} contradicts the {num_nodes} hosts of SLURM_JOB_NODELIST")
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        counts = _expand_counts(environ.get(name, ""), name)
        if sum(counts) == world_size and node_rank < len(counts):
            return counts[node_rank]
    if world_size % num_nodes:
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE is missing, and {world_size} tasks do not spread evenly over the"
            f" {num_nodes} nodes: start with srun --ntasks-per-node"
        )
    return world_size // num_nodes


def _expand_counts(text: str, variable: str) -> list[int]:
    counts: list[int] = []
    for part in filter(None, text.strip().split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ConfigError(f"{variable}={text!r} is not a list of task counts such as 2(x3),1")
        counts.extend([int(match[1])] * int(match[2] or 1))
    return counts
