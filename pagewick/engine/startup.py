"""Work beside the import of torch and the loading of a model, which take most of a start. Imports no torch."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from pagewick import huge_memory
from pagewick.config import EngineConfig
from pagewick.devices import available_memory
from pagewick.engine.preflight import FoundModel, WeightBytes, num_tensor_ranks
from pagewick.parallel.topology import topology_of

# If one of these exists, "auto" may mean a GPU, and weights need no main memory.
_GPU_FILES: Final = ("/dev/nvidiactl", "/dev/nvmap", "/dev/nvhost-ctrl-gpu", "/dev/dxg", "/dev/kfd")
# Exists on a machine with several memory nodes. There the kernels' threads spread weights over the nodes by writing.
_SECOND_NODE: Final = Path("/sys/devices/system/node/node1")
# Upper limit of the memory of torch and tokenizers: a model that does not fit must end in an error, not in a kill.
_RESERVED_BYTES: Final = 2**30


@contextlib.contextmanager
def starting(config: EngineConfig, models: Sequence[FoundModel] | None = None) -> Iterator[WeightBytes | None]:
    """Prepare for weights during the import of torch and the creation of an Engine, which takes what this yields.

    config: its models are directories. models: what check_models has returned, if it has run in this process.

    Meanwhile, a thread requests memory for the weights. Garbage collection is off: it would look again and again at
    hundreds of thousands of objects, none of which goes away. Raises ConfigError and ModelLoadError, as the Engine
    would.
    """
    with _no_collections():
        # Unknown for a GPU, and on a machine with several memories, where threads spread the weights by writing.
        may_have_gpu = sys.platform != "linux" or any(Path(name).exists() for name in _GPU_FILES)
        is_unknown = config.quantization == "auto"  # the choice depends on the memory that is free
        if (
            is_unknown
            or _SECOND_NODE.exists()
            or not (config.device == "cpu" or (config.device == "auto" and not may_have_gpu))
        ):
            yield None
            return
        weights = WeightBytes.of(config, num_tensor_ranks(config, os.environ), models)
        topology = topology_of(config, os.environ)
        leaves_room = weights.all * topology.local_world_size + _RESERVED_BYTES <= available_memory("cpu")
        with huge_memory.prepared(weights.all if leaves_room else 0):
            yield weights


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
