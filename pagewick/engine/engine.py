"""Engine: takes requests and returns tokens. It knows only token ids, never text, and runs in the caller's thread.

engine = Engine(config)
engine.add(request)
while engine.has_work:
    for delta in engine.step(): ...
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec

from pagewick import kernels
from pagewick.config import EngineConfig
from pagewick.devices import available_memory, select_device, total_memory
from pagewick.engine.adapters import Adapters
from pagewick.engine.admission import check_request
from pagewick.engine.cache.block_manager import BlockManager
from pagewick.engine.cache.disk_store import hash_key
from pagewick.engine.cache.kv_cache import MemoryGuard, blocks_in, machine_block_bytes
from pagewick.engine.cache.tiers import DiskTier, HostTier
from pagewick.engine.constraints.factory import GrammarConstraints, KnownConstraints
from pagewick.engine.device_errors import explaining_device_errors
from pagewick.engine.images import with_image_keys
from pagewick.engine.messages import EngineRequest, EngineStats, RequestDelta
from pagewick.engine.model_description import images_of, labels_of
from pagewick.engine.model_info import ModelInfo
from pagewick.engine.preflight import WeightBytes
from pagewick.engine.scheduling.draft_tokens import Speculation
from pagewick.engine.scheduling.queue_limits import QueueLimits
from pagewick.engine.scheduling.scheduler import Scheduler
from pagewick.engine.scheduling.sequence_manager import ConstraintFactory
from pagewick.engine.speculation.drafting import Drafter
from pagewick.engine.step_loop import StepLoop
from pagewick.engine.step_memory import max_num_logits
from pagewick.engine.whole_parts import whole_parts
from pagewick.engine.worker import RankGroup
from pagewick.errors import EngineDeadError, InvalidRequestError
from pagewick.log import get_logger
from pagewick.models.decoder import Decoder

logger = get_logger(__name__)

# Minimum time between two full integrity checks of an idle engine.
_CHECK_INTERVAL_S = 10.0


class Engine:
    """Loads the model of `config` (a local directory), starts the other ranks, if any, and serves requests.

    drafter: proposes draft tokens in place of a draft model; with one rank only. constraint_factory: makes a
    TokenConstraint from a request's `constraint`, in place of those of pagewick/engine/constraints. grammars: makes
    those of type "grammar"; None: there are none. weights: from `starting`, if it is known.
    Raises ConfigError and ModelLoadError. There is one engine per process, because a process has one group of ranks.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        drafter: Drafter | None = None,
        constraint_factory: ConstraintFactory | None = None,
        grammars: GrammarConstraints | None = None,
        weights: WeightBytes | None = None,
    ) -> None:
        started = time.monotonic()
        self._ranks = RankGroup(config, os.environ, drafter, weights)
        self._request_timeout_s = config.request_timeout
        self._grammars = grammars
        self._num_constrained = 0
        try:
            self._scheduler = self._make_scheduler(drafter, constraint_factory)
            settled = self._ranks.runner.config
            self._adapters = Adapters(
                settled.num_adapters, lambda plan: self._ranks.submit(plan).result(), self._scheduler.is_known
            )
            for name, path in settled.adapter_paths.items():
                self._adapters.load(name, path)
            depth = settled.max_steps_in_flight
            assert depth is not None, "resolve() sets it"
            self._loop = StepLoop(self._scheduler, self._ranks, depth)
        except BaseException:
            self._ranks.close()
            raise
        self._has_failed = False
        # Deltas of steps that were finished before their turn.
        self._held: list[RequestDelta] = []
        # Requests whose blocks other servers wait for.
        self._prefills: set[str] = set()
        self._checked_at = -_CHECK_INTERVAL_S
        self.info = self._describe()
        loading_s = sum(seconds for _, seconds in self.info.timeline)
        self.info.timeline.append(("KV cache", time.monotonic() - started - loading_s))
        logger.info("KV cache: %d blocks of %d tokens", self.info.num_kv_blocks, self.info.block_size)

    @property
    def model(self) -> Decoder:
        """This process's share of the model, for commands that observe its layers."""
        return self._ranks.runner.model

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or self._loop.has_steps or bool(self._held)

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises InvalidRequestError if it is wrong or can never fit, or its id is in use, and QueueFullError if too many
        requests wait.
        """
        check_request(request, self.info)
        request = self._adapters.assign(with_image_keys(request, self.info.image_num_leading))
        if request.constraint is not None and request.params.use_beam_search:
            raise InvalidRequestError("a beam search takes no constraint; use n instead", param="constraint")
        if request.options.timeout_s is None and self._request_timeout_s is not None:
            options = msgspec.structs.replace(request.options, timeout_s=self._request_timeout_s)
            request = msgspec.structs.replace(request, options=options)
        if self._scheduler.is_known(request.request_id):
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", param="request_id")
        self._scheduler.add(request)
        self._num_constrained += request.constraint is not None
        if request.options.is_prefill and self._ranks.runner.config.kv_cache_disk_shared:
            self._prefills.add(request.request_id)

    def load_adapter(self, name: str, path: str, *, replaces: bool = False) -> None:
        """Load a LoRA adapter, which requests then name; see Adapters.load. Its errors leave the engine as it was."""
        select_device(self._ranks.runner.device)
        # Ranks may wait for the masks of a step in flight, and no other plan may come before these.
        self._held += self._loop.finish()
        self._adapters.load(name, path, replaces=replaces)
        self.info.adapters = dict(self._adapters.paths)

    def unload_adapter(self, name: str) -> None:
        """Refuse new requests for an adapter; those that it serves go on. Raises InvalidRequestError."""
        self._adapters.unload(name)
        self.info.adapters = dict(self._adapters.paths)

    def abort(self, request_ids: Iterable[str], choices: Iterable[tuple[str, int]] = ()) -> None:
        """Stop these requests, or single choices of them (id, index), and free their blocks.

        Unknown ids are ignored: the request may just have finished.
        """
        request_ids = list(request_ids)
        self._prefills -= set(request_ids)
        self._scheduler.abort(request_ids, choices)

    @explaining_device_errors()
    def step(self) -> list[RequestDelta]:
        """Advance every scheduled request by some tokens; return the deltas of their choices.

        Raises EngineDeadError after a step that failed, because the content of the caches is then unknown, and
        NotEnoughMemoryError for a step for which a GPU has no memory.
        """
        if self._has_failed:
            raise EngineDeadError("an earlier step of this engine failed; make a new one")
        self._has_failed = True
        # LLM may be called from one thread and then from another.
        select_device(self._ranks.runner.device)
        deltas, self._held = self._held, []
        if self._scheduler.has_work or self._loop.has_steps:
            deltas += self._loop.advance()
            if ended := {one.request_id for one in deltas if one.finish_reason is not None} & self._prefills:
                self._prefills -= ended
                deltas += self._loop.publish()
        self._has_failed = False
        return deltas

    def stats(self) -> EngineStats:
        stats = self._scheduler.refresh_stats()
        self._ranks.runner.experts.count_into(stats)
        if self._grammars is not None:
            self._grammars.count_into(stats)
        stats.num_constrained_requests = self._num_constrained
        return stats

    def check_integrity(self) -> list[str]:
        """Return contradictions between block manager and sequences; empty if all is well."""
        return self._scheduler.check_integrity()

    def check_when_idle(self) -> float | None:
        """End sessions whose time is over, and check now and then that no block is held while there is no work.

        Contradictions are counted in stats().num_leaked_blocks and logged. Returns the seconds after which an engine
        that is still idle has to be asked again, because a session ends; None: not before it has had work.
        """
        next_s = self._scheduler.expire_sessions()
        stats = self._scheduler.refresh_stats()
        now = time.monotonic()
        if stats.num_referenced_blocks or now - self._checked_at >= _CHECK_INTERVAL_S:
            self._checked_at = now
            problems = self.check_integrity()
            stats.num_leaked_blocks = max(stats.num_referenced_blocks, len(problems))
            for problem in problems[:10]:
                logger.error("the KV cache is inconsistent: %s", problem)
        return next_s

    def close(self) -> None:
        """Write cached blocks to disk, if there is one, and stop the other ranks. The engine cannot be used again."""
        directory = self._ranks.runner.config.kv_cache_disk
        select_device(self._ranks.runner.device)
        with ExitStack() as cleanup:
            cleanup.callback(self._ranks.close)
            cleanup.callback(self._loop.close)
            if self._has_failed:
                return
            self._has_failed = True
            # The other ranks may wait for the masks of these steps.
            self._loop.finish()
            if directory and (plan := self._scheduler.save_cache()).transfers:
                logger.info("writing %d blocks to %s", len(plan.transfers), directory)
                self._ranks.submit(plan).result()

    def _make_scheduler(self, drafter: Drafter | None, constraint_factory: ConstraintFactory | None) -> Scheduler:
        runner, config = self._ranks.runner, self._ranks.runner.config
        known = KnownConstraints(runner.model_config.vocab_size, sorted(runner.eos_token_ids), self._grammars)
        return Scheduler(
            self._block_manager(config),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_prefill_tokens=config.max_num_prefill_tokens,
            whole=whole_parts(config, runner.model_config),
            max_model_len=self._ranks.max_model_len,
            eos_token_ids=runner.eos_token_ids,
            speculation=_speculation(config, drafter),
            limits=QueueLimits(config.max_waiting_requests, config.max_waiting_tokens),
            session_ttl_s=config.session_ttl,
            constraint_factory=constraint_factory or known,
        )

    def _block_manager(self, config: EngineConfig) -> BlockManager:
        ranks, runner = self._ranks, self._ranks.runner
        host = disk = grow = None
        if any(ranks.num_host_blocks):
            host = [HostTier(number) for number in ranks.num_host_blocks]
        if (store := runner.disk) is not None:
            capacity = blocks_in(runner.groups, config.kv_cache_disk_size // ranks.world_size)
            exists = [
                partial(store.exists, group) if config.kv_cache_disk_shared else None for group in range(len(capacity))
            ]
            disk = [DiskTier(store.keys(group), number, exists[group]) for group, number in enumerate(capacity)]
        if config.device == "cpu":
            grow = [
                MemoryGuard(
                    machine_block_bytes(group, ranks.layout, ranks.local_world_size),
                    partial(available_memory, "cpu"),
                    total_memory(),
                )
                for group in runner.groups
            ]
        # To be found again after a restart, blocks on disk need hashes with the same key.
        directory = config.kv_cache_disk
        return BlockManager(
            [group.spec for group in runner.groups],
            ranks.num_blocks,
            hash_key=secrets.token_bytes(32) if directory is None else hash_key(Path(directory)),
            enable_prefix_caching=config.enable_prefix_caching,
            grow=grow,
            host=host or (),
            disk=disk or (),
        )

    def _describe(self) -> ModelInfo:
        runner, config = self._ranks.runner, self._ranks.runner.config
        return ModelInfo(
            model_path=config.model,
            architecture=runner.model_config.architecture,
            dtype=config.dtype,
            device=config.device,
            kernels=kernels.status(config.device),
            vocab_size=runner.model_config.vocab_size,
            embedding_size=runner.model_config.embedding_size,
            max_model_len=self._ranks.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=runner.groups[0].spec.block_size,
            num_kv_blocks=sum(self._ranks.num_blocks),
            kv_cache_bytes=self._ranks.kv_cache_bytes,
            num_parameters=runner.num_parameters,
            tensor_parallel_size=config.tensor_parallel_size,
            pipeline_parallel_size=config.pipeline_parallel_size,
            kv_cache_dtype=config.kv_cache_dtype,
            weights=runner.weights,
            embedding=runner.model_config.embedding,
            num_token_types=encoder.num_token_types if (encoder := runner.model_config.encoder) else 0,
            **labels_of(runner.model_config),
            **images_of(config, runner.model_config),
            adapters=dict(self._adapters.paths),
            max_adapters=config.num_adapters,
            default_adapter=config.lora or "",
            rotations=runner.rotations,
            eos_token_ids=sorted(runner.eos_token_ids),
            timeline=list(runner.timeline),
        )


def _speculation(config: EngineConfig, drafter: Drafter | None) -> Speculation | None:
    """Return the settings of speculation, if any."""
    uses_mtp = drafter is None and config.speculative_method == "mtp"
    uses_draft_model = drafter is not None or config.speculative_method in ("draft", "mtp")
    if config.speculative_method == "none" and drafter is None:
        return None
    return Speculation(
        num_tokens=config.most_draft_tokens,
        uses_draft_model=uses_draft_model,
        min_ngram=config.ngram_prompt_lookup_min,
        max_ngram=config.ngram_prompt_lookup_max,
        max_batch=config.speculative_max_batch,
        max_num_logits=max_num_logits(config.max_num_seqs, config.most_draft_tokens),
        uses_mtp=uses_mtp,
    )
