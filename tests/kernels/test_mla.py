"""Multi-head latent attention and what it stores, against the same in float64, and the same bits in any company."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewick import kernels as dispatched
from pagewick.kernels import reference_mla
from pagewick.kernels.matrix import PerHeadLinear
from pagewick.kernels.options import AttentionMetadata, Rotation
from pagewick.kernels.recorded_steps import RecordedStep, StepMemory, record
from tests.kernels.conftest import FULL_ISAS_HERE, NativeKernels, required_library, with_isa
from tests.kernels.paged import PROBABILITY_ROUNDING

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
DTYPES = tuple(ROUNDING)
SCALE = 0.3


@pytest.fixture(params=["reference", *FULL_ISAS_HERE])
def operations(request: pytest.FixtureRequest) -> Any:
    if request.param == "reference":
        yield reference_mla
    else:
        yield from with_isa(request.param)


@dataclass(frozen=True)
class Latents:
    """The arguments of latent_attention, and what is cached [context_len, L + R] of each sequence."""

    q_latent: Tensor
    q_rope: Tensor
    cache: Tensor
    block_tables: Tensor
    context_lens: Tensor
    cu_seqlens_q: Tensor
    rows: list[Tensor]
    sinks: Tensor | None = None

    def attend(self, operations: ModuleType | NativeKernels) -> Tensor:
        metadata = AttentionMetadata(self.block_tables, self.context_lens, self.cu_seqlens_q)
        result: Tensor = operations.latent_attention(
            self.q_latent, self.q_rope, self.cache, metadata, softmax_scale=SCALE, sinks=self.sinks
        )
        return result

    def only(self, seq: int, begin: int = 0, end: int | None = None) -> Latents:
        """Queries begin .. end of one sequence, as a batch of its own."""
        first, last = self.cu_seqlens_q[seq : seq + 2].tolist()
        end = last - first if end is None else end
        return replace(
            self,
            q_latent=self.q_latent[first + begin : first + end],
            q_rope=self.q_rope[first + begin : first + end],
            block_tables=self.block_tables[seq : seq + 1],
            context_lens=self.context_lens[seq : seq + 1] - (last - first - end),
            cu_seqlens_q=torch.tensor([0, end - begin], dtype=torch.int32),
        )

    def expected(self, *, sizes: bool = False) -> Tensor:
        """In float64, query by query; of the latents' absolute values if `sizes`."""
        out = torch.empty(self.q_latent.shape, dtype=torch.float64)
        for seq, rows in enumerate(self.rows):
            first, last = self.cu_seqlens_q[seq : seq + 2].tolist()
            for token in range(first, last):
                seen = rows[: len(rows) - (last - 1 - token)].double()
                query = torch.cat((self.q_latent[token], self.q_rope[token]), dim=-1).double()
                latents = seen[:, : out.shape[2]]
                logits = query @ seen.T * SCALE
                if self.sinks is not None:
                    logits = torch.cat((logits, self.sinks.double().unsqueeze(1)), dim=-1)
                weights = logits.softmax(-1)[:, : len(seen)]
                out[token] = weights @ (latents.abs() if sizes else latents)
        return out


