"""Work beside the import of torch and the loading of a model, which take most of a start. Imports no torch."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pagewick import huge_memory
from pagewick.config import EngineConfig
from pagewick.devices import available_memory
from pagewick.engine.preflight import rank_bytes
from pagewick.parallel.layout import layout_of
from pagewick.parallel.topology import detect_topology

# If one of these exists, "auto" may mean a GPU, and weights need no main memory.
_GPU_FILES: Final = ("/dev/nvidiactl", "/dev/nvmap", "/dev/nvhost-ctrl-gpu", "/dev/dxg", "/dev/kfd")
# Exists on a machine with several memory nodes. There the kernels' threads spread weights over the nodes by writing.
_SECOND_NODE: Final = Path("/sys/devices/system/node/node1")
# Upper limit of the memory of torch and tokenizers: a model that does not fit must end in an error, not in a kill.
_RESERVED_BYTES: Final = 2**30


@contextlib.contextmanager
def starting(config: EngineConfig) -> Iterator[None]:
    """Prepare for weights during the import of torch and the creation of an Engine. config: its models are directories.

    Meanwhile, a thread requests memory for the weights. Garbage collection is off: it would look again and again at
    hundreds of thousands of objects, none of which goes away. Raises ConfigError and ModelLoadError, as the Engine
    would.
    """
    with _no_collections(), huge_memory.prepared(_weight_bytes(config)):
        yield


def _weight_bytes(config: EngineConfig) -> int:
    """Return the size of this process's weights in main memory; 0 if it is unknown or leaves no memory for the rest."""
    if _SECOND_NODE.exists():
        return 0
    if config.device != "cpu" and (config.device != "auto" or _may_have_gpu()):
        return 0
    topology = detect_topology(os.environ, tensor_parallel_size=config.tensor_parallel_size)
    needed = rank_bytes(config, layout_of(topology.world_size).tensor_size)
    return needed if needed * topology.local_world_size + _RESERVED_BYTES <= available_memory("cpu") else 0


def _may_have_gpu() -> bool:
    return sys.platform != "linux" or any(Path(name).exists() for name in _GPU_FILES)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            # Move all objects to the oldest generation, unless the program has frozen objects itself. Else the next
            # collection of the youngest generation would look at all of them.
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
