"""Which weights of a checkpoint are quantized while it loads, and to which block formats. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

from pagewick.errors import ConfigError
from pagewick.quantization.block_formats import BLOCK_FORMATS
from pagewick.quantization.mixes import MIXES, MixedModel, is_quantizable, mix_types

# The choices of --quantization auto, best first; the first of all is not to quantize.
_AUTO: Final = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k")
# The block formats that a mix keeps: weights that a checkpoint has in them are not quantized again.
_KEPT: Final = {"int4": ("int4_g32", "int4_g64", "int4_g128")}
# The weights' share of the free memory with --quantization auto; the rest is for the KV cache and activations.
_AUTO_SHARE: Final = 0.75


class SizedModel(Protocol):
    """The facts about a model that mixes need."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def num_experts(self) -> int: ...


@dataclass(frozen=True)
class QuantizationPlan:
    """mix: its name in MIXES. formats: the block format of each weight that is quantized, by the tensor's name.

    num_narrow: the number of weights whose rows are too short for the blocks of the mix's main format, by the format
    that each of them has instead; empty for those that are not quantized.
    """

    mix: str
    formats: Mapping[str, str]
    num_narrow: Mapping[str, int]

    def describe_narrow(self) -> str:
        """Return how many weights have another format because of their width, and which; empty if none has."""
        parts = [f"{number} {f'in {name}' if name else 'unquantized'}" for name, number in self.num_narrow.items()]
        return f"rows too short for {MIXES[self.mix]}: {', '.join(parts)}" if parts else ""


def keeps(mix: str, stored_type: str) -> bool:
    """Whether weights that are stored in this block format stay as they are in a mix."""
    return stored_type in _KEPT.get(mix, ())


def plan_quantization(
    mix: str,
    shapes: Mapping[str, Sequence[int]],
    in_blocks: Mapping[str, str],
    model: SizedModel,
    beside: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> QuantizationPlan:
    """Plan to quantize a checkpoint to a mix by llama.cpp's rules.

    shapes: of all the model's tensors, by name. in_blocks: the format of those that the checkpoint stores in blocks.
    beside: shapes of a predicting layer's tensors, as in mix_types.
    Raises ConfigError if some of the weights are quantized already, to formats that the mix does not keep.
    """
    others, all_shapes = {name: kind for name, kind in in_blocks.items() if not keeps(mix, kind)}, {**shapes, **beside}
    if quantized := {kind for name, kind in others.items() if is_quantizable(name, all_shapes.get(name, ()))}:
        raise ConfigError(
            f"--quantization {mix}: this checkpoint is quantized already ({', '.join(sorted(quantized))})\n"
            "  leave the flag out, or give the model's unquantized checkpoint"
        )
    facts = MixedModel(model.num_layers, model.num_heads, model.num_kv_heads, model.num_experts)
    types = mix_types(mix, shapes, facts, beside)
    chosen = {name: kind for name, kind in types.items() if kind is not None and name not in in_blocks}
    formats = {name: kind for name, kind in chosen.items() if kind in BLOCK_FORMATS}
    width, _ = BLOCK_FORMATS[MIXES[mix]]
    narrow = Counter(formats.get(name, "") for name in chosen if all_shapes[name][-1] % width)
    return QuantizationPlan(mix, formats, dict(narrow.most_common()))


def choose_mix(bytes_in: Callable[[str | None], int | None], free: int, dtype: str) -> tuple[str | None, str]:
    """Return the best mix whose weights fit into their share of `free` bytes, and the arithmetic in words.

    bytes_in: the bytes of the weights in a mix; in None, without quantization, as `dtype`; None for a mix that cannot
    be used. The smallest is returned if none fits.
    """
    tried: list[str] = []
    best: str | None = None
    for mix in (None, *_AUTO):
        if (num_bytes := bytes_in(mix)) is None:
            continue
        best = mix
        tried.append(f"{_size(num_bytes)} in {mix or dtype}")
        if num_bytes <= free * _AUTO_SHARE:
            break
    room = f"{_size(free)} are free, of which weights may take {_size(free * _AUTO_SHARE)}"
    return best, f"{room}; they take {', '.join(tried)}"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