def make_latents(
    q_lens: list[int],
    context_lens: list[int],
    *,
    heads: int = 3,
    dims: tuple[int, int] = (24, 8),
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
) -> Latents:
    """Random numbers, queries exact in cache_dtype too. Blocks lie in random order; nobody's rows are NaN."""
    generator = torch.Generator().manual_seed(0)
    cache_dtype = cache_dtype or dtype
    num_blocks = [-(-context_len // block_size) for context_len in context_lens]
    block_ids = torch.randperm(sum(num_blocks) + 3, generator=generator)
    cache = torch.full((len(block_ids), block_size, sum(dims)), float("nan"), dtype=cache_dtype)
    block_tables = torch.full((len(q_lens), max(num_blocks) + 1), -1, dtype=torch.int32)
    rows = []
    for seq, context_len in enumerate(context_lens):
        mine = block_ids[sum(num_blocks[:seq]) : sum(num_blocks[: seq + 1])]
        block_tables[seq, : len(mine)] = mine
        rows.append(torch.randn(context_len, sum(dims), generator=generator).to(cache_dtype))
        positions = torch.arange(context_len)
        cache[mine[positions // block_size], positions % block_size] = rows[-1]
    q = torch.randn(sum(q_lens), heads, sum(dims), generator=generator).to(cache_dtype).to(dtype)
    q_latent, q_rope = q[..., : dims[0]].contiguous(), q[..., dims[0] :].contiguous()
    lens = torch.tensor(context_lens, dtype=torch.int32)
    return Latents(q_latent, q_rope, cache, block_tables, lens, torch.tensor([0, *q_lens]).cumsum(0).int(), rows)


def assert_is_expected(out: Tensor, latents: Latents) -> None:
    """But for the rounding of `out` and, over bfloat16, of probabilities: see tests/kernels/paged.py."""
    expected = latents.expected()
    tolerance = 1e-5 + ROUNDING[out.dtype] * expected.abs()
    if latents.cache.dtype in PROBABILITY_ROUNDING:
        tolerance = tolerance + PROBABILITY_ROUNDING[latents.cache.dtype] * latents.expected(sizes=True)
    error = (out.double() - expected).abs()
    assert bool((error <= tolerance).all()), f"an error of {(error - tolerance).max().item()} more than tolerated"


SHAPES: dict[str, dict[str, Any]] = {
    "one of everything": {"heads": 1, "dims": (1, 2), "block_size": 1},
    "odd": {"heads": 5, "dims": (17, 6), "block_size": 5},
    "many heads": {"heads": 130, "dims": (40, 8), "block_size": 32},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention(operations: Any, shape: str, dtype: torch.dtype) -> None:
    latents = make_latents([1, 5, 33, 1], [1, 5, 70, 300], dtype=dtype, **SHAPES[shape])
    assert_is_expected(latents.attend(operations), latents)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_take_a_share_of_each_head(operations: Any, dtype: torch.dtype) -> None:
    """Beside few latents, and beside many, in several segments; the sequences' tiles begin with another head each."""
    latents = make_latents([1, 5, 33, 1], [1, 5, 70, 2100], heads=5, dtype=dtype)
    latents = replace(latents, sinks=torch.tensor([0.5, 4.0, -3.0, 9.0, -60.0]))
    assert_is_expected(latents.attend(operations), latents)


@pytest.mark.parametrize(("dtype", "cache_dtype"), [(a, b) for a in DTYPES for b in DTYPES if a != b])
def test_the_cache_may_have_another_dtype(native: NativeKernels, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    latents = make_latents([2, 3], [40, 3], dtype=dtype, cache_dtype=cache_dtype)
    assert_is_expected(latents.attend(native), latents)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_as_large_as_deepseek(native: NativeKernels, dtype: torch.dtype) -> None:
    latents = make_latents([1, 3], [1030, 40], heads=16, dims=(512, 64), block_size=32, dtype=dtype)
    latents = replace(latents, q_latent=latents.q_latent / 16, q_rope=latents.q_rope / 16)
    assert_is_expected(latents.attend(native), latents)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_has_the_same_bits_in_any_company(native: NativeKernels, dtype: torch.dtype) -> None:
    """Contexts that end at the edges of blocks, tiles (256) and segments (1024), and within them."""
    latents = make_latents([1, 3, 40, 1, 1, 150, 2], [1024, 257, 1040, 256, 31, 2060, 1025], heads=3, dtype=dtype)
    together = latents.attend(native)
    assert_is_expected(together, latents)
    for num_threads in (2, 3):
        native.set_num_threads(num_threads)
        assert torch.equal(latents.attend(native), together)
    for num_threads in (1, 2):
        native.set_num_threads(num_threads)
        alone = [latents.only(seq).attend(native) for seq in range(len(latents.rows))]
        assert torch.equal(torch.cat(alone), together)
    chunks = [latents.only(5, begin, min(begin + 7, 150)).attend(native) for begin in range(0, 150, 7)]
    assert torch.equal(torch.cat(chunks), alone[5])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_token_is_blind_to_what_comes_after_it(native: NativeKernels, dtype: torch.dtype, value: float) -> None:
    latents = make_latents([40], [300], heads=2, dtype=dtype)
    before = latents.attend(native)
    cache = latents.cache.clone()
    cache[latents.block_tables[0, 270 // 16], 270 % 16] = value
    after = replace(latents, cache=cache).attend(native)
    assert torch.equal(after[:10], before[:10])
    assert not bool(after[10:].isfinite().any())


def make_stored(dtype: torch.dtype, num_tokens: int, heads: int, dims: tuple[int, int, int]) -> dict[str, Tensor]:
    """dims: of what does not rotate, of latents, of what does. Rows lie apart from each other."""
    generator = torch.Generator().manual_seed(1)
    nope_dim, latent_dim, rope_dim = dims

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "q": numbers(num_tokens, heads * (nope_dim + rope_dim) + 3).to(dtype)[:, :-3].view(num_tokens, heads, -1),
        "latents": (2 * numbers(num_tokens, latent_dim + rope_dim + 5)).to(dtype)[:, :-5],
        "norm_weight": numbers(latent_dim).to(dtype),
        "cos": numbers(num_tokens, rope_dim)[:, : rope_dim // 2],
        "sin": numbers(num_tokens, rope_dim)[:, : rope_dim // 2],
    }


def store(
    operations: Any, cache: Tensor, slots: Tensor, stored: dict[str, Tensor], *, norm_eps: float, interleaved: bool
) -> Tensor:
    result: Tensor = operations.rope_and_store_latent(
        stored["q"], stored["latents"], cache, slots, norm_weight=stored["norm_weight"], norm_eps=norm_eps,
        rotation=Rotation(stored["cos"], stored["sin"], interleaved),
    )  # fmt: skip
    return result


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "interleaved"),
    [
        (torch.float32, torch.float32, False),
        (torch.float32, torch.bfloat16, True),
        (torch.bfloat16, torch.bfloat16, True),
        (torch.float16, torch.float32, False),
    ],
)
def test_storing(operations: Any, dtype: torch.dtype, cache_dtype: torch.dtype, interleaved: bool) -> None:
    dims = nope_dim, latent_dim, rope_dim = 5, 19, 6
    stored = make_stored(dtype, 7, 3, dims)
    slots = torch.tensor([3, -1, 11, 0, 4, 5, 7])
    cache = torch.full((3, 4, latent_dim + rope_dim), float("nan"), dtype=cache_dtype)
    q_rope = store(operations, cache, slots, stored, norm_eps=0.01, interleaved=interleaved)
    latent = stored["latents"].double()[:, :latent_dim]
    normed = latent / (latent.square().mean(-1, keepdim=True) + 0.01).sqrt() * stored["norm_weight"].double()

    def turned(x: Tensor) -> Tensor:
        """By complex numbers."""
        halves = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
        pairs = torch.complex(*(half.double() for half in halves))
        angles = torch.complex(stored["cos"].double(), stored["sin"].double())
        pairs = pairs * angles.view(7, *[1] * (x.dim() - 2), 3)
        both = (pairs.real, pairs.imag)
        return torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)

    rows = torch.cat((normed, turned(stored["latents"][:, latent_dim:])), dim=-1)
    rounding = ROUNDING[dtype]
    torch.testing.assert_close(q_rope.double(), turned(stored["q"][..., nope_dim:]), atol=4e-6, rtol=rounding)
    assert q_rope.dtype == dtype and q_rope.is_contiguous()
    found, is_stored = cache.flatten(0, 1), slots >= 0
    rounding += ROUNDING[cache_dtype]
    torch.testing.assert_close(found[slots[is_stored]].double(), rows[is_stored], atol=4e-6, rtol=rounding)
    untouched = torch.ones(12, dtype=torch.bool)
    untouched[slots[is_stored]] = False
    assert bool(found[untouched].isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_may_be_zero_and_nothing_may_be_stored(operations: Any, dtype: torch.dtype) -> None:
    stored, slots = make_stored(dtype, 5, 2, (3, 19, 6)), torch.tensor([3, -1, 11, 0, 4])
    caches = [torch.full((3, 4, 25), 7.0, dtype=dtype) for _ in range(3)]
    latents = stored["latents"], stored["latents"][:, :19], None
    turned = [
        store(operations, cache, slots, {**stored, "latents": each}, norm_eps=0.01, interleaved=True)  # type: ignore[dict-item]
        for cache, each in zip(caches, latents, strict=True)
    ]
    assert all(torch.equal(each, turned[0]) for each in turned)
    with_keys, without = (cache.flatten(0, 1)[slots[slots >= 0]] for cache in caches[:2])
    assert torch.equal(without[:, :19], with_keys[:, :19]) and not bool(without[:, 19:].any())
    assert int((caches[1] == 7).sum()) == 8 * 25 and bool((caches[2] == 7).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_stored_of_a_token_has_the_same_bits_in_any_company(native: NativeKernels, dtype: torch.dtype) -> None:
    stored = make_stored(dtype, 300, 4, (16, 96, 16))

    def store_some(tokens: slice) -> tuple[Tensor, Tensor]:
        cache = torch.full((10, 32, 112), float("nan"), dtype=dtype)
        given = {name: x if name == "norm_weight" else x[tokens] for name, x in stored.items()}
        q_rope = store(native, cache, torch.arange(300)[tokens], given, norm_eps=1e-6, interleaved=True)
        return q_rope, cache.flatten(0, 1)[tokens]

    together = store_some(slice(0, 300))
    for num_threads in (2, 3):
        native.set_num_threads(num_threads)
        assert all(torch.equal(*pair) for pair in zip(store_some(slice(0, 300)), together, strict=True))
    for tokens in (slice(0, 1), slice(250, 257), slice(299, 300)):
        assert all(torch.equal(a, b[tokens]) for a, b in zip(store_some(tokens), together, strict=True))


@pytest.mark.parametrize("num_tokens", [1, 65])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_of_each_head_with_its_own_matrix(dtype: torch.dtype, num_tokens: int) -> None:
    matrices = PerHeadLinear(3, 10, 7, dtype, "cpu")
    weights = torch.randn(3, 10, 7).to(dtype)
    for head, weight in enumerate(weights):
        matrices.weights.load(head, weight, 0)
    x = torch.randn(num_tokens, 3, 12).to(dtype)
    expected = torch.einsum("thk,hnk->thn", x[..., :7].double(), weights.double())
    found = matrices.linear(x[..., :7])
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=2 * ROUNDING[dtype])
    assert torch.equal(matrices.linear(x[-1:, :, :7]), found[-1:])


def test_operations_go_to_the_library_and_can_be_recorded() -> None:
    library = required_library()
    latents = make_latents([1, 1], [300, 40], dims=(64, 16))
    out = latents.attend(dispatched)
    assert torch.equal(out, latents.attend(NativeKernels(library)))
    assert not torch.equal(out, latents.attend(reference_mla))
    (result,), recorded = record(lambda: [latents.attend(dispatched)], StepMemory())
    assert isinstance(recorded, RecordedStep)
    latents.q_latent.copy_(latents.q_latent.flip(0))
    recorded.replay()
    assert torch.equal(result, latents.attend(dispatched))
    # float64, which the library does not support.
    wide = replace(latents, q_latent=latents.q_latent.double(), q_rope=latents.q_rope.double())
    torch.testing.assert_close(wide.attend(dispatched), result.double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_lens": torch.tensor([2], dtype=torch.int32)}, "contradict each other"),
        ({"cu_seqlens_q": torch.tensor([0, 2], dtype=torch.int32)}, "contradict each other"),
        ({"block_tables": torch.full((1, 4), 99, dtype=torch.int32)}, "outside the cache of 6 blocks"),
        ({"block_tables": torch.zeros(1, 4)}, "block_tables must be int32"),
        ({"q_rope": torch.zeros(3, 3, 9)}, "must be contiguous .num_blocks, block_size, 33."),
        ({"q_latent": torch.zeros(3, 3, 48)[..., :24]}, "must be contiguous"),
        ({"q_rope": torch.zeros(3, 2, 8)}, r"must be \[T, H, L\] and \[T, H, R\]"),
        ({"q_rope": torch.zeros(3, 3, 8).bfloat16()}, "no native latent attention"),
    ],
)
def test_attention_over_what_does_not_fit_is_refused(changes: dict[str, Tensor], message: str) -> None:
    latents = replace(make_latents([3], [40]), **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        latents.attend(NativeKernels(required_library()))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"slot_mapping": torch.tensor([0, 12])}, IndexError, "a slot is outside 0 .. 11"),
        ({"slot_mapping": torch.tensor([0])}, ValueError, "slot_mapping must be contiguous"),
        ({"latents": torch.zeros(2, 13)}, ValueError, r"latents .* must be torch.float32 \[2, 14\]"),
        ({"cos": torch.zeros(2, 2).double()}, ValueError, "must be float32"),
        ({"norm_weight": torch.zeros(10).bfloat16()}, ValueError, "norm_weight must be"),
        ({"q": torch.zeros(2, 3, 18)[..., :9]}, ValueError, "heads together"),
    ],
)
def test_storing_what_does_not_fit_is_refused(changes: dict[str, Tensor], error: type[Exception], message: str) -> None:
    arguments = {
        "q": torch.zeros(2, 3, 9), "latents": torch.zeros(2, 14), "cache": torch.full((3, 4, 14), 5.0),
        "slot_mapping": torch.tensor([0, 1]), "norm_weight": torch.ones(10), "cos": torch.ones(2, 2),
        "sin": torch.ones(2, 2),
    }  # fmt: skip
    arguments.update(changes)
    native, cache, slots = NativeKernels(required_library()), arguments["cache"], arguments["slot_mapping"]
    with pytest.raises(error, match=message):
        store(native, cache, slots, arguments, norm_eps=1e-6, interleaved=True)
    assert bool((arguments["cache"] == 5).all())
