"""DraftModel: a smaller model with the same vocabulary that proposes what the served one will sample next.

It sees the sequences of the runner's slots and has a KV cache of its own, with its own blocks; the scheduler does not
know how far it follows a sequence. It samples draft tokens as the served model samples tokens, with the same parameters
and the noise of the same positions, so that two models that agree sample the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from pagewick.attention.cache_spec import CacheSpec
from pagewick.config import EngineConfig
from pagewick.engine.cache.kv_cache import CacheGroup, allocate_cache
from pagewick.engine.device_copies import upload
from pagewick.engine.forward import ForwardStage, closed
from pagewick.engine.graph.choice import step_graph
from pagewick.engine.host_batch import HostBatch, ragged_batch
from pagewick.engine.model_loading import load_model, read_model_config
from pagewick.engine.progress import Progress
from pagewick.engine.sampling.columns import Draws
from pagewick.engine.sampling.sampler import sample
from pagewick.engine.sampling.traits import SampleRow
from pagewick.engine.speculation.draft_vocabulary import check_same_tokens, check_vocabulary
from pagewick.engine.speculation.drafting import DraftRequest
from pagewick.errors import ConfigError
from pagewick.layers.context import BatchRows
from pagewick.models.config import ModelConfig
from pagewick.parallel.collectives import Collectives


@dataclass(slots=True)
class _Followed:
    """The cache's content for a slot: the sequence's first `num_computed` tokens, then unconfirmed draft tokens."""

    num_computed: int = 0
    draft_token_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Job:
    """A request in progress. history: all its tokens and the draft tokens, if sampling looks back at them."""

    request: DraftRequest
    followed: _Followed
    num_wanted: int
    history: list[int]
    draft_token_ids: list[int] = field(default_factory=list)

    @property
    def slot(self) -> int:
        return self.request.slot

    @property
    def num_missing(self) -> int:
        return len(self.request.token_ids) - self.followed.num_computed

    @property
    def num_tokens(self) -> int:
        """Number of tokens, draft tokens included."""
        return len(self.request.token_ids) + len(self.draft_token_ids)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens of one job to compute now, from position `start` on. is_sampled: whether to sample after them."""

    job: _Job
    start: int
    token_ids: list[int]
    is_sampled: bool


