"""Which weights of a GPTQ or Marlin checkpoint are packed, and with which numbers. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from pagewick.weights.name_patterns import Matches, Place
from pagewick.weights.packed.layout import PackedFormat
from pagewick.weights.packed.settings import Settings, named

_Format = TypeVar("_Format", bound=PackedFormat)


def choose_format(
    settings: Settings, whole: _Format, change: Callable[[_Format, Settings], _Format]
) -> Callable[[str], _Format | None]:
    """Return the function from a weight's prefix to its format; None: it is not packed.

    GPTQModel's `dynamic` comes first: regular expressions, after "-:" for weights that are not packed, and else with
    entries that replace others, which `change` does. modules_in_block_to_quantize, modules_to_not_convert and lm_head
    follow. Raises ModelLoadError for wrong entries.
    """
    dynamic = [(matches, sign, rule and change(whole, rule)) for matches, sign, rule in _dynamic(settings)]
    is_left_out = named(settings.texts("modules_to_not_convert"))
    inside = _names_inside(settings)
    is_inside = named(inside)
    has_head = settings.flag("lm_head", default=False)

    def format_of(prefix: str) -> _Format | None:
        for matches, sign, changed in dynamic:
            if matches(prefix):
                return None if sign == "-:" else changed or whole
        if prefix.rpartition(".")[2] == "lm_head":
            return whole if has_head else None
        return None if is_left_out(prefix) or (inside and not is_inside(prefix)) else whole

    return format_of


def left_out_entry(left_out: Sequence[str]) -> dict[str, Any]:
    """Return the entry of a quantization_config that says which weights are not packed, by their prefixes."""
    return {"dynamic": {f"-:{re.escape(prefix)}$": {} for prefix in left_out}} if left_out else {}


def _dynamic(settings: Settings) -> Iterator[tuple[Matches, str, Settings | None]]:
    rules = settings.child("dynamic")
    for key in () if rules is None else rules.values:
        pattern = key[2:] if key[:2] in ("+:", "-:") else key
        yield settings.pattern("dynamic", pattern, Place.START), key[:2], None if rules is None else rules.child(key)


def _names_inside(settings: Settings) -> list[str]:
    """Return the names in modules_in_block_to_quantize: a list of names, or of lists of them."""
    inside = settings.get("modules_in_block_to_quantize")
    groups = inside if isinstance(inside, list) else [] if inside is None else [None]
    found: list[Any] = [name for group in groups for name in (group if isinstance(group, list) else [group])]
    if not all(isinstance(name, str) for name in found):
        raise settings.wrong("modules_in_block_to_quantize", "lists of names")
    return found
