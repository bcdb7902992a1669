"""ModelRunner: the model, the KV cache and the sampler of one rank. It runs StepPlans and decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import nn

from pagewick import kernels
from pagewick.config import ATTENTION_PACKAGES, EngineConfig
from pagewick.devices import choose_device, torch_device
from pagewick.engine.adapter_loading import AdapterLoader
from pagewick.engine.batch import AdapterLoad, SlotWork, StepMasks, StepOutput, StepPlan
from pagewick.engine.batch_filling import batch_filler
from pagewick.engine.cache.block_store import DISK_ALLOWED_S, BlockStore
from pagewick.engine.cache.disk_store import DiskStore
from pagewick.engine.cache.expert_cache import ExpertCache
from pagewick.engine.cache.fingerprint import RotatingPart, model_fingerprint
from pagewick.engine.cache.kv_cache import allocate_cache
from pagewick.engine.forward import ForwardOutput, ForwardStage, closed
from pagewick.engine.graph.choice import step_graph
from pagewick.engine.host_batch import HostBatch
from pagewick.engine.model_loading import load_model, num_parameters, warn_of_options
from pagewick.engine.progress import Progress
from pagewick.engine.sampling.slot_sampler import Masks, SlotSampler
from pagewick.engine.slots import Slots
from pagewick.engine.speculation.draft_model import DraftModel
from pagewick.engine.speculation.drafting import Drafter
from pagewick.engine.speculation.mtp import MtpPass, MtpProposals
from pagewick.engine.speculation.proposals import DrafterProposals, Proposals
from pagewick.engine.step_memory import StepLimits, gpu_graph_bytes, gpu_step_bytes
from pagewick.engine.step_time_limits import StepTimeLimits, TimeLimit
from pagewick.engine.streams import stream_of
from pagewick.kernels import recorded_steps
from pagewick.models.config import ModelConfig
from pagewick.models.decoder import Decoder
from pagewick.parallel.collectives import Collectives


class StepHandle:
    """A step that has been submitted.

    awaits_masks: whether `sample` must still be called, before the next step is submitted.
    """

    def __init__(self, sample: Callable[[Masks], Callable[[], StepOutput]], works: Sequence[SlotWork]) -> None:
        """sample: samples the step and returns a function that waits for its output."""
        self._sample = sample
        self._slots = [work.slot for work in works if work.awaits_mask]
        self._wait: Callable[[], StepOutput] | None = None
        self.awaits_masks = bool(self._slots)
        if not self.awaits_masks:
            self._wait = sample({})

    @classmethod
    def done(cls, output: StepOutput) -> Self:
        """The handle of a step that computes nothing."""
        return cls(lambda masks: lambda: output, [])

    @torch.inference_mode()
    def sample(self, masks: StepMasks) -> None:
        """Sample the step, once, with a mask for each work that awaits one."""
        assert self.awaits_masks, "there was nothing left to sample"
        self.awaits_masks = False
        self._wait = self._sample(dict(zip(self._slots, masks.masks, strict=True)))

    def result(self) -> StepOutput:
        """Wait until the step is done, and return its output. May be called only once."""
        assert self._wait is not None, "sample comes first"
        return self._wait()


class ModelRunner:
    """One rank's share of the model, loaded; `allocate` must be called before the first step.

    config: the attribute is the resolved one. drafter: proposes draft tokens in place of the config's draft model;
    None: the draft model does, if there is one. progress: is marked at every layer and every block that is moved; None:
    no other process watches. Raises ConfigError and ModelLoadError.
    """

    def __init__(
        self,
        config: EngineConfig,
        collectives: Collectives,
        local_rank: int,
        drafter: Drafter | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.device = torch_device(choose_device(config.device), local_rank)
        self._collectives = collectives
        loaded = load_model(config, collectives, self.device)
        self.model, self.model_config, self.config = loaded.model, loaded.model_config, loaded.config
        if collectives.rank == 0:
            warn_of_options(config, loaded, self.device)
        self.groups, self.eos_token_ids, self.timeline = loaded.groups, loaded.eos_token_ids, loaded.timeline
        self.weights, self.num_parameters = loaded.weights, loaded.num_parameters
        self.experts = ExpertCache(self.model)
        self._adapters: AdapterLoader | None = None
        if self.config.num_adapters:
            self._adapters = AdapterLoader(self.model, self.model_config, self.config, collectives)
        self.draft_model: DraftModel | None = None
        if config.speculative_model is not None:
            self.draft_model = DraftModel(
                replace(config, model=config.speculative_model),
                collectives.of_stage(),
                self.device,
                target=self.model_config,
                target_directory=Path(config.model),
            )
        self._drafter = drafter or self.draft_model
        self._proposals: Proposals | None = None
        self._progress = progress or Progress.private()
        # The time of earlier steps that later stages may still compute, in seconds.
        self._behind_s = 0.0
        self._time_limits = _time_limits_of(self.model, loaded.model_config, self.device, collectives)
        if progress is not None:
            _mark_layers([self.model, *([self.draft_model.model] if self.draft_model else [])], progress)

    @property
    def step_bytes(self) -> int:
        """Memory that the largest step needs on a GPU beside weights and KV cache; 0 on other devices."""
        if self.device.type != "cuda":
            return 0
        models = [self.model_config, *([self.draft_model.model_config] if self.draft_model else [])]
        ranks = self._collectives.tp_size
        has_kernels = self.config.attention_backend in ATTENTION_PACKAGES or kernels.serves_attention("cuda")
        needs = [(model, replace(StepLimits.of(self.config, model), has_kernels=has_kernels)) for model in models]
        # Both keep their graphs; the rest is needed by one at a time.
        graphs = [gpu_graph_bytes(*need, ranks) for need in needs]
        return sum(graphs) + max(gpu_step_bytes(*need, ranks) - own for need, own in zip(needs, graphs, strict=True))

    @property
    def rotations(self) -> list[str]:
        """How the model's rotary embeddings turn keys."""
        return [part.rotation for part in self.model.modules() if isinstance(part, RotatingPart)]

    def allocate(
        self,
        num_blocks: Sequence[int],
        max_model_len: int,
        *,
        num_host_blocks: Sequence[int] = (),
        num_draft_blocks: Sequence[int] = (),
    ) -> int:
        """Allocate the KV cache, `num_blocks` per group, and its lower tiers; return the number of bytes on the device.

        Raises ConfigError if the directory of --kv-cache-disk cannot be used.
        """
        specs = [group.spec for group in self.groups]
        self._slots = Slots(
            specs,
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=max_model_len,
            device=self.device,
            no_adapter=self.config.num_adapters,
        )
        self._make_forward = partial(
            step_graph,
            groups=self.groups,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            config=self.config,
            device=self.device,
            collectives=self._collectives,
            progress=self._progress,
        )
        self._forward = self._make_forward(self.model)
        self._filler = batch_filler(
            self.model,
            self.model_config,
            self._slots,
            self.config.max_num_seqs,
            self.device,
            self._collectives.tp_size,
            self._progress,
        )
        self._proposals = self._make_proposals()
        is_lazy = self.device.type != "cpu"
        self._sampler = SlotSampler(self.model, self._slots, self.device, is_lazy=is_lazy)
        caches = allocate_cache(self.groups, num_blocks, self.device)
        self.disk = self._open_disk()
        self._store = BlockStore(caches, num_host_blocks or [0] * len(specs), self.disk, self._progress, self.device)
        num_bytes = sum(cache.nbytes for layers in caches for cache in layers)
        if self.draft_model is not None:
            num_bytes += self.draft_model.allocate(num_draft_blocks, max_model_len, self._progress)
        return num_bytes

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> StepHandle:
        """Begin a step's forward pass and, unless the step awaits masks, its sampling.

        The previous step must have been sampled; its result need not have been read.
        """
        if plan.adapter is not None:
            return StepHandle.done(self._load_adapter(plan.adapter))
        unreadable = self._move(plan)
        for start in plan.starts:
            if self._proposals is not None:
                self._proposals.start(start.slot)
        if unreadable or not plan.has_work:
            self._slots.apply(plan)
            return StepHandle.done(StepOutput([], unreadable, self._can_write))
        batch = self._slots.build(plan)
        if self._filler is not None:
            batch = self._filler.fill(plan, batch)
        stage = self._sampler.forward_stage(plan)
        limit = self._time_limits.of_sampling(plan)
        self._expect(self._time_limits.of_forward(plan, limit if stage != ForwardStage.HIDDEN_STATES else None))
        if extras := self._sampler.extras(plan, stage):
            batch = replace(batch, extras=extras)
        if self._proposals is not None and self._proposals.reads_hidden_states:
            # A step that runs ahead would write to the hidden states before they are read.
            batch = replace(batch, is_steady=False)
        output = self._forward(batch, stage)
        return StepHandle(partial(self._sample, plan, batch, output, limit), plan.work)

    def _sample(
        self, plan: StepPlan, batch: HostBatch, output: ForwardOutput, limit: TimeLimit, masks: Masks
    ) -> Callable[[], StepOutput]:
        """Sample after a forward pass, within `limit`; returns a function that waits for the step's output."""
        self._expect(limit)
        found = self._sampler.sample(plan, output, masks)
        if self._proposals is not None:
            self._proposals.add_to(found, plan, batch, output.hidden_states)
        self._behind_s = self._behind_s + limit.seconds if self._collectives.stages.is_ahead else 0.0
        self._progress.expect()

        def wait() -> StepOutput:
            if not found.is_read:
                self._expect(limit)
                found.get()
                self._progress.expect()
            return StepOutput(found.get(), can_write=self._can_write, streams=found.streams)

        return wait

    def close(self) -> None:
        """Wait until all pending blocks have been written to disk, and free the graphs. No step may follow."""
        self.experts.log_totals()
        self._store.close()
        if (stream := stream_of(self.device)) is not None:
            stream.record_event().synchronize()
        # NCCL waits for the graphs that use it when the ranks part.
        self._forward, self._proposals = closed, None
        if self.draft_model is not None:
            self.draft_model.close()

    @property
    def _can_write(self) -> bool:
        return self.disk is None or self.disk.can_write

    def _expect(self, limit: TimeLimit) -> None:
        self._progress.expect(self._behind_s + limit.seconds, limit.cpu_seconds)

    def _load_adapter(self, wanted: AdapterLoad) -> StepOutput:
        assert self._adapters is not None, "the engine has room for adapters"
        # A step that runs ahead reads the layers.
        recorded_steps.stop_ahead()
        before = self._adapters.used_layers
        output = self._adapters.load(wanted)
        if self._adapters.used_layers != before:
            # Recorded steps leave out the products of layers that no adapter changed.
            self._forward = self._make_forward(self.model)
        return output

    def _move(self, plan: StepPlan) -> list[bytes]:
        """Run the transfers; return the keys of the blocks that some rank could not read from disk."""
        if not plan.transfers and not plan.publishes:
            return []
        # A step that runs ahead writes to a block that may be another sequence's by now.
        recorded_steps.stop_ahead()
        unreadable = self._store.run(plan.transfers)
        if plan.publishes:
            self._store.publish()
            self._collectives.barrier()
        keys = [transfer.key for transfer in plan.transfers if transfer.is_read]
        if keys:
            # The other ranks may still read their blocks.
            self._progress.expect(DISK_ALLOWED_S)
            is_read = self._collectives.minimum([key not in unreadable for key in keys])
            unreadable = [key for key, is_fine in zip(keys, is_read, strict=True) if not is_fine]
        return unreadable

    def _make_proposals(self) -> Proposals | None:
        """Return the source of draft tokens that this rank has; a drafter that was given comes first."""
        if self._drafter is None:
            if self.model.model.mtp is None:
                return None
            predictor = MtpPass(self.model, self.device)
            return MtpProposals(
                predictor,
                self._make_forward(predictor),
                self._slots,
                self.device,
                lambda number: self._expect(self._time_limits.of_tokens(number)),
            )
        expect: Callable[[], None] = self._progress.expect
        if (draft := self.draft_model) is not None:
            limits = _time_limits_of(draft.model, draft.model_config, self.device, self._collectives)
            longest = limits.of_tokens(self.config.max_num_batched_tokens or 1)
            expect = partial(self._expect, longest)
        return DrafterProposals(self._drafter, self._slots, expect)

    def _open_disk(self) -> DiskStore | None:
        config = self.config
        if config.kv_cache_disk is None:
            return None
        # Other kernels, and another version of torch, round differently, so their blocks must not be used.
        layouts = ", ".join(sorted({group.spec.layout for group in self.groups}))
        layout = f"{kernels.status(str(self.device))} {layouts} torch {torch.__version__} {self.device.type}"
        return DiskStore(
            Path(config.kv_cache_disk),
            fingerprint=model_fingerprint(Path(config.model), config, layout, self.rotations),
            block_bytes=[group.block_bytes for group in self.groups],
            share=self._collectives.share,
        )


def _time_limits_of(
    model: Decoder, config: ModelConfig, device: torch.device, collectives: Collectives
) -> StepTimeLimits:
    sizes = [num_parameters(layer) for layer in model.model.layers]
    head = model.model.embed_tokens if model.lm_head is None else model.lm_head
    return StepTimeLimits(
        layer_size=max(sizes),
        head_size=num_parameters(head),
        attention_width=config.attention_width,
        num_layers=len(sizes),
        device=device.type,
        num_ranks=collectives.world_size,
        is_staged=collectives.stages.size > 1,
    )


def _mark_layers(models: Sequence[Decoder], progress: Progress) -> None:
    """Mark progress before every layer. In a recorded step, StepGraph does that."""

    def mark(layer: nn.Module, inputs: object) -> None:
        progress.mark()

    for model in models:
        for layer in (*model.model.layers, *(() if model.visual is None else model.visual.blocks)):
            layer.register_forward_pre_hook(mark)