class DraftModel:
    """The draft model of one rank, a Drafter. `allocate` must be called before the first `propose`.

    config: the engine's as the user gave it, with the draft's directory as `model`; the draft's context may be shorter
    than the served model's. target, target_directory: the served model. With a group of several ranks every rank must
    make the same calls; in a group of one the rank runs the whole draft. Raises ConfigError and ModelLoadError.
    """

    def __init__(
        self,
        config: EngineConfig,
        collectives: Collectives,
        device: torch.device,
        *,
        target: ModelConfig,
        target_directory: Path,
    ) -> None:
        directory = Path(config.model)
        found = read_model_config(directory)
        if found.encoder is not None or target.encoder is not None:
            raise ConfigError(
                f"--speculative-model {directory}: encoders write no text; {found.architecture} cannot draft for "
                f"{target.architecture}"
            )
        if found.image_attention is not None or target.image_attention is not None:
            raise ConfigError(
                f"--speculative-model {directory}: captions of images have no draft models; {found.architecture} "
                f"cannot draft for {target.architecture}"
            )
        check_vocabulary(found, target)
        check_same_tokens(directory, target_directory)
        # These flags are for the served model. The draft's experts, if any, stay on the device: it is small.
        own = replace(
            config,
            max_model_len=None, rope_scaling=None, rope_theta=None, num_experts_offload_per_rank=0, quantization=None,
            language_model_only=True, mmproj=None, fp8_activations=False,
        )  # fmt: skip
        loaded = load_model(own, collectives, device)
        self.model = loaded.model
        self.model_config = loaded.model_config
        self.config = loaded.config
        self.groups: list[CacheGroup] = loaded.groups
        self._device = device
        self._collectives = collectives
        self._num_target_tokens = target.vocab_size
        if any(group.spec.prefix_reuse == "snapshots" or group.spec.chunk_alignment > 1 for group in self.groups):
            raise ConfigError(
                f"--speculative-model {directory}: {self.model_config.architecture} has layers whose state cannot be "
                "taken back when a draft token is rejected; use a draft model with attention in every layer"
            )

    def allocate(self, num_blocks: Sequence[int], max_model_len: int, progress: Progress | None = None) -> int:
        """Allocate the KV cache, `num_blocks` per group; return its bytes. progress: is marked on the way."""
        self._max_len = min(max_model_len, self.model_config.max_position_embeddings)
        specs = [group.spec for group in self.groups]
        self._blocks = _Blocks(specs, num_blocks, max_num_seqs=self.config.max_num_seqs, max_len=self._max_len)
        self._forward = step_graph(
            self.model,
            self.groups,
            num_blocks,
            self._max_len,
            self.config,
            self._device,
            self._collectives,
            progress or Progress.private(),
        )
        # By slot, the least recently requested first.
        self._followed: dict[int, _Followed] = {}
        caches = allocate_cache(self.groups, num_blocks, self._device)
        return sum(cache.nbytes for layers in caches for cache in layers)

    def close(self) -> None:
        """Free the graphs. No draft tokens may be asked for afterwards."""
        self._forward = closed

    def start(self, slot: int) -> None:
        """Forget the slot's last sequence and free its blocks: another one moves in."""
        self._followed.pop(slot, None)
        self._blocks.free(slot)

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Return up to `num_tokens` draft tokens for each request, none beyond either model's context.

        [] where the draft has not computed all tokens of the sequence yet (a call computes at most
        `max_num_batched_tokens` tokens of all requests), has no blocks for it, or does not know one of its tokens.
        """
        jobs = [self._job(request) for request in requests]
        wanting = [job for job in jobs if job.num_wanted > 0 and self._knows_tokens(job)]
        # Those that miss least come first: they have most of their blocks, and need least of the budget.
        wanting.sort(key=lambda job: job.num_missing)
        busy = {request.slot for request in requests}
        pieces = self._catch_up([job for job in wanting if self._reserve(job, busy)])
        while pieces:
            self._run(pieces)
            pieces = [
                _Piece(piece.job, piece.job.num_tokens - 1, piece.job.draft_token_ids[-1:], is_sampled=True)
                for piece in pieces
                if 0 < len(piece.job.draft_token_ids) < piece.job.num_wanted
            ]
        return [job.draft_token_ids for job in jobs]

    def _job(self, request: DraftRequest) -> _Job:
        """Begin a request: draft tokens that its sequence has accepted count as computed, the others are dropped."""
        followed = self._followed.pop(request.slot, None) or _Followed()
        self._followed[request.slot] = followed
        token_ids = request.token_ids
        # The last token is computed (again), for the logits of the next.
        limit = len(token_ids) - 1
        for draft_token_id in followed.draft_token_ids:
            if followed.num_computed >= limit or token_ids[followed.num_computed] != draft_token_id:
                break
            followed.num_computed += 1
        followed.num_computed = min(followed.num_computed, limit)
        followed.draft_token_ids = []
        num_wanted = min(request.num_tokens, self._max_len - len(token_ids))
        looks_back = request.sampling.params.needs_history or request.sampling.bad_word_ids
        history = list(token_ids) if looks_back else []
        return _Job(request, followed, num_wanted, history)

    def _knows_tokens(self, job: _Job) -> bool:
        num_known = self.model_config.vocab_size
        missing = job.request.token_ids[job.followed.num_computed :]
        return num_known == self._num_target_tokens or max(missing) < num_known

    def _reserve(self, job: _Job, busy: set[int]) -> bool:
        """Whether there are blocks for the whole sequence and its draft tokens; without all of them it gets none.

        Sequences that no request names now give up their blocks, the least recently requested first.
        """
        num_tokens = len(job.request.token_ids) + job.num_wanted - 1
        idle = [slot for slot in self._followed if slot not in busy]
        if not self._blocks.could_extend(job.slot, num_tokens, idle):
            self.start(job.slot)
            return False
        while not self._blocks.extend(job.slot, num_tokens):
            self.start(idle.pop(0))
        return True

    def _catch_up(self, jobs: Sequence[_Job]) -> list[_Piece]:
        """Return the missing tokens of each job, which gets an equal share of the budget that those before it left."""
        budget = self.config.max_num_batched_tokens
        assert budget is not None, "resolve() sets it"
        pieces = []
        for index, job in enumerate(jobs):
            num_tokens = min(job.num_missing, -(-budget // (len(jobs) - index)))
            budget -= num_tokens
            if num_tokens:
                start, end = job.followed.num_computed, job.followed.num_computed + num_tokens
                token_ids = list(job.request.token_ids[start:end])
                pieces.append(_Piece(job, start, token_ids, is_sampled=num_tokens == job.num_missing))
        return pieces

    def _run(self, pieces: Sequence[_Piece]) -> None:
        """Compute the pieces in one batch, and sample a draft token for each that wants one."""
        hidden_states = self._forward(self._blocks.batch(pieces), ForwardStage.HIDDEN_STATES).hidden_states
        last_rows = np.cumsum([len(piece.token_ids) for piece in pieces]) - 1
        for piece in pieces:
            if piece.job.draft_token_ids:
                piece.job.followed.draft_token_ids += piece.token_ids
            else:
                piece.job.followed.num_computed += len(piece.token_ids)
        wanted = [index for index, piece in enumerate(pieces) if piece.is_sampled]
        if wanted:
            (rows,) = upload([last_rows[wanted]], self._device)
            num_rows = BatchRows([int(piece.is_sampled) for piece in pieces], self._device)
            logits = self.model.compute_logits(hidden_states[rows], num_rows)
            self._sample([pieces[index].job for index in wanted], logits)

    def _sample(self, jobs: Sequence[_Job], logits: Tensor) -> None:
        """Sample a draft token for each job from its row of the logits. A row that has no numbers ends the job."""
        if num_lacking := self._num_target_tokens - logits.shape[1]:
            # Sampling parameters may name any token of the served model.
            logits = pad(logits, (0, num_lacking), value=float("-inf"))
        rows = [SampleRow(job.request.sampling, job.num_tokens, job.history) for job in jobs]
        sampled = sample(logits, dict(enumerate(rows)), Draws.of(rows))
        for job, token_id, is_valid in zip(jobs, sampled.token_ids.tolist(), sampled.is_valid.tolist(), strict=True):
            if is_valid:
                job.draft_token_ids.append(token_id)
                job.history.append(token_id)
            else:
                job.num_wanted = len(job.draft_token_ids)


class _Blocks:
    """The blocks of every slot in every cache group; every token of a sequence keeps its block."""

    def __init__(
        self, specs: Sequence[CacheSpec], num_blocks: Sequence[int], *, max_num_seqs: int, max_len: int
    ) -> None:
        self._specs = list(specs)
        self._free = [list(reversed(range(number))) for number in num_blocks]
        self._tables = [np.zeros((max_num_seqs, spec.num_blocks(max_len)), np.int32) for spec in specs]
        self._table_lens = np.zeros((len(specs), max_num_seqs), np.int64)

    def could_extend(self, slot: int, num_tokens: int, idle: Sequence[int]) -> bool:
        """Whether `extend` will succeed once the idle slots are freed."""
        reclaimable = self._table_lens[:, list(idle)].sum(axis=1)
        return all(
            number <= len(free) + more
            for number, free, more in zip(self._lacking(slot, num_tokens), self._free, reclaimable, strict=True)
        )

    def extend(self, slot: int, num_tokens: int) -> bool:
        """Give the slot blocks for its first `num_tokens` tokens in all groups; false if there are too few."""
        lacking = self._lacking(slot, num_tokens)
        if any(number > len(free) for number, free in zip(lacking, self._free, strict=True)):
            return False
        for group, number in enumerate(lacking):
            for _ in range(number):
                self._tables[group][slot, self._table_lens[group, slot]] = self._free[group].pop()
                self._table_lens[group, slot] += 1
        return True

    def _lacking(self, slot: int, num_tokens: int) -> list[int]:
        held = self._table_lens[:, slot].tolist()
        return [max(0, spec.num_blocks(num_tokens) - number) for spec, number in zip(self._specs, held, strict=True)]

    def free(self, slot: int) -> None:
        for group, free in enumerate(self._free):
            free += reversed(self._tables[group][slot, : self._table_lens[group, slot]].tolist())
            self._table_lens[group, slot] = 0

    def batch(self, pieces: Sequence[_Piece]) -> HostBatch:
        """Return the batch of a step that computes these pieces, whose blocks are there."""
        slots = [piece.job.slot for piece in pieces]
        token_ids = [token_id for piece in pieces for token_id in piece.token_ids]
        return ragged_batch(
            np.array(token_ids, np.int64),
            starts=[piece.start for piece in pieces],
            num_tokens=[len(piece.token_ids) for piece in pieces],
            block_tables=[
                tables[slots, : lens[slots].max()] for tables, lens in zip(self._tables, self._table_lens, strict=True)
            ],
            specs=self._specs,
        )
