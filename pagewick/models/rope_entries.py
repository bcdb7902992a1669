"""Reads a config.json's entries about rotary embedding, in both spellings, into a RopeConfig. Imports no torch.

transformers 5 writes one object, `rope_parameters`. Older versions, and so nearly all published checkpoints, have
`rope_theta` with `rope_scaling` beside it. Where layers of different types rotate differently, rope_parameters has an
object for each type; in the old spelling the sliding layers have `rope_local_base_freq` and no scaling.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final, cast

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.layers.config import RopeConfig, RopeKind
from pagewick.models.entries import MAX_SIZE, Entries

_SLIDING: Final = "sliding_attention"
_FULL: Final = "full_attention"
_ORIGINAL: Final = "original_max_position_embeddings"

# Microsoft's first Phi-3 files call longrope su.
_OLD_NAMES: Final = {"su": "longrope"}
_EVERYWHERE: Final = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
# Entries of single families: of Qwen's models that see images, and of Ministral 3, whose second one has no effect.
_MROPE: Final = frozenset({"mrope_section", "mrope_interleaved"})
_QUERIES: Final = frozenset({"llama_4_scaling_beta", "max_position_embeddings"})
# linear: files often give the original length, which no formula uses. yarn: `finetuned` has no effect either.
_KNOWN: Final[dict[str, frozenset[str]]] = {
    "default": frozenset(),
    "linear": frozenset({"factor", _ORIGINAL}),
    "dynamic": frozenset({"factor", _ORIGINAL}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL}),
    "yarn": frozenset(
        {"factor", "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate", "finetuned"}
        | {_ORIGINAL, "attn_factor", "extrapolation_factor"}
    ),
    "longrope": frozenset({"factor", "attention_factor", "short_factor", "long_factor", _ORIGINAL}),
}
_MOST_TURNS: Final = 1e9
# Known to Gemma 4 alone.
_PROPORTIONAL: Final = "proportional"


def read_rope(
    entries: Entries,
    *,
    head_dim: int,
    max_position_embeddings: int,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    default_theta: float = 10000.0,
    default_partial_rotary_factor: float = 1.0,
    layer_type: str | None = None,
    may_be_proportional: bool = False,
    is_mrope: bool = False,
    has_query_scaling: bool = False,
) -> RopeConfig:
    """Read the rotary embedding that the file asks for.

    rotary_dim: if not given, head_dim times the file's partial_rotary_factor (or rotary_pct), rounded down.
    layer_type: the type to read for, in families whose layer types rotate differently.
    is_mrope: the file says which pairs turn with which of three positions; in a text these are equal.
    has_query_scaling: the file says how queries are scaled by their position.
    Raises ModelLoadError, which names the entry, for a kind of scaling or an entry within it that is not implemented,
    and for impossible numbers.
    """
    scaling = _scaling(entries, layer_type)
    if may_be_proportional and scaling.get("rope_type") == _PROPORTIONAL:
        return _proportional(scaling, head_dim, default_theta)
    kind = _kind(scaling, (_MROPE if is_mrope else frozenset()) | (_QUERIES if has_query_scaling else frozenset()))
    theta_name = "rope_local_base_freq" if layer_type == _SLIDING else "rope_theta"
    theta_at, name = (scaling, "rope_theta") if "rope_theta" in scaling else (entries, theta_name)
    theta = theta_at.positive(name, default_theta)
    if theta <= 1.0:
        raise theta_at.wrong(name, "a number above 1")
    if rotary_dim is None:
        rotary_dim = _rotary_dim(entries, scaling, head_dim, default_partial_rotary_factor)
    if kind == "dynamic" and rotary_dim < 4:
        raise ModelLoadError(f"config.json: dynamic rope needs at least 4 rotated values per head, not {rotary_dim}")
    numbers = _numbers(scaling, kind, entries, max_position_embeddings)
    for name in ("short_factor", "long_factor"):
        if kind == "longrope" and len(numbers[name]) != rotary_dim // 2:
            raise ModelLoadError(
                f"config.json: {name} has {len(numbers[name])} numbers, and must have {rotary_dim // 2}: "
                f"half of the {rotary_dim} values per head that are rotated"
            )
    if has_query_scaling:
        numbers = {_ORIGINAL: _original_length(scaling, entries, max_position_embeddings), **numbers}
        numbers["query_beta"] = beta = scaling.number("llama_4_scaling_beta")
        # Devstral 2 has 0, which leaves queries as they are.
        if beta < 0:
            raise scaling.wrong("llama_4_scaling_beta", "a number from 0")
    return RopeConfig(theta=theta, kind=kind, rotary_dim=rotary_dim, interleaved=interleaved, **numbers)


def _proportional(scaling: Entries, head_dim: int, default_theta: float) -> RopeConfig:
    for name in scaling:
        if name not in _EVERYWHERE | {"factor"}:
            raise scaling.wrong(name, f"left out: a rope scaling of type {_PROPORTIONAL} with it is not supported")
    part = scaling.positive("partial_rotary_factor", 1.0)
    rotary_dim = 2 * int(min(part, 1.0) * head_dim // 2)
    if part > 1.0 or rotary_dim < 2 or head_dim % 2:
        raise scaling.wrong("partial_rotary_factor", f"a part, at most 1, of the head's {head_dim} values")
    theta = scaling.positive("rope_theta", default_theta)
    if theta <= 1.0:
        raise scaling.wrong("rope_theta", "a number above 1")
    factor = scaling.positive("factor", 1.0)
    return RopeConfig(theta=theta, kind=_PROPORTIONAL, rotary_dim=rotary_dim, factor=factor, head_dim=head_dim)


def _scaling(entries: Entries, layer_type: str | None) -> Entries:
    """Return the object with the scaling of these layers, in either spelling; an empty one if there is none."""
    old = entries.child("rope_scaling") or Entries({}, "rope_scaling")
    if layer_type == _SLIDING:
        old = Entries({}, "rope_scaling")
    new = entries.child("rope_parameters") or Entries({}, "rope_parameters")
    is_nested = [isinstance(new.get(name), Mapping) for name in new]
    if layer_type is None and any(is_nested):
        raise entries.wrong("rope_parameters", "without an object within it: all layers rotate alike here")
    if layer_type is not None:
        if not all(is_nested):
            raise entries.wrong("rope_parameters", f"an object with one for each type of layer, such as {layer_type}")
        new = new.child(layer_type) or Entries({}, f"rope_parameters.{layer_type}")
    for name in old:
        if new.values and old.get(name) != new.get(name):
            raise entries.wrong(
                "rope_scaling", f"left out or agree with rope_parameters, which has {name} {new.get(name)!r}"
            )
    return new if new.values else old


def _kind(scaling: Entries, others: frozenset[str] = frozenset()) -> RopeKind:
    """Return the kind of scaling. Raises ModelLoadError if the kind, or an entry that it would ignore, is unknown.

    others: entries that the family reads besides.
    """
    names = [name for name in ("rope_type", "type") if name in scaling]
    old_names = {**_OLD_NAMES, "mrope": "default"} if others >= _MROPE else _OLD_NAMES
    kinds = {name: old_names.get(value := scaling.text(name), value) for name in names}
    if len(set(kinds.values())) > 1:
        raise scaling.wrong("type", f"the same as rope_type, {kinds['rope_type']}")
    kind = kinds[names[0]] if names else "default"
    if kind not in _KNOWN:
        raise scaling.wrong(names[0], f"one of {', '.join(_KNOWN)}: other rope scalings are not supported")
    if not names and "factor" in scaling:
        raise scaling.wrong("rope_type", f"one of {', '.join(_KNOWN)}, as there is a factor")
    for name in scaling:
        if name not in _KNOWN[kind] | _EVERYWHERE | others:
            raise scaling.wrong(name, f"left out: a rope scaling of type {kind} with it is not supported")
    return cast(RopeKind, kind)


def _rotary_dim(entries: Entries, scaling: Entries, head_dim: int, default: float) -> int:
    at, name = entries, "partial_rotary_factor"
    if name in scaling:
        at = scaling
    elif name not in entries and "rotary_pct" in entries:
        name = "rotary_pct"
    part = at.positive(name, default)
    rotary_dim = int(head_dim * min(part, 1.0))
    if part > 1.0 or rotary_dim < 2 or rotary_dim % 2:
        raise at.wrong(name, f"a part, at most 1, that makes an even number of the head's {head_dim} values")
    return rotary_dim


def _numbers(scaling: Entries, kind: RopeKind, top: Entries, max_position: int) -> dict[str, Any]:
    """Return the fields of RopeConfig that belong to the kind."""
    if kind == "default":
        return {}
    if kind == "linear":
        return {"factor": scaling.positive("factor")}
    if kind == "dynamic":
        if scaling.size(_ORIGINAL, max_position) != max_position:
            raise scaling.wrong(_ORIGINAL, f"left out, or max_position_embeddings ({max_position}), with dynamic rope")
        # The kernels define this scaling for such factors alone.
        if (factor := scaling.positive("factor")) < 1:
            raise scaling.wrong("factor", "a number from 1 with dynamic rope")
        return {"factor": factor, _ORIGINAL: max_position}
    original = _original_length(scaling, top, max_position)
    if kind == "llama3":
        low, high = scaling.positive("low_freq_factor"), scaling.positive("high_freq_factor")
        if high <= low:
            raise scaling.wrong("high_freq_factor", f"above low_freq_factor ({low})")
        factor = scaling.positive("factor")
        return {"factor": factor, "low_freq_factor": low, "high_freq_factor": high, _ORIGINAL: original}
    factor = scaling.positive("factor", max_position / original)
    if kind == "yarn":
        return {"factor": factor, _ORIGINAL: original, **_yarn_numbers(scaling, factor)}
    return {"factor": factor, _ORIGINAL: original, **_longrope_numbers(scaling, factor, original)}


def _original_length(scaling: Entries, top: Entries, max_position: int) -> int:
    """Phi-3's files have this entry beside the scaling; files without it mean max_position_embeddings."""
    beside = top.optional_size(_ORIGINAL)
    original = scaling.size(_ORIGINAL, beside or max_position)
    if beside not in (None, original):
        raise top.wrong(_ORIGINAL, f"the same as within the rope scaling ({original})")
    if original < 2:
        raise (scaling if _ORIGINAL in scaling else top).wrong(_ORIGINAL, "a whole number above 1")
    return original


