"""rope_and_store and the rotary angles against plain definitions in float64, and the cache that is left behind."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pagewick import kernels as dispatched
from pagewick.kernels import reference
from pagewick.kernels.kv_cache import KVCache
from pagewick.kernels.options import HeadLayout, HeadNorm, HeadOptions, Rotation
from tests.kernels.conftest import NativeKernels
from tests.kernels.paged import packed_copy, plain_cache, plain_copy

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-6
# Relative to the largest number of a head: rounding to the dtype, half a unit in the last place.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8 + 1e-6, torch.float16: 2**-11 + 1e-6}


# Qwen 3 and, with an offset of 1, Gemma 3; Phi; StableLM; Hunyuan.
NORMS: dict[str, dict[str, Any]] = {
    "rms": {"is_layer_norm": False, "has_bias": False, "is_per_head": False, "offset": 0.0},
    "rms_offset": {"is_layer_norm": False, "has_bias": False, "is_per_head": False, "offset": 1.0},
    "layer": {"is_layer_norm": True, "has_bias": True, "is_per_head": False, "offset": 0.0},
    "layer_per_head": {"is_layer_norm": True, "has_bias": False, "is_per_head": True, "offset": 0.0},
    "everything": {"is_layer_norm": True, "has_bias": True, "is_per_head": True, "offset": 0.5},
    "rms_last": {"is_layer_norm": False, "has_bias": False, "is_per_head": False, "offset": 0.0, "is_last": True},
    "everything_last": {"is_layer_norm": True, "has_bias": True, "is_per_head": True, "offset": 0.5, "is_last": True},
}


@dataclass
class Case:
    """A step of `num_tokens` tokens into a cache of 5 blocks that is full of other numbers."""

    num_tokens: int = 7
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 64
    block_size: int = 6
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype = torch.float32
    interleaved: bool = False
    norm: str = ""  # or one of NORMS
    norms_values: bool = False
    is_scaled: bool = False  # queries have factors

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.num_tokens + self.head_dim)
        self.width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv = (2 * torch.randn(self.num_tokens, self.width, generator=generator)).to(self.dtype)
        shape = (max(5, self.num_tokens // self.block_size + 1), 2, self.num_kv_heads, self.block_size, self.head_dim)
        self.plain = torch.randn(shape, generator=generator).to(self.cache_dtype)
        self.slots = torch.randperm(shape[0] * self.block_size, generator=generator)[: self.num_tokens]
        self.slots[3:4] = -1
        angles = 7 * torch.rand(self.num_tokens, self.rotary_dim // 2, generator=generator)
        self.options: dict[str, Any] = {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "interleaved": self.interleaved,
        }
        if self.rotary_dim:
            self.options |= {"cos": angles.cos(), "sin": angles.sin()}
        if self.is_scaled:
            self.options["q_scales"] = 0.5 + torch.rand(self.num_tokens, generator=generator)
        if self.norm:
            for name, heads in (("q_norm", self.num_heads), ("k_norm", self.num_kv_heads)):
                self.options[name] = self._random_norm(heads, generator)

        if self.norms_values:
            self.options["v_norm"] = HeadNorm(torch.ones(self.head_dim, dtype=self.dtype), eps=EPS)

    def _random_norm(self, heads: int, generator: torch.Generator) -> HeadNorm:
        form = NORMS[self.norm]
        shape = (heads, self.head_dim) if form["is_per_head"] else (self.head_dim,)
        weight, bias = (1 + torch.randn(2, *shape, generator=generator)).to(self.dtype)
        bias, is_last = bias if form["has_bias"] else None, form.get("is_last", False)
        return HeadNorm(weight, bias, EPS, form["offset"], form["is_layer_norm"], is_last)

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [T, heads, head_dim] in float64, by complex numbers."""
        heads = self.qkv.double().view(self.num_tokens, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        v = self._normed(v, self.options["v_norm"]) if self.norms_values else v
        q_scales = self.options.get("q_scales", torch.ones(self.num_tokens))
        return self._turned(q, "q_norm") * q_scales.double().view(-1, 1, 1), self._turned(k, "k_norm"), v

    def _turned(self, x: Tensor, norm: str) -> Tensor:
        is_last = bool(self.norm) and self.options[norm].is_after_rotation
        if self.norm and not is_last:
            x = self._normed(x, self.options[norm])
        turned = self._rotated(x) if self.rotary_dim else x
        return self._normed(turned, self.options[norm]) if is_last else turned

    def _rotated(self, x: Tensor) -> Tensor:
        turning, rest = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        pairs = turning.unflatten(-1, (-1, 2) if self.interleaved else (2, -1))
        axis = -1 if self.interleaved else -2
        unit = torch.complex(self.options["cos"].double(), self.options["sin"].double()).unsqueeze(1)
        turned = torch.complex(pairs.select(axis, 0), pairs.select(axis, 1)) * unit
        return torch.cat((torch.stack((turned.real, turned.imag), dim=axis).flatten(-2), rest), dim=-1)

    def _normed(self, x: Tensor, norm: HeadNorm) -> Tensor:
        weight = norm.weight.double() + norm.offset
        if not norm.is_layer_norm:
            return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
        variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        normed = (x - mean) / (variance + EPS).sqrt() * weight
        return normed if norm.bias is None else normed + norm.bias.double()

    def check(self, q: Tensor, plain: Tensor) -> None:
        """That q and the contents of the cache are as expected, and the rest of the cache untouched."""
        expected_q, expected_k, expected_v = self.expected()
        assert q.dtype == self.dtype
        tolerance = {"rtol": ROUNDING[self.dtype], "atol": 4e-6}
        torch.testing.assert_close(q.double(), expected_q, **tolerance)
        stored = {"rtol": ROUNDING[self.dtype] + ROUNDING[self.cache_dtype], "atol": 4e-6}
        left = self.plain.clone()
        for token, slot in enumerate(self.slots.tolist()):
            if slot < 0:
                continue
            block_id, offset = divmod(slot, self.block_size)
            keys, values = plain[block_id, :, :, offset]
            torch.testing.assert_close(keys.double(), expected_k[token], **stored)
            torch.testing.assert_close(values.double(), expected_v[token], **stored)
            if not self.norms_values:
                assert torch.equal(values, expected_v[token].to(self.dtype).to(self.cache_dtype))
            left[block_id, :, :, offset] = plain[block_id, :, :, offset]
        assert torch.equal(left, plain)


SHAPES = [
    Case(num_tokens=1, num_heads=1, num_kv_heads=1, head_dim=16, rotary_dim=16, block_size=2),
    Case(head_dim=80, rotary_dim=20, num_heads=3, num_kv_heads=3),
    Case(head_dim=24, rotary_dim=2, num_tokens=13),
    Case(head_dim=40, rotary_dim=38, interleaved=True),
    Case(head_dim=72, rotary_dim=72, interleaved=True, norm="rms"),
    Case(head_dim=128, rotary_dim=128, norm="rms", num_tokens=101, block_size=32),
    Case(head_dim=256, rotary_dim=64, norm="rms", block_size=16),
    Case(head_dim=40, rotary_dim=40, norm="rms_offset"),
    Case(head_dim=80, rotary_dim=32, norm="layer", num_tokens=37, block_size=32),
    Case(head_dim=20, rotary_dim=6, norm="layer_per_head", num_heads=5, num_kv_heads=5),
    Case(head_dim=63, rotary_dim=18, norm="everything", interleaved=True, num_kv_heads=3),
    Case(rotary_dim=0),
    Case(head_dim=40, rotary_dim=24, is_scaled=True, num_tokens=19),
    Case(head_dim=64, rotary_dim=0, norm="rms", is_scaled=True),
    Case(num_tokens=0),
    Case(head_dim=40, rotary_dim=40, norm="rms", norms_values=True, num_tokens=45, block_size=32),
    Case(head_dim=72, rotary_dim=72, norm="rms_last", num_tokens=37, block_size=32),
    Case(head_dim=63, rotary_dim=18, norm="everything_last", interleaved=True, num_kv_heads=3),
]


@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_shapes_and_dtypes(native: NativeKernels, index: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    case = Case(**{**_fields(SHAPES[index]), "dtype": dtype, "cache_dtype": cache_dtype})
    cache = packed_copy(case.plain)
    q = native.rope_and_store(case.qkv, cache, case.slots, **structs(case.options))
    case.check(q, plain_copy(cache))
    plain = case.plain.clone()
    assert torch.equal(native.rope_and_store(case.qkv, plain_cache(plain), case.slots, **structs(case.options)), q)
    assert torch.equal(plain, plain_copy(cache))


@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_the_reference(index: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    case = Case(**{**_fields(SHAPES[index]), "dtype": dtype, "cache_dtype": cache_dtype})
    plain = case.plain.clone()
    q = reference.rope_and_store(case.qkv, plain_cache(plain), case.slots, **structs(case.options))
    case.check(q, plain)


def structs(options: dict[str, Any]) -> dict[str, Any]:
    """The keywords of rope_and_store for the options of a Case."""
    given = dict(options)
    layout = HeadLayout(given.pop("num_heads"), given.pop("num_kv_heads"), given.pop("head_dim"))
    cos, sin, interleaved = given.pop("cos", None), given.pop("sin", None), given.pop("interleaved")
    rotation = None if cos is None else Rotation(cos, sin, interleaved)
    return {"layout": layout, "options": HeadOptions(rotation, **given)}


def _fields(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in Case.__dataclass_fields__}


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_is_stored_as_zeros(native: NativeKernels, dtype: torch.dtype) -> None:
    case = Case(head_dim=24, rotary_dim=24, dtype=dtype, cache_dtype=dtype)
    cache = packed_copy(case.plain)
    cache.data.fill_(float("nan"))
    case.slots = torch.arange(7)
    native.rope_and_store(case.qkv, cache, case.slots, **structs(case.options))
    # The same bytes as a cache of 32 dimensions has, of which the last 8 are 0.
    wide = KVCache(cache.data, 32, is_packed=True)
    first_block = plain_copy(wide)[0]
    assert (first_block[..., 24:] == 0).all()
    assert first_block[..., :24].isfinite().all()


def test_rows_of_a_wider_matrix(native: NativeKernels) -> None:
    case, other = Case(norm="rms"), Case(norm="rms")
    wide = torch.full((case.num_tokens, case.width + 5), float("nan"))
    wide[:, : case.width] = case.qkv
    cos, sin = torch.stack((case.options["cos"], case.options["sin"]), dim=1).unbind(1)
    cache = packed_copy(case.plain)
    q = native.rope_and_store(
        wide[:, : case.width], cache, case.slots, **structs({**case.options, "cos": cos, "sin": sin})
    )
    other_cache = packed_copy(other.plain)
    assert torch.equal(q, native.rope_and_store(other.qkv, other_cache, other.slots, **structs(other.options)))
    assert torch.equal(cache.data, other_cache.data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_alone_batched_and_threaded(native: NativeKernels, dtype: torch.dtype) -> None:
    case = Case(num_tokens=301, norm="rms", dtype=dtype, cache_dtype=dtype, block_size=16)
    cache = packed_copy(case.plain)
    q = native.rope_and_store(case.qkv, cache, case.slots, **structs(case.options))
    alone, rows = packed_copy(case.plain), []
    for token in range(case.num_tokens):
        one = slice(token, token + 1)
        options = {**case.options, "cos": case.options["cos"][one], "sin": case.options["sin"][one]}
        rows.append(native.rope_and_store(case.qkv[one], alone, case.slots[one], **structs(options)))
    assert torch.equal(torch.cat(rows), q)
    assert torch.equal(alone.data, cache.data)
    for num_threads in (2, 3):
        native.set_num_threads(num_threads)
        again = packed_copy(case.plain)
        assert torch.equal(native.rope_and_store(case.qkv, again, case.slots, **structs(case.options)), q)
        assert torch.equal(again.data, cache.data)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_run_of_tokens_over_blocks(native: NativeKernels, dtype: torch.dtype) -> None:
    case = Case(num_tokens=150, block_size=32, dtype=dtype, cache_dtype=dtype, head_dim=80)
    for first in (0, 1, 5, 16, 31):
        case.slots = torch.arange(first, first + 150)
        case.plain = torch.zeros(6, 2, 2, 32, 80, dtype=dtype)
        cache = packed_copy(case.plain)
        case.check(native.rope_and_store(case.qkv, cache, case.slots, **structs(case.options)), plain_copy(cache))


def test_without_key_heads_only_queries_are_turned(kernels: Any) -> None:
    """For a layer that reads the keys and values of another one."""
    case = Case(norm="rms")
    cache = packed_copy(case.plain) if isinstance(kernels, NativeKernels) else plain_cache(case.plain)
    before = cache.data.clone()
    queries = case.qkv[:, : case.num_heads * case.head_dim].contiguous()
    q = kernels.rope_and_store(queries, cache, case.slots, **structs({**case.options, "num_kv_heads": 0}))
    torch.testing.assert_close(q.double(), case.expected()[0], rtol=1e-6, atol=4e-6)
    assert torch.equal(cache.data, before)


def test_slots_outside_the_cache_are_refused_and_nothing_is_stored(native: NativeKernels) -> None:
    case = Case()
    cache = packed_copy(case.plain)
    case.slots[5] = 5 * case.block_size
    with pytest.raises(IndexError, match=r"outside 0 \.\. 29"):
        native.rope_and_store(case.qkv, cache, case.slots, **structs(case.options))
    assert torch.equal(plain_copy(cache), case.plain)


def test_what_does_not_fit_is_refused(native: NativeKernels) -> None:
    case = Case(norm="rms")
    cache = packed_copy(case.plain)

    def refused(match: str, qkv: Tensor = case.qkv, slots: Tensor = case.slots, **options: object) -> None:
        with pytest.raises(ValueError, match=match):
            native.rope_and_store(qkv, cache, slots, **structs({**case.options, **options}))

    refused("qkv", case.qkv[:, :-1])
    refused("qkv", case.qkv.double())
    refused("qkv", case.qkv.T.contiguous().T)
    refused("slot_mapping", slots=case.slots[:-1])
    refused("slot_mapping", slots=case.slots.int())
    ones = torch.ones(6, 64)
    refused("norm weights", q_norm=HeadNorm(torch.ones(63)))
    refused("norm weights", q_norm=HeadNorm(torch.ones(64, 6).T))
    refused("norm weights", q_norm=HeadNorm(ones, ones[0]))
    refused("norm weights", k_norm=HeadNorm(ones))
    refused("norm weights", k_norm=HeadNorm(torch.ones(64, dtype=torch.bfloat16)))
    refused("cos", cos=torch.ones(7, 33), sin=torch.ones(7, 33))
    refused("cos", cos=case.options["cos"].double())
    refused("does not fit", num_heads=4, num_kv_heads=3)
    for scales in (torch.ones(6), torch.ones(7, dtype=torch.float64), torch.ones(14)[::2]):
        refused("q_scales", q_scales=scales)


def test_a_packed_cache_and_a_dtype_that_nothing_serves_are_refused() -> None:
    case = Case()
    with pytest.raises(ValueError, match="no native operation stores"):
        dispatched.rope_and_store(case.qkv.double(), packed_copy(case.plain), case.slots, **structs(case.options))


def test_rotary_angles(native: NativeKernels) -> None:
    for num_tokens, half in ((0, 3), (1, 1), (5, 0), (37, 64), (1031, 7)):
        positions = torch.randint(0, 1_000_000, (num_tokens,), generator=torch.Generator().manual_seed(half))
        frequencies = 10_000.0 ** (-torch.arange(half, dtype=torch.float32) / max(1, half))
        cos, sin = native.rotary_angles(positions, frequencies)
        for token in range(0, num_tokens, 13):
            for i in range(half):
                angle = float(positions[token].float() * frequencies[i])
                assert cos[token, i] == torch.tensor(math.cos(angle), dtype=torch.float32)
                assert sin[token, i] == torch.tensor(math.sin(angle), dtype=torch.float32)
        near = reference.rotary_angles(positions, frequencies)
        # One unit in the last place of numbers near 1.
        torch.testing.assert_close((cos, sin), near, rtol=0, atol=2**-23)
        scaled = native.rotary_angles(positions, frequencies, 1.25)
        assert torch.equal(scaled[0], cos * 1.25)
        assert torch.equal(scaled[1], sin * 1.25)
        torch.testing.assert_close(scaled, reference.rotary_angles(positions, frequencies, 1.25), rtol=0, atol=2**-22)
        for num_threads in (2, 3):
            native.set_num_threads(num_threads)
            assert torch.equal(native.rotary_angles(positions, frequencies)[1], sin)
        native.set_num_threads(1)


def test_angles_of_other_dtypes(native: NativeKernels) -> None:
    positions, frequencies = torch.arange(5), torch.ones(3)
    with pytest.raises(ValueError, match="int64"):
        native.rotary_angles(positions.int(), frequencies)
    with pytest.raises(ValueError, match="contiguous"):
        native.rotary_angles(torch.arange(10)[::2], frequencies)
    cos, _ = dispatched.rotary_angles(positions.int(), frequencies)
    torch.testing.assert_close(cos, dispatched.rotary_angles(positions, frequencies)[0], rtol=0, atol=2**-23)


@pytest.mark.parametrize(("rotary_dim", "factor", "original"), [(4, 1.0, 1), (10, 4.0, 32), (128, 2.5, 300)])
def test_dynamic_angles_are_those_of_transformers_fed_token_by_token(
    native: NativeKernels, rotary_dim: int, factor: float, original: int
) -> None:
    scaling = {"rope_type": "dynamic", "rope_theta": 5000.1, "factor": factor}
    config = LlamaConfig(head_dim=rotary_dim, max_position_embeddings=original, rope_parameters=scaling)
    theirs = LlamaRotaryEmbedding(config)
    end = 3 * original + 40
    positions = torch.arange(0, end, max(1, end // 50))
    tables = [theirs(torch.zeros(1), positions[None, i : i + 1]) for i in range(len(positions))]
    expected = [torch.cat([table[i][0] for table in tables])[:, : rotary_dim // 2] for i in range(2)]
    ours = native.dynamic_rotary_angles(positions, 5000.1, rotary_dim, factor, original)
    # Their powers are within a unit or two in the last place: of the frequency, so times the position.
    tolerance = (3 * 2.0**-24 * positions.double() + 2.0**-23).unsqueeze(-1)
    for mine, wanted in zip(ours, expected, strict=True):
        assert ((mine.double() - wanted.double()).abs() <= tolerance).all()
    near = reference.dynamic_rotary_angles(positions, 5000.1, rotary_dim, factor, original)
    torch.testing.assert_close(ours, near, rtol=0, atol=2**-23)
    # Not those of the static frequencies, beyond the original length and nowhere else.
    plain = reference.rotary_angles(positions, 5000.1 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim))
    if factor > 1:
        assert (ours[0] - plain[0])[positions < original].abs().max() < 1e-4
        assert (ours[0] - plain[0])[positions >= original].abs().max() > 1e-2


def test_dynamic_angles_alone_and_threaded(native: NativeKernels) -> None:
    positions = torch.randint(0, 1 << 20, (301,), generator=torch.Generator().manual_seed(0))
    scaling = (1e4, 64, 2.0, 1 << 18)
    together = native.dynamic_rotary_angles(positions, *scaling)
    alone = [native.dynamic_rotary_angles(positions[i : i + 1], *scaling)[0] for i in range(301)]
    assert torch.equal(torch.cat(alone), together[0])
    for num_threads in (2, 3):
        native.set_num_threads(num_threads)
        assert torch.equal(native.dynamic_rotary_angles(positions, *scaling)[1], together[1])
    dispatch = dispatched.dynamic_rotary_angles(positions, *scaling)
    assert torch.equal(dispatch[0], together[0]) and torch.equal(dispatch[1], together[1])
    narrow = dispatched.dynamic_rotary_angles(positions.int(), *scaling)
    torch.testing.assert_close(narrow, together, rtol=0, atol=2**-23)


@pytest.mark.parametrize("which", ["reference", "native"])
def test_dynamic_angles_that_nobody_defined_are_refused(native: NativeKernels, which: str) -> None:
    kernels, positions = reference if which == "reference" else native, torch.arange(5)
    for rotary_dim, factor, original in ((2, 2.0, 8), (7, 2.0, 8), (8, 0.5, 8), (8, float("nan"), 8), (8, 2.0, 0)):
        with pytest.raises(ValueError, match="dynamic scaling"):
            kernels.dynamic_rotary_angles(positions, 1e4, rotary_dim, factor, original)
    if which == "native":
        with pytest.raises(ValueError, match="int64"):
            native.dynamic_rotary_angles(positions.int(), 1e4, 8, 2.0, 8)
