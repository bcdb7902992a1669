"""Checks of options: types, ranges, choices, and sizes such as 4GiB. They name an option by its flag."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pagewick.errors import ConfigError

_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_KINDS = {"str": (str, "a text"), "int": (int, "a whole number"), "float": (int | float, "a number")}
# More than any machine has cores; a mistyped number would otherwise exhaust the system's threads.
_MAX_THREADS = 1024
# All other numbers are above 0.
_MAY_BE_0 = (
    "seed", "swap_space", "session_ttl", "rank_timeout", "num_experts_offload_per_rank", "quantized_cache_size",
    "memory_reserve",
)  # fmt: skip


def parse_bytes(text: str | int, *, needs_unit: bool = True) -> int:
    """Parse a size such as `4GiB` or `512M`; units are powers of 1024, and B is a byte. An int is a number of bytes.

    needs_unit: refuse a text without a unit, other than 0, which people write for GiB as well as for bytes.
    Raises ConfigError.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([bkmgt]?)(?:i?b)?\s*", str(text), re.IGNORECASE)
    if match is None or (not match[2] and "." in match[1]):
        raise ConfigError(f"{text!r} is not a size; write a number and a unit, for example 4GiB or 512M")
    if needs_unit and isinstance(text, str) and not match[2] and not re.search("[bB]", text) and int(match[1]):
        # A number as large as this one was meant as bytes.
        units = ("GiB", "MiB", "B") if int(match[1]) < 2**10 else ("B",)
        raise ConfigError(f"{match[1]} has no unit; write {' or '.join(match[1] + unit for unit in units)}")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_type(name: str, annotation: object, value: Any) -> None:
    """Raise ConfigError unless a value has the type of its field, whose annotation is a text such as int | None."""
    if (value is None and "None" in str(annotation)) or (isinstance(value, bool) and annotation == "bool"):
        return
    if isinstance(value, tuple) and str(annotation).startswith("tuple"):
        return
    kind, wanted = _KINDS.get(str(annotation).partition(" ")[0], ((), "True or False"))
    is_right, is_number = isinstance(value, kind) and not isinstance(value, bool), kind not in (str, ())
    if is_number and name != "seed":
        is_right = is_right and 0 <= value < float("inf") and (value > 0 or name in _MAY_BE_0)
        wanted += ", 0 or more" if name in _MAY_BE_0 else " above 0"
    if not is_right:
        raise ConfigError(f"{flag_of(name)} must be {wanted}; got {value!r}")


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{flag_of(name)} must be one of {', '.join(allowed)}; got {value!r}")


def check_speculation(method: str | None, model: str | None, least: int, most: int) -> None:
    """Raise ConfigError if options of draft tokens contradict each other. least, most: --ngram-prompt-lookup-min, -max.

    model: the draft model.
    """
    if model is not None and method == "none":
        raise ConfigError(
            "--speculative-method none turns off what --speculative-model asks for: leave one of them out"
        )
    if model is not None and method != "draft":
        raise ConfigError("--speculative-model is for --speculative-method draft")
    if model is None and method == "draft":
        raise ConfigError("--speculative-method draft needs a --speculative-model")
    if least > most:
        raise ConfigError(f"--ngram-prompt-lookup-min {least} is above --ngram-prompt-lookup-max {most}")


def check_disk(directory: str | None, *, is_used: bool, is_shared: bool) -> None:
    """Raise ConfigError if options of --kv-cache-disk contradict each other. is_used: whether prefixes are cached."""
    if directory is not None and not is_used:
        raise ConfigError("--kv-cache-disk keeps prefixes, which --no-enable-prefix-caching switches off")
    if directory is None and is_shared:
        raise ConfigError("--kv-cache-disk-shared needs --kv-cache-disk, the directory that servers share")


def check_share(name: str, value: float | None) -> None:
    """Raise ConfigError unless a value is a part of something, or left open."""
    if value is not None and not 0 < value <= 1:
        raise ConfigError(f"{flag_of(name)} must be above 0 and at most 1; got {value}")


def check_batch_invariance(package: str | None, *, rounds_activations: bool) -> None:
    """Raise ConfigError for an option that goes against --batch-invariant. package: of --attention-backend."""
    if package is not None:
        raise ConfigError(f"--batch-invariant needs Pagewick's own attention: drop --attention-backend {package}")
    if rounds_activations:
        raise ConfigError(
            "give --fp8-activations or --batch-invariant, not both: only products of many rows round activations"
        )


def check_only_one(values: Mapping[str, Any]) -> None:
    """Raise ConfigError if more than one of these options is given, which say the same in different ways."""
    given = [flag_of(name) for name, value in values.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"give {given[0]} or {given[1]}, not both")


def check_threads(number: int | None) -> None:
    """Raise ConfigError for a --num-threads that no machine has cores for."""
    if number is not None and number > _MAX_THREADS:
        raise ConfigError(
            f"--num-threads must be at most {_MAX_THREADS}, and more threads than cores are slower; got {number}"
        )


def named_paths(name: str, value: Any) -> tuple[str, ...]:
    """Return texts NAME=PATH for an option that takes several, in any of its forms. Raises ConfigError.

    Forms: a map of names to paths, or a list, or one, of NAME=PATH and of objects with "name" and "path", which may be
    JSON, as in vLLM.
    """
    if isinstance(value, Mapping) and "path" not in value:
        value = [{"name": one, "path": path} for one, path in value.items()]
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        value = [value]
    found = [_named_path(name, one) for one in value]
    names = [one for one, _ in found]
    if twice := next((one for one in names if names.count(one) > 1), None):
        raise ConfigError(f"{flag_of(name)} gives the name {twice!r} twice; names must differ")
    return tuple(f"{one}={path}" for one, path in found)


def _named_path(name: str, given: Any) -> tuple[str, str]:
    value = given
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{flag_of(name)} must be NAME=PATH or a JSON object; got {value!r}") from error
    if isinstance(value, str):
        before, _, path = value.partition("=")
        value = {"name": before, "path": path}
    wanted = ("name", "path")
    if not isinstance(value, Mapping) or not all(isinstance(value.get(key), str) and value[key] for key in wanted):
        raise ConfigError(f"{flag_of(name)} must be NAME=PATH, or an object with name and path; got {given!r}")
    if "=" in value["name"]:
        raise ConfigError(f"{flag_of(name)} gives the name {value['name']!r}; a name must not contain =")
    if unknown := sorted(set(value) - {*wanted, "base_model_name"}):
        raise ConfigError(f"{flag_of(name)} has unknown keys: {', '.join(unknown)}; known: name, path, base_model_name")
    return value["name"], value["path"]