def _yarn_numbers(scaling: Entries, factor: float) -> dict[str, Any]:
    fast, slow = scaling.positive("beta_fast", 32.0), scaling.positive("beta_slow", 1.0)
    if fast < slow:
        raise scaling.wrong("beta_fast", f"at least beta_slow ({slow})")
    # Their logarithms are needed; no pair turns as often, or as rarely.
    if fast > _MOST_TURNS:
        raise scaling.wrong("beta_fast", f"at most {_MOST_TURNS}")
    if slow < 1 / _MOST_TURNS:
        raise scaling.wrong("beta_slow", f"at least {1 / _MOST_TURNS}")
    mscale, mscale_all_dim = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
    for name, value in (("mscale", mscale), ("mscale_all_dim", mscale_all_dim)):
        if value < 0:
            raise scaling.wrong(name, "a number from 0")
    # arXiv:2309.00071, section 3.4; the quotient is DeepSeek-V2's.
    if mscale and mscale_all_dim:
        attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    else:
        attention_factor = yarn_mscale(factor)
    if "attn_factor" in scaling:
        # Multiplies the formula's result in the code of YaRN's authors; DeepSeek-R1-0528-Qwen3-8B has it.
        if "attention_factor" in scaling:
            raise scaling.wrong("attn_factor", "left out beside attention_factor, which is the whole factor")
        attention_factor *= scaling.positive("attn_factor")
    scaling.demand("extrapolation_factor", 1, 1)
    return {
        "beta_fast": fast,
        "beta_slow": slow,
        "truncate": scaling.flag("truncate", True),
        "attention_factor": scaling.positive("attention_factor", attention_factor),
        "mscale_all_dim": mscale_all_dim,
    }


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return the factor that sharpens attention in a context `factor` times as long (arXiv:2309.00071, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope_numbers(scaling: Entries, factor: float, original: int) -> dict[str, Any]:
    # arXiv:2402.13753, section 3.3, and Phi-3's own code.
    attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    numbers: dict[str, Any] = {"attention_factor": scaling.positive("attention_factor", attention_factor)}
    for name in ("short_factor", "long_factor"):
        factors = scaling.numbers(name)
        if factors is None or not all(factor > 0 for factor in factors):
            raise scaling.wrong(name, "a list of numbers above 0")
        numbers[name] = factors
    return numbers


def parse_scaling(text: str | None) -> Mapping[str, Any] | None:
    """Parse the user's --rope-scaling into an object. Raises ConfigError if it is not an object."""
    try:
        scaling = None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        scaling = text
    if scaling is not None and not isinstance(scaling, Mapping):
        raise ConfigError(
            f"--rope-scaling {text!r:.80} is no JSON object; write for example\n"
            '  \'{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}\''
        )
    return scaling


def override_rope(
    config: Mapping[str, Any], scaling: Mapping[str, Any] | None, theta: float | None
) -> Mapping[str, Any]:
    """Return a copy of `config` with the user's scaling and theta in place of its own.

    scaling: an object as in config.json, {"rope_type": "default"} for none at all; None keeps the file's. theta: the
    base of the frequencies; None keeps the file's. If layer types rotate differently, sliding layers keep theirs, as
    they never look far. In a model of several parts, the text part gets both.
    Raises ConfigError for a scaling or theta that makes no sense, as far as that is known without the model's sizes.
    """
    if scaling is None and theta is None:
        return config
    text_config = config.get("text_config")
    if isinstance(text_config, Mapping):
        return {**config, "text_config": override_rope(text_config, scaling, theta)}
    if theta is not None and (isinstance(theta, bool) or not math.isfinite(theta) or theta <= 1):
        raise ConfigError(f"--rope-theta is {theta!r}, and must be a number above 1")
    listed = next((name for name in ("layer_rope_theta", "rope_theta") if isinstance(config.get(name), list)), "")
    if theta is not None and listed:
        raise ConfigError(f"--rope-theta: each layer of this model has a base of its own; edit its {listed}")
    changed = dict(config)
    if scaling is not None:
        _check_override(config, scaling, theta)
        changed["rope_scaling"] = None
        # Phi-3's files have this entry beside the scaling as well, and both must agree.
        if config.get(_ORIGINAL) is not None and scaling.get(_ORIGINAL) is not None:
            changed[_ORIGINAL] = scaling[_ORIGINAL]
    parameters = config.get("rope_parameters")
    if isinstance(parameters, Mapping) and parameters:
        if any(isinstance(value, Mapping) for value in parameters.values()):
            changed["rope_parameters"] = {
                layer_type: own if layer_type == _SLIDING else _overridden(own, scaling, theta)
                for layer_type, own in {_FULL: None, **parameters}.items()
            }
        else:
            changed["rope_parameters"] = _overridden(parameters, scaling, theta)
        return changed
    if scaling is not None:
        changed["rope_scaling"] = _overridden(config.get("rope_scaling"), scaling, theta)
    elif isinstance(config.get("rope_scaling"), Mapping) and "rope_theta" in config["rope_scaling"]:
        changed["rope_scaling"] = {**config["rope_scaling"], "rope_theta": theta}
    if theta is not None:
        changed["rope_theta"] = theta
    return changed


def _check_override(config: Mapping[str, Any], scaling: Mapping[str, Any], theta: float | None) -> None:
    if not isinstance(scaling, Mapping):
        raise ConfigError(f'--rope-scaling is {scaling!r}, and must be an object such as {{"rope_type": "yarn", ...}}')
    entries = Entries(scaling)
    try:
        if "rope_type" not in entries and "type" not in entries:
            raise entries.wrong("rope_type", f"one of {', '.join(_KNOWN)}")
        kind = _kind(entries)
        if kind == "yarn" and _ORIGINAL not in entries:
            entries.positive("factor")  # without either, the scaling would scale nothing
        if entries.positive("rope_theta", 10000.0) <= 1:
            raise entries.wrong("rope_theta", "a number above 1")
        # This function does not judge the file's own numbers.
        max_position = config.get("max_position_embeddings")
        known = isinstance(max_position, int) and 1 < max_position <= MAX_SIZE
        _numbers(entries, kind, Entries({}), int(cast(int, max_position)) if known else scaling.get(_ORIGINAL) or 2048)
    except ModelLoadError as error:
        raise ConfigError(f"--rope-scaling: {str(error).removeprefix('config.json: ')}") from None
    if theta is not None and scaling.get("rope_theta", theta) != theta:
        raise ConfigError(f"--rope-theta is {theta!r}, but --rope-scaling has rope_theta {scaling['rope_theta']!r}")


def _overridden(own: object, scaling: Mapping[str, Any] | None, theta: float | None) -> dict[str, Any]:
    """Override one object; the base and the rotated part of a head are no part of the scaling and stay the file's."""
    before = dict(own) if isinstance(own, Mapping) else {}
    if scaling is not None:
        own_names = ("rope_theta", "partial_rotary_factor", "llama_4_scaling_beta", *sorted(_MROPE))
        kept = {name: before[name] for name in own_names if before.get(name) is not None}
        before = {**kept, **scaling}
    return before if theta is None else {**before, "rope_theta": theta}
