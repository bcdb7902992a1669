"""ModelRunner: the model, the KV cache and the sampler of one rank. It does what a StepPlan says, no more."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from pagewick import kernels
from pagewick.attention.backend import choose_backend
from pagewick.config import EngineConfig
from pagewick.devices import choose_device, num_cores, torch_device
from pagewick.engine.batch import SlotResult, SlotWork, StepOutput, StepPlan
from pagewick.engine.kv_cache import allocate_cache, cache_groups
from pagewick.engine.messages import TokenLogprobs
from pagewick.engine.sampler import sample, token_logprobs
from pagewick.engine.slots import Slots
from pagewick.layers.context import LayerContext
from pagewick.log import get_logger
from pagewick.models.config import ModelConfig, eos_token_ids
from pagewick.models.registry import build_model
from pagewick.parallel.collectives import Collectives
from pagewick.parallel.sharding import check_tensor_parallel
from pagewick.quantization import choose_method
from pagewick.weights.loader import load_weights
from pagewick.weights.source import open_source

logger = get_logger(__name__)

CPU_BLOCK_SIZE = 32

# Rows of the vocabulary head computed at a time for prompt log-probabilities: [256, vocab_size] floats.
_PROMPT_LOGPROBS_SLICE = 256


@dataclass(slots=True)
class StepHandle:
    """A step that has been submitted."""

    output: StepOutput

    def result(self) -> StepOutput:
        """Wait until the step is done."""
        return self.output


class ModelRunner:
    """One rank's share of the model, loaded; `allocate` must follow before the first step.

    config: becomes the resolved one. Raises ConfigError and ModelLoadError.
    """

    def __init__(self, config: EngineConfig, collectives: Collectives, local_rank: int) -> None:
        started = time.monotonic()
        device = torch_device(choose_device(config.device), local_rank)
        with open_source(Path(config.model)) as source:
            self.model_config = ModelConfig.from_hf(source.config())
            self.eos_token_ids = eos_token_ids(source.config(), source.generation_config())
            self.config = config.resolve(
                max_position_embeddings=self.model_config.max_position_embeddings,
                checkpoint_dtype=self.model_config.dtype,
                device=str(device),
                block_size=CPU_BLOCK_SIZE,
                num_cores=max(1, num_cores() // collectives.world_size),
            )
            _use_threads(self.config)
            check_tensor_parallel(self.model_config.num_heads, collectives.world_size)
            context = LayerContext(
                dtype=getattr(torch, self.config.dtype),
                cache_dtype=getattr(torch, self.config.kv_cache_dtype),
                device=device,
                collectives=collectives,
                backend=choose_backend(device, self.config.block_size or CPU_BLOCK_SIZE),
                choose_method=partial(choose_method, source.config(), tensor_names=frozenset(source.names())),
            )
            self.model = build_model(context, self.model_config)
            load_weights(self.model, source)
        self.device = device
        self.groups = cache_groups(self.model)
        logger.info("loaded %s in %.1f s", self.model_config.architecture, time.monotonic() - started)

    @property
    def num_parameters(self) -> int:
        """Of this rank."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def allocate(self, num_blocks: Sequence[int], max_model_len: int) -> int:
        """Allocate the KV cache, `num_blocks` per group; returns its bytes."""
        specs = [group.spec for group in self.groups]
        self._slots = Slots(
            specs, max_num_seqs=self.config.max_num_seqs, max_model_len=max_model_len, device=self.device
        )
        return allocate_cache(self.groups, num_blocks, self.device)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> StepHandle:
        """Run one step."""
        if not plan.work:
            return StepHandle(StepOutput([]))
        batch = self._slots.build(plan)
        hidden_states = self.model(batch)
        results = [SlotResult() for _ in plan.work]
        self._sample(plan.work, hidden_states, results)
        first = 0
        for work, result in zip(plan.work, results, strict=True):
            if work.prompt_targets:
                result.prompt_logprobs = self._prompt_logprobs(work, hidden_states[first : first + work.num_tokens])
            first += work.num_tokens
        return StepHandle(StepOutput(results))

    def _sample(self, works: Sequence[SlotWork], hidden_states: Tensor, results: Sequence[SlotResult]) -> None:
        """Fill in the next token of every work that wants one."""
        last_rows, first = [], 0
        for work in works:
            first += work.num_tokens
            last_rows.append(first - 1)
        wanted = [index for index, work in enumerate(works) if work.is_sampled]
        if not wanted:
            return
        slots = [works[index].slot for index in wanted]
        rows = [self._slots.sampling(slot) for slot in slots]
        positions = [works[index].start + works[index].num_tokens for index in wanted]
        row_indices = torch.tensor([last_rows[index] for index in wanted], device=self.device)
        logits = self.model.compute_logits(hidden_states[row_indices])
        sampled = sample(logits, rows, positions)
        self._slots.remember(slots, sampled.token_ids)
        for place, (index, token_id, is_valid) in enumerate(
            zip(wanted, sampled.token_ids.tolist(), sampled.is_valid.tolist(), strict=True)
        ):
            if not is_valid:
                results[index].error = "the model computed logits that are not numbers for this request"
                continue
            results[index].token_ids = [token_id]
            if (num_top := rows[place].logprobs) is not None:
                results[index].logprobs = token_logprobs(
                    logits[place : place + 1], sampled.token_ids[place : place + 1], num_top
                )

    def _prompt_logprobs(self, work: SlotWork, hidden_states: Tensor) -> list[TokenLogprobs]:
        num_top = self._slots.sampling(work.slot).prompt_logprobs or 0
        targets = torch.tensor(work.prompt_targets, device=self.device)
        found: list[TokenLogprobs] = []
        for first in range(0, len(targets), _PROMPT_LOGPROBS_SLICE):
            last = min(first + _PROMPT_LOGPROBS_SLICE, len(targets))
            logits = self.model.compute_logits(hidden_states[first:last])
            found += token_logprobs(logits, targets[first:last], num_top)
        return found


def _use_threads(config: EngineConfig) -> None:
    assert config.num_threads is not None, "resolve() sets it"
    torch.set_num_threads(config.num_threads)
    kernels.set_num_threads(config.num_threads)
