"""The state of an unfinished training run on disk, so that the run can be stopped and continued."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

_PROGRESS = "progress"


def save_state(
    path: Path, network: nn.Module, optimizers: Sequence[torch.optim.Optimizer], progress: dict[str, Any]
) -> None:
    """Write weights, the optimizers' state and `progress`. A crash leaves the old file or the new one, never half."""
    tensors = {f"network.{name}": tensor for name, tensor in network.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        for index, entries in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{index}.{name}": torch.as_tensor(value) for name, value in entries.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    metadata = {_PROGRESS: json.dumps(progress)}
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, unfinished, metadata)
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    unfinished.replace(path)


def read_progress(path: Path) -> dict[str, Any] | None:
    """Return the progress that `save_state` stored; None if there is no state."""
    if not path.exists():
        return None
    with safe_open(path, "pt") as file:
        progress: dict[str, Any] = json.loads(file.metadata()[_PROGRESS])
    return progress


def load_state(path: Path, network: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Continue from a file of `save_state`. Raises RuntimeError if the network has another shape."""
    with safe_open(path, "pt") as file:
        tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    network.load_state_dict(_below("network.", tensors))
    for number, optimizer in enumerate(optimizers):
        states: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _below(f"optimizer.{number}.", tensors).items():
            index, _, entry = name.partition(".")
            states.setdefault(int(index), {})[entry] = tensor
        optimizer.load_state_dict({**optimizer.state_dict(), "state": states})


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
