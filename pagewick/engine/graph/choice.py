"""Chooses how the forward pass of small steps is made cheap to start: recorded on a CPU, captured on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pagewick.attention.packages import PACKAGES
from pagewick.config import EngineConfig
from pagewick.engine.cache.kv_cache import CacheGroup
from pagewick.engine.forward import ForwardOutput, ForwardStage, StepModel, run
from pagewick.engine.graph.captured import CapturedSteps
from pagewick.engine.graph.recorded import StepGraph
from pagewick.engine.graph.static_batch import StaticBatch
from pagewick.engine.host_batch import HostBatch
from pagewick.engine.progress import Progress
from pagewick.engine.streams import stream_of
from pagewick.kernels import recorded_steps
from pagewick.log import get_logger
from pagewick.parallel.collectives import Collectives

logger = get_logger(__name__)


def step_graph(
    model: StepModel,
    groups: Sequence[CacheGroup],
    num_blocks: Sequence[int],
    max_model_len: int,
    config: EngineConfig,
    device: torch.device,
    collectives: Collectives,
    progress: Progress,
) -> Callable[[HostBatch, ForwardStage], ForwardOutput]:
    """Return the model's forward pass, recorded or captured where that is possible.

    groups, num_blocks: of the batch, in order. progress: is marked after every operation that is replayed on a CPU.
    """
    specs = [group.spec for group in groups]
    stream = stream_of(device)
    if stream is not None and not (reason := _why_not_captured(config, collectives)):
        static = StaticBatch(
            specs,
            # The cache has a block more than the scheduler gives away.
            null_blocks=num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            device=device,
            stream=stream,
        )
        # A step that is repeated would change a running state twice.
        may_repeat = not any(spec.has_snapshots for spec in specs)
        return CapturedSteps(model, static, device, stream, collectives, may_repeat=may_repeat)
    if stream is not None:
        logger.debug("steps are not captured in CUDA graphs: %s", reason)
    # Communication between ranks cannot be recorded.
    if collectives.tp_size == collectives.stages.size == 1 and recorded_steps.can_record(device):
        return StepGraph(model, [spec.table_width(max_model_len) for spec in specs], progress)
    return lambda batch, stage: run(model, batch.to(device), stage)


def _why_not_captured(config: EngineConfig, collectives: Collectives) -> str:
    """Return a reason for which no step of this engine is captured; nothing if there is none."""
    if config.enforce_eager:
        return "--enforce-eager"
    if (package := PACKAGES.get(config.attention_backend)) and not package.fits_graphs:
        return f"--attention-backend {package.name} plans every step on the host"
    if collectives.stages.size > 1:
        return "the layers of a step are on several ranks"
    return "" if collectives.is_on_device else "the ranks communicate through the host"
