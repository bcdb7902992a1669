"""Engine: requests in, tokens out. It knows token ids only, never text, and runs in the caller's thread.

engine = Engine(config)
engine.add(request)
while engine.has_work:
    for delta in engine.step(): ...
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable

from pagewick import kernels
from pagewick.config import EngineConfig
from pagewick.engine.admission import check_request
from pagewick.engine.block_manager import BlockManager
from pagewick.engine.messages import EngineRequest, EngineStats, ModelInfo, RequestDelta
from pagewick.engine.scheduler import Scheduler
from pagewick.engine.worker import RankGroup
from pagewick.errors import EngineDeadError, InvalidRequestError
from pagewick.log import get_logger

logger = get_logger(__name__)


class Engine:
    """Loads the model of `config` (a local directory) and serves it; starts the other ranks if there are to be any.

    Raises ConfigError and ModelLoadError. One engine per process: the ranks' group is the process's.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._ranks = RankGroup(config, os.environ)
        runner = self._ranks.runner
        self._block_manager = BlockManager(
            [group.spec for group in runner.groups],
            self._ranks.num_blocks,
            hash_key=secrets.token_bytes(32),
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._scheduler = Scheduler(
            self._block_manager,
            max_num_seqs=runner.config.max_num_seqs,
            max_num_batched_tokens=runner.config.max_num_batched_tokens,
            max_model_len=self._ranks.max_model_len,
            eos_token_ids=runner.eos_token_ids,
        )
        self._has_failed = False
        self.info = self._describe()
        logger.info("KV cache: %d blocks of %d tokens", self.info.num_kv_blocks, self.info.block_size)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises InvalidRequestError if it is wrong or can never fit, or its id is in use."""
        check_request(request, self.info)
        if self._scheduler.is_known(request.request_id):
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", param="request_id")
        self._scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Stop these requests and free what they hold; unknown ids are no mistake (they may just have finished)."""
        self._scheduler.abort(request_ids)

    def step(self) -> list[RequestDelta]:
        """Advance every scheduled request by some tokens; what each of them gained.

        Raises EngineDeadError after a step that failed: what the caches hold is then unknown.
        """
        if self._has_failed:
            raise EngineDeadError("an earlier step of this engine failed; make a new one")
        self._has_failed = True
        plan = self._scheduler.schedule()
        output = self._ranks.submit(plan).result()
        deltas = self._scheduler.update(output)
        self._has_failed = False
        return deltas

    def stats(self) -> EngineStats:
        return self._scheduler.refresh_stats()

    def check_integrity(self) -> list[str]:
        """Contradictions in the block manager's books; empty if all is well."""
        return self._scheduler.check_integrity()

    def close(self) -> None:
        """Let the other ranks go. The engine cannot be used afterwards."""
        self._ranks.close()

    def _describe(self) -> ModelInfo:
        runner, config = self._ranks.runner, self._ranks.runner.config
        return ModelInfo(
            model_path=config.model,
            architecture=runner.model_config.architecture,
            dtype=config.dtype,
            device=config.device,
            kernels=kernels.native_status() if config.device == "cpu" else "reference kernels",
            vocab_size=runner.model_config.vocab_size,
            max_model_len=self._ranks.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=runner.groups[0].spec.block_size,
            num_kv_blocks=sum(self._ranks.num_blocks),
            kv_cache_bytes=self._ranks.kv_cache_bytes,
            num_parameters=runner.num_parameters,
            tensor_parallel_size=self._ranks.world_size,
        )
