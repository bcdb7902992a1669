"""AutoRound: the tensors of GPTQ or of AWQ, with entries of their own for some weights. Imports no torch.

Source: https://github.com/intel/auto-round.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from pagewick.weights.name_patterns import Matches, Place
from pagewick.weights.packed import awq, gptq
from pagewick.weights.packed.layout import PackedFormat, PackedRules
from pagewick.weights.packed.settings import Settings

_GPTQ: Final = "auto_round:auto_gptq"
_AWQ: Final = "auto_round:auto_awq"
_PACKINGS: Final = (_GPTQ, "auto_gptq", _AWQ, "auto_awq")
_BITS: Final = (2, 3, 4, 8)
# Names have none of these characters, and expressions have some.
_SPECIAL: Final = re.compile(r"[*+?^$()\[\]{}|\\]")
# More bits in an object of extra_config say that its weight is not packed.
_MAX_BITS: Final = 8


def read_rules(settings: Settings) -> PackedRules:
    """Return what the quantization_config of an AutoRound checkpoint says. Raises ModelLoadError."""
    packing = _packing(settings)
    settings.demand("data_type", ("int",))
    if settings.get("rotation_config"):
        raise settings.wrong("rotation_config", "empty: it is not supported")
    settings.demand("super_bits", ())
    whole, suffixes = _format(settings, packing, None), awq.SUFFIXES if "awq" in packing else gptq.SUFFIXES
    assert whole is not None, "only extra_config leaves weights out"
    of_names = {name: _format(rule, packing, settings) for name, rule in settings.children("extra_config")}
    in_blocks = _block_names(settings)
    patterns = [
        (settings.pattern("extra_config", name, Place.ANYWHERE), found)
        for name, found in of_names.items()
        if _SPECIAL.search(name)
    ]
    format_of = _chooser(whole, of_names, patterns, in_blocks)
    return PackedRules(whole.label, suffixes, suffixes[:2], format_of, "extra_config")


def _packing(settings: Settings) -> str:
    """Return the format of the tensors. Before there was packing_format, the name of the kernels told it."""
    backend = settings.get("backend")
    if "packing_format" in settings or backend in (None, "auto"):
        return settings.word("packing_format", _PACKINGS, _GPTQ)
    parts = backend.lower() if isinstance(backend, str) else ""
    if "gptq" in parts:
        return _GPTQ
    if "awq" in parts:
        return _AWQ
    # Such files store zero points themselves, and those of GPTQ one less.
    raise settings.wrong("backend", "a name with gptq or awq in it: other formats are not supported")


def _format(settings: Settings, packing: str, whole: Settings | None) -> PackedFormat | None:
    """Return the format of an object's entries; those of the whole checkpoint, if there is one, fill it up."""
    if whole is not None:
        settings = Settings({**whole.values, **settings.values}, settings.path)
        bits = settings.get("bits")
        if type(bits) is int and bits > _MAX_BITS:
            return None
        settings.demand("data_type", ("int",))
    size, is_symmetric = settings.group_size(), settings.flag("sym", default=True)
    if "awq" in packing:
        settings.choice("bits", (4,))
        return awq.AwqFormat(size, method="AutoRound")
    bits = settings.choice("bits", _BITS)
    return gptq.GptqFormat(bits, size, is_symmetric, has_order=False, method="AutoRound")


def _chooser(
    whole: PackedFormat,
    of_names: dict[str, PackedFormat | None],
    patterns: list[tuple[Matches, PackedFormat | None]],
    in_blocks: list[str],
) -> Callable[[str], PackedFormat | None]:
    """Return the function from a weight's prefix to its format. extra_config names weights, or matches their names."""

    def format_of(prefix: str) -> PackedFormat | None:
        if prefix in of_names:
            return of_names[prefix]
        for matches, found in patterns:
            if matches(prefix):
                return found
        if in_blocks:
            return whole if any(name in prefix for name in in_blocks) else None
        return None if prefix.rpartition(".")[2] == "lm_head" else whole

    return format_of


def _block_names(settings: Settings) -> list[str]:
    """Return block_name_to_quantize: a list of names, or names with commas between them."""
    entry = "block_name_to_quantize" if "block_name_to_quantize" in settings else "to_quant_block_names"
    found = settings.get(entry)
    return found.split(",") if isinstance(found, str) else list(settings.texts(entry))
