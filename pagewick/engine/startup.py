"""What goes on while torch is imported and a model is loaded, which is most of a start. Imports no torch."""

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

# Where they are, "auto" may mean a GPU, and weights have no use for main memory.
_GPU_FILES: Final = ("/dev/nvidiactl", "/dev/nvmap", "/dev/nvhost-ctrl-gpu", "/dev/dxg", "/dev/kfd")
# Of a machine with memories of its own for some processors: the kernels' threads spread weights over them, by writing.
_SECOND_NODE: Final = Path("/sys/devices/system/node/node1")
# What torch and tokenizers take meanwhile, at most: a model that does not fit is to be told, not killed.
_RESERVED_BYTES: Final = 2**30


@contextlib.contextmanager
def starting(config: EngineConfig) -> Iterator[None]:
    """To be held while torch is imported and an Engine is made of `config`, whose models are directories.

    Memory for the weights is asked for meanwhile, by a thread. The garbage collector rests: it would look at the same
    hundred thousands of objects again and again, none of which goes away.
    Raises ConfigError and ModelLoadError, as the Engine would.
    """
    with _no_collections(), huge_memory.prepared(_weight_bytes(config)):
        yield


def _weight_bytes(config: EngineConfig) -> int:
    """What this process's weights take in main memory; 0 if that is not known, or is about all there is."""
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
            # Straight to the oldest generation, unless the program has frozen objects of its own: else the next
            # collection, of the youngest, would look at them all.
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
