"""Chunks of tokens against a recurrence in float64, token by token.

The kernels get what the convolution would leave for them. Interpreted, they multiply in float32 for all dtypes; in the
emulator, in those of tensor cores.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pagewick.kernels import batch_invariance
from pagewick.kernels.options import AttentionMetadata
from pagewick.layers.state_config import DeltaConfig, MambaConfig
from tests.deep import IS_DEEP
from tests.kernels.states import metadata, random_states
from tests.kernels.triton.harness import IS_COMPILED

import triton.language as tl  # isort: skip  (skipped without Triton)
from pagewick.kernels.triton import chunk_launches, delta, scan, windows  # isort: skip  (skipped without Triton)
from pagewick.kernels.triton.chunk_launches import LONG, NEVER, Heads, Rule  # isort: skip
from pagewick.kernels.triton.variant import Variant  # isort: skip

pytestmark = [
    # The interpreter rounds e^x for masked numbers, and for gates of 100 and more.
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
KINDS = {kind.rule: kind for kind in (*delta._CHUNKS.values(), scan._CHUNKS)}
WIDTH = 2
# Roundings of operands: half a unit in the last place of 1, and a whole one of tf32, which is cut off.
OPERANDS = {torch.bfloat16: 2**-9, torch.float16: 2**-10} if IS_COMPILED else dict.fromkeys(chunk_launches.DTYPES, 0.0)


@dataclass(frozen=True)
class Prompts:
    """Results of convolutions, gates and states."""

    rule: Rule
    heads: Heads
    mixed: Tensor
    decay: Tensor
    beta: Tensor
    log_decay: Tensor
    dt_bias: Tensor
    skip: Tensor
    states: Tensor
    batch: AttentionMetadata
    decay_bound: float | None = None
    strength: float = 1.0

    @property
    def is_scan(self) -> bool:
        return self.rule == Rule.SCAN

    def run(self) -> tuple[Tensor, Tensor]:
        """Return results [T, H, DV] and states [blocks, H, DK, DV]."""
        mixed, states, kind = self.mixed.clone(), self.states.clone(), KINDS[self.rule]
        where = windows.where(states, self.batch, mixed.shape[1], WIDTH)
        gates = {
            "decay_ptr": self.decay, "decay_stride": self.decay.stride(0), "log_decay_ptr": self.log_decay,
            "dt_bias_ptr": self.dt_bias,
        }  # fmt: skip
        by_channel = self.rule == Rule.CHANNEL_DELTA
        gates |= {"decay_bound": self.decay_bound or 0.0} if by_channel else {"dt_scale": 1.0}
        if not self.is_scan:
            gates |= {"beta_ptr": self.beta, "beta_stride": self.beta.stride(0), "strength": self.strength}
        kind.advance(self.heads, mixed, where, gates, self.skip if self.is_scan else None)
        first = self.heads.first_value
        values = mixed[:, first : first + self.heads.num_heads * self.heads.value_dim]
        return values.unflatten(1, (self.heads.num_heads, -1)), self.memories(states)

    def memories(self, states: Tensor) -> Tensor:
        h = self.heads
        numbers = states.view(torch.float32)[:, (WIDTH - 1) * self.mixed.shape[1] :]
        return numbers.view(len(states), h.num_heads, h.key_dim, h.value_dim)

    def expected(self) -> tuple[Tensor, Tensor]:
        """Return the same in float64; of sequences that are not long enough, what there was."""
        h, mixed, before = self.heads, self.mixed.double(), self.memories(self.states)
        left = before.double().clone()

        def rows(first: int, count: int, size: int) -> Tensor:
            parts = mixed[:, first : first + count * size].unflatten(1, (count, size))
            return parts.repeat_interleave(h.num_heads // count, dim=1)

        queries, keys = (rows(first, h.num_groups, h.key_dim) for first in (h.first_query, h.first_key))
        values = rows(h.first_value, h.num_heads, h.value_dim)
        out = values.clone()
        # For each head one factor, or one for each row of its state.
        inputs = (self.decay.double() + self.dt_bias.double()).unflatten(1, (h.num_heads, -1))
        times, speeds = F.softplus(inputs, threshold=1e9), self.log_decay.double().exp()[:, None]
        logs = -speeds * times
        if self.decay_bound is not None:
            logs = self.decay_bound * (speeds * inputs).sigmoid()
        kept, strengths = logs.exp(), self.strength * self.beta.double().sigmoid()
        starts = self.batch.cu_seqlens_q.tolist()
        for seq, (source, target, num_stored) in enumerate(self.batch.block_tables.tolist()):
            tokens = range(starts[seq], starts[seq + 1])
            if len(tokens) < LONG or 0 < num_stored < len(tokens):
                continue
            has_past = int(self.batch.context_lens[seq]) > len(tokens)
            memory = before[source].double() if has_past else torch.zeros_like(left[0])
            for t in tokens:
                memory = memory * kept[t, :, :, None]
                if not self.is_scan:
                    held = (memory * keys[t, :, :, None]).sum(1)
                    new = (values[t] - held) * strengths[t, :, None]
                else:
                    new = values[t] * times[t]
                memory = memory + keys[t, :, :, None] * new[:, None]
                out[t] = (memory * queries[t, :, :, None]).sum(1)
                if self.is_scan:
                    out[t] += self.skip.double()[:, None] * values[t]
            left[target] = memory
        return out, left

    def check(self, num_roundings: int = 4) -> None:
        """That results and states are those of float64, but for sums in float32 and num_roundings of operands.

        Operands are as large as the largest numbers of their head.
        """
        rounding = num_roundings * OPERANDS[self.decay.dtype]
        for found, expected in zip(self.run(), self.expected(), strict=True):
            # Blocks that are nobody's may have NaN.
            assert torch.equal(found.isnan(), expected.isnan())
            sizes = expected.nan_to_num().abs()
            largest = sizes.transpose(0, 1).flatten(1).amax(1).view(-1, *[1] * (sizes.dim() - 2))
            tolerance = 2e-6 * (1 + sizes.amax(-1, True)) + rounding * (1 + largest)
            excess = (found - expected).nan_to_num().abs() - tolerance
            assert bool((excess <= 0).all()), f"an error of {excess.max().item()} more than tolerated"


def make_prompts(
    q_lens: Sequence[int],
    earlier: Sequence[int],
    *,
    rule: Rule,
    heads: tuple[int, int] = (2, 1),
    dims: tuple[int, int] = (64, 32),
    dtype: torch.dtype = torch.bfloat16,
) -> Prompts:
    """Random numbers; heads: H and G (H for CHANNEL_DELTA), dims: DK and DV.

    Queries and keys have the length 1, or about 1 for Mamba-2.
    """
    generator = torch.Generator().manual_seed(sum(q_lens) + (rule != Rule.SCAN))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    (num_heads, num_groups), (key_dim, value_dim), num_tokens = heads, dims, sum(q_lens)
    num_groups = num_heads if rule == Rule.CHANNEL_DELTA else num_groups
    queries, keys = (random(num_tokens, num_groups, key_dim) for _ in range(2))
    if rule != Rule.SCAN:
        queries, keys = F.normalize(queries, dim=-1), F.normalize(keys, dim=-1)
    else:
        queries, keys = queries * key_dim**-0.5, keys * key_dim**-0.5
    values, size = random(num_tokens, num_heads * value_dim), num_groups * key_dim
    if rule != Rule.SCAN:
        mixed, places = torch.cat((queries.flatten(1), keys.flatten(1), values), dim=1), (0, size, 2 * size)
    else:
        mixed = torch.cat((values, keys.flatten(1), queries.flatten(1)), dim=1)
        places = values.shape[1] + size, values.shape[1], 0
    states, batch = random_states(
        generator, q_lens, earlier, (WIDTH - 1) * mixed.shape[1] + num_heads * key_dim * value_dim, in_place=False
    )
    # Rows that lie apart, as in a fused product.
    decays = num_heads * (key_dim if rule == Rule.CHANNEL_DELTA else 1)
    decay, beta, _ = random(num_tokens, decays + num_heads + 3).to(dtype).split([decays, num_heads, 3], dim=1)
    vectors = random(num_heads) - 2, random(decays), random(num_heads)
    return Prompts(rule, Heads(num_heads, num_groups, *dims, *places), mixed, decay, beta, *vectors, states, batch)


ALL = pytest.mark.parametrize("rule", Rule, ids=str)
LENGTHS = [32, 63, 64, 65, 127, 128, 1003] if IS_DEEP else [130]


@ALL
@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt(length: int, rule: Rule) -> None:
    make_prompts([length], [9], rule=rule).check()


@ALL
def test_a_ragged_batch_with_short_sequences_and_empty_ones(monkeypatch: pytest.MonkeyPatch, rule: Rule) -> None:
    kind = KINDS[rule]
    for name in ("relates", "advances"):
        few = {
            key: replace(each, constexprs=each.constexprs | {"BLOCK_B": 2}) for key, each in getattr(kind, name).items()
        }
        monkeypatch.setitem(KINDS, rule, replace(KINDS[rule], **{name: few}))
    q_lens = [1, LONG, 0, LONG - 1, LONG, 65, 0, 1, 64]
    prompts = make_prompts(q_lens, [3, 0, 2, 1, 7, 4, 0, 2, 0], rule=rule, heads=(1, 1))
    # A draft token, for which a sequence is taken token by token.
    prompts.batch.block_tables[4, 2] = LONG - 1
    prompts.check()


@ALL
@pytest.mark.parametrize("dtype", chunk_launches.DTYPES if IS_DEEP else [torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(128, 64), *([(64, 96), (96, 192), (256, 32)] if IS_DEEP else [])], ids=str)
def test_dimensions_and_dtypes(dims: tuple[int, int], dtype: torch.dtype, rule: Rule) -> None:
    if dims[0] in KINDS[rule].key_dims:
        make_prompts([70], [5], rule=rule, heads=(3 if IS_DEEP else 1, 1), dims=dims, dtype=dtype).check()


@ALL
def test_gates_of_all_sizes(rule: Rule) -> None:
    """Heads that forget everything at some tokens and nothing at others, that never forget, and that always do.

    Where channels decay by themselves, a third of them do as the head before.
    """
    by_channel = rule == Rule.CHANNEL_DELTA
    prompts = make_prompts([130], [0], rule=rule, heads=(4, 1))
    log_decay, beta = torch.tensor([9.0, -30.0, 6.0, -3.0]), prompts.beta.clone()
    decay = prompts.decay.unflatten(1, (4, -1)).clone()
    decay[:, 0] = torch.where(torch.arange(130) % 7 == 3, 200.0, -12.0)[:, None]
    decay[:, 2] = 100.0
    decay[:, 3] = -50.0
    if by_channel:
        decay[:, :, ::3] = decay[:, :, ::3].roll(1, 1)
    beta[::3] = 200.0
    beta[1::3] = -200.0
    dt_bias = torch.zeros_like(prompts.dt_bias)
    prompts = replace(prompts, decay=decay.flatten(1), beta=beta, log_decay=log_decay, dt_bias=dt_bias)
    prompts.check()


def test_channels_whose_decays_have_a_bound() -> None:
    """In a third of the tokens, each channel by itself either keeps its state or multiplies it by e^-50."""
    prompts = make_prompts([67], [3], rule=Rule.CHANNEL_DELTA, heads=(2, 2))
    decay = prompts.decay.clone()
    decay[::3] *= 1000
    replace(prompts, decay=decay, decay_bound=-50.0).check()


def test_states_that_take_in_twice_a_difference() -> None:
    """With keys of 96 numbers, and states that change their sign at a key."""
    prompts = make_prompts([70], [5], rule=Rule.DELTA, heads=(2, 1), dims=(96, 32))
    beta = prompts.beta.clone()
    beta[::2] = 200.0
    replace(prompts, beta=beta, strength=2.0).check()


def test_keys_that_repeat_and_alternate_give_no_cancellation() -> None:
    """L is all ones, or alternates: its 32nd power has numbers of 10^18."""
    prompts = make_prompts([64], [7], rule=Rule.DELTA, heads=(2, 2))
    mixed, heads = prompts.mixed.clone(), prompts.heads
    keys = mixed[:, heads.first_key : heads.first_value].view(64, 2, 64)
    keys[:] = keys[:1]
    keys[::2, 1] *= -1
    prompts = replace(prompts, mixed=mixed, beta=torch.full_like(prompts.beta, 20.0), log_decay=torch.full((2,), -40.0))
    # Each token takes back what the one before has added, in numbers that are rounded: errors of all 64 add up.
    prompts.check(num_roundings=16)


@ALL
def test_a_sequence_has_the_bits_that_it_has_alone(rule: Rule) -> None:
    prompts = make_prompts([40, 3, 70], [0, 2, 9], rule=rule)
    out, states = prompts.run()
    tables, lengths, _ = prompts.batch[:3]
    for seq, rows in ((0, slice(0, 40)), (2, slice(43, 113))):
        batch = metadata(tables[seq : seq + 1].tolist(), lengths[seq : seq + 1].tolist(), [rows.stop - rows.start])
        alone = replace(
            prompts, mixed=prompts.mixed[rows], decay=prompts.decay[rows], beta=prompts.beta[rows], batch=batch
        )
        found, left = alone.run()
        assert torch.equal(found, out[rows])
        assert torch.equal(left[tables[seq, 1]], states[tables[seq, 1]])


def test_which_calls_are_taken_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    heads, batch = Heads(2, 1, 64, 32, 0, 64, 128), metadata([[0, 1]], [40], [40])

    def least(dtype: torch.dtype = torch.bfloat16, of: Heads = heads, longest: int | None = None) -> int:
        return delta._CHUNKS[False].least(dtype, of, batch._replace(max_query_len=longest), 40)

    assert least() == least(torch.float16) == least(longest=LONG) == LONG
    assert least(torch.float32) == least(longest=LONG - 1) == NEVER
    assert least(of=heads._replace(key_dim=32)) == least(of=heads._replace(value_dim=16)) == NEVER
    monkeypatch.setattr(batch_invariance, "is_required", lambda: True)
    assert least() == NEVER


@pytest.mark.parametrize("size", [16, 32, 64])
def test_there_is_a_slot_for_every_chunk(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    batches = [[LONG] * 9, [2 * LONG - 1] * 5, [size + 1] * 7, [LONG - 1] * 40 + [70], [1000], [LONG + 1] * 8]
    batches += [torch.randint(1, high, (12,), generator=generator).tolist() for high in (40, 70, 300)]
    for lengths in batches:
        needed = sum(-(-length // size) for length in lengths if length >= LONG)
        found = chunk_launches._most_chunks(sum(lengths), len(lengths), size)
        assert needed <= found <= needed + len(lengths) + sum(x for x in lengths if x < LONG) // size + 1


@pytest.mark.parametrize(
    ("dtype", "rule"), [pytest.param(*each, id=str(each)) for each in itertools.product(chunk_launches.DTYPES, Rule)]
)
def test_the_memory_for_chunks_is_what_the_plan_says(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rule: Rule
) -> None:
    """Prompts of 33 tokens leave the most of their chunks empty."""
    allocated: dict[str, int] = {}

    def launch(variant: Variant, grid: tuple[int, ...], **given: Any) -> None:
        names = given.keys() & {"rows_ptr", "pairs_ptr", "inverse_ptr", "factors_ptr"}
        allocated.update((name, given[name].nbytes) for name in names if given[name] is not None)

    monkeypatch.setattr(Variant, "launch", launch)
    # Interpreted, all is in float32.
    monkeypatch.setattr(chunk_launches, "_operand", lambda of: tl.bfloat16 if of == torch.bfloat16 else tl.float32)
    lengths, key_dim = [LONG + 1] * 40, 64
    num_groups, num_heads = (4, 4) if rule == Rule.CHANNEL_DELTA else (2, 6)
    heads = Heads(num_heads, num_groups, key_dim, 32, 0, 0, 0)
    config: DeltaConfig | MambaConfig = DeltaConfig(
        num_key_heads=num_groups, num_value_heads=num_heads, key_dim=key_dim, value_dim=32,
        has_channel_decay=rule == Rule.CHANNEL_DELTA,
    )  # fmt: skip
    if rule == Rule.SCAN:
        config = MambaConfig(num_heads=num_heads, head_dim=32, num_groups=num_groups, state_dim=key_dim)
    places = dict.fromkeys(("starts_ptr", "tables_ptr", "table_stride", "num_channels"), 0)
    KINDS[rule].advance(
        heads,
        torch.empty(sum(lengths), 8),
        places | {"lengths_ptr": torch.tensor(lengths)},
        {"decay_ptr": torch.empty(1, dtype=dtype)},
    )
    planned = 2 * sum(lengths) * config.chunk_width(is_float16=dtype == torch.float16)
    assert sum(allocated.values()) <= planned <= 1.1 * sum(allocated.values())
