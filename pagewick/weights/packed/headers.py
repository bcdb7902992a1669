"""The tensors of a checkpoint as a model sees them: packed weights are one tensor each. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.weights.files import name_some
from pagewick.weights.packed.config import packed_rules
from pagewick.weights.packed.layout import PackedFormat, PackedRules, PackedWeight
from pagewick.weights.stacked import separated
from pagewick.weights.tensor_headers import TensorInfo
from pagewick.weights.transposed import upright

# Ends of names that only packed weights have: GPTQ and AWQ, bitsandbytes, FP8, torchao.
_PACKED_SUFFIXES: Final = (
    ".qweight", ".weight.absmax", ".weight_scale", ".weight_scale_inv", ".qscale_weight", ".weight_packed",
    "._weight_qdata",
)  # fmt: skip

# transformers has renamed the text part of models that see images, and still writes files with the old names. Rules
# have the names that the modules had when they were written.
TEXT_PARTS: Final = ("language_model.model.", "model.language_model.")


@dataclass(frozen=True, slots=True)
class LogicalTensors:
    """tensors: plain ones and weights, in the files' order; a weight stands where its first part does.

    weights: those that are packed, by their logical name.
    """

    tensors: tuple[TensorInfo, ...]
    weights: Mapping[str, PackedWeight]


def logical_tensors(config: Mapping[str, Any], tensors: Iterable[TensorInfo]) -> LogicalTensors:
    """Join the parts of packed weights, separate experts that are stacked, and turn weights that lie transposed.

    tensors: of the files. Raises ConfigError and ModelLoadError.
    """
    rules, stored = packed_rules(config), upright(config, separated(config, tensors))
    if rules is None:
        if packed := [one.name for one in stored if one.name.endswith(_PACKED_SUFFIXES)]:
            raise ConfigError(
                f"this checkpoint is quantized ({packed[0]}), and config.json does not say how: it has no "
                "quantization_config\n  download or copy config.json again"
            )
        return LogicalTensors(tuple(stored), {})
    rules.check_names(tensor.name for tensor in stored)
    owners = _packed_prefixes(rules, stored)
    if not owners:
        raise ModelLoadError(
            f"config.json says that the weights are {rules.label}, and none of them is\n"
            "  config.json and the weights do not belong together; download or copy both again"
        )
    groups: defaultdict[str, dict[str, TensorInfo]] = defaultdict(dict)
    found: dict[str, TensorInfo | None] = {}
    for tensor in stored:
        prefix, suffix = _split(tensor.name, rules)
        if suffix and prefix in owners:
            groups[prefix][suffix] = tensor
            found.setdefault(f"{prefix}.weight")
        else:
            found[tensor.name] = tensor
    weights = {f"{prefix}.weight": _weight(rules, prefix, parts) for prefix, parts in groups.items()}
    return LogicalTensors(tuple(one or weights[name].info for name, one in found.items()), weights)


def _packed_prefixes(rules: PackedRules, tensors: Iterable[TensorInfo]) -> set[str]:
    splits = (_split(tensor.name, rules) for tensor in tensors)
    return {prefix for prefix, suffix in splits if suffix in rules.marks}


def _split(name: str, rules: PackedRules) -> tuple[str, str]:
    """Return a tensor's prefix and suffix; the suffix is empty if no part of a packed weight has such a name."""
    suffix = max((suffix for suffix in rules.suffixes if name.endswith(suffix)), key=len, default="")
    return name.removesuffix(suffix), suffix


def _of_module(rules: PackedRules, prefix: str) -> PackedFormat | None:
    """Return the format of a weight of the text part under the other name that it has in transformers."""
    for of_file, of_module in (TEXT_PARTS, TEXT_PARTS[::-1]):
        if prefix.startswith(of_file):
            return rules.format_of(of_module + prefix.removeprefix(of_file))
    return None


def _weight(rules: PackedRules, prefix: str, parts: Mapping[str, TensorInfo]) -> PackedWeight:
    form = rules.format_of(prefix) or _of_module(rules, prefix) or rules.by_tensors(prefix)
    if form is None:
        raise ModelLoadError(
            f"{name_some(part.name for part in parts.values())}: packed, and {rules.excluded_by} in config.json says "
            f"that {prefix} is not\n  config.json and the weights do not belong together; download or copy both again"
        )
    return form.weight(prefix, parts)
