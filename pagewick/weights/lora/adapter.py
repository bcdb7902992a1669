"""Adapter: the factors of a LoRA adapter, by the weight that they change, whatever file they come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final, NamedTuple

from torch import Tensor

from pagewick.errors import ModelLoadError
from pagewick.weights.files import name_some

_DIGEST_BYTES: Final = 16
_READ_BYTES: Final = 2**20


class Factors(NamedTuple):
    """The change B A of a weight [out_features, in_features].

    a: [r, in_features]. b: [out_features, r] in float32, times the adapter's scale.
    """

    a: Tensor
    b: Tensor

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter. factors: by the name of a weight, without `.weight`, as in a checkpoint of its base model.

    digest: differs between adapters with different contents. is_gguf: whether rows and columns have the order of GGUF
    files, as far as `read_gguf` has not undone it.
    """

    factors: Mapping[str, Factors]
    digest: bytes
    is_gguf: bool = False

    @property
    def max_rank(self) -> int:
        return max(factors.rank for factors in self.factors.values())


def paired(
    where: str, a: Mapping[str, Tensor], b: Mapping[str, Tensor], scales: Mapping[str, float]
) -> dict[str, Factors]:
    """Join the factors of each weight: a [r, in], b [out, r] and a scale. Raises ModelLoadError if they do not fit."""
    if alone := sorted(a.keys() ^ b.keys()):
        raise ModelLoadError(f"{where} has only one of the two factors of {name_some(alone)}; copy it again")
    if not a:
        raise ModelLoadError(f"{where} holds no factors (lora_A and lora_B); is it a LoRA adapter?")
    for name, first in a.items():
        second = b[name]
        if first.ndim != 2 or second.ndim != 2 or not 0 < len(first) == second.shape[1]:
            raise ModelLoadError(
                f"{where}: the factors of {name} have the shapes {list(first.shape)} and {list(second.shape)}, and "
                "must have [r, in] and [out, r]"
            )
    return {name: Factors(first.float(), b[name].float() * scales[name]) for name, first in a.items()}


def digest_of(files: Iterable[Path]) -> bytes:
    """Return a digest of the contents of an adapter's files. Raises ModelLoadError if one cannot be read."""
    digest = blake2b(digest_size=_DIGEST_BYTES, person=b"lora")
    for path in files:
        try:
            digest.update(path.stat().st_size.to_bytes(8, "little"))
            with path.open("rb") as file:
                while piece := file.read(_READ_BYTES):
                    digest.update(piece)
        except OSError as error:
            raise ModelLoadError(f"cannot read {path}: {error.strerror or error}\n  check the file") from error
    return digest.digest()
