"""Export: a model on its way into a GGUF file, in a type or a mix of types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.quantization.at_load import quantize_rows
from pagewick.quantization.mixes import MIXES, MixedModel, is_quantizable, mix_types
from pagewick.weights.gguf.assembly import Rows
from pagewick.weights.gguf.header import FORMATS_BY_NAME, GgufTensor
from pagewick.weights.gguf.writing import header_bytes, new_file, padding, place_tensors
from pagewick.weights.mapped import release_pages
from pagewick.weights.progress import Progress

_FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Name of a type -> general.file_type, as llama.h numbers them.
_FILE_TYPES: Final[Mapping[str, int]] = {
    "f32": 0, "f16": 1, "bf16": 32, "q4_0": 2, "q4_1": 3, "q5_0": 8, "q5_1": 9, "q8_0": 7, "q2_k": 10, "q2_k_s": 21,
    "q3_k_s": 11, "q3_k_m": 12, "q3_k_l": 13, "q3_k": 11, "q4_k_s": 14, "q4_k_m": 15, "q4_k": 14,
    "q5_k_s": 16, "q5_k_m": 17, "q5_k": 16, "q6_k": 18,
}  # fmt: skip
TYPES: Final = tuple(name for name in _FILE_TYPES if name in MIXES or name.upper() in _FLOATS)
_QUANTIZATION_VERSION: Final = 2
# Numbers that are quantized at once; the rest of a large tensor stays in its file meanwhile.
_CHUNK: Final = 2**23


@dataclass(frozen=True)
class Export:
    """values: the file's key-values, without those that say its type. shapes: of its tensors, in their order.

    types: name of each tensor's type. rows: a tensor's numbers. importance: of the columns of a tensor, [K], or [E, K]
    if it holds experts.
    """

    values: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    types: Mapping[str, str]
    rows: Callable[[GgufTensor], Rows]
    importance: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> tuple[GgufTensor, ...]:
        """The tensors, with offsets from the first one."""
        return place_tensors(self.shapes, {name: FORMATS_BY_NAME[kind] for name, kind in self.types.items()})

    def write(self, path: Path, *, is_forced: bool, progress: Progress) -> int:
        """Write the file and return its size; it appears when it is complete.

        Raises ConfigError if it exists and is not forced, or cannot be written, ModelLoadError for numbers that the
        type cannot store.
        """
        tensors = self.tensors
        header = header_bytes(self.values, tensors)
        num_bytes = len(header) + sum(tensor.num_bytes + len(padding(tensor)) for tensor in tensors)
        with new_file(path, num_bytes, is_forced=is_forced) as file:
            progress.start(f"writing {path.name}", num_bytes)
            try:
                file.write(header)
                progress.advance(len(header))
                for tensor in tensors:
                    self._write_tensor(tensor, file, progress)
            finally:
                progress.stop()
        return num_bytes

    def _write_tensor(self, tensor: GgufTensor, file: BinaryIO, progress: Progress) -> None:
        num_written = 0
        for index, rows in self.rows(tensor):
            for chunk in torch.split(rows, max(1, _CHUNK // rows.shape[1])):
                content = self._content(tensor, index, chunk)
                file.write(content)
                release_pages(chunk)  # nothing reads these rows again
                num_written += len(content)
                progress.advance(len(content))
        assert num_written == tensor.num_bytes, f"{tensor.name}: {num_written} bytes instead of {tensor.num_bytes}"
        file.write(padding(tensor))

    def _content(self, tensor: GgufTensor, index: int, rows: Tensor) -> memoryview:
        kind = tensor.format.name
        if kind in _FLOATS:
            stored = rows.to(_FLOATS[kind]).contiguous()
            if kind == "F16" and stored.isinf().any() and rows.isfinite().all():
                raise ModelLoadError(f"{tensor.name} holds numbers too large for float16\n  choose the type bf16")
        else:
            importance = self.importance.get(tensor.name)
            if importance is not None and importance.ndim > 1:
                importance = importance[index]
            try:
                stored = quantize_rows(kind, rows, importance)
            except ModelLoadError as error:
                reason = error.__cause__ or error
                is_finite = bool(rows.isfinite().all())
                fix = (
                    "choose the type bf16, or f32" if is_finite else "the weights are damaged: download the model again"
                )
                raise ModelLoadError(f"{tensor.name}: {reason}\n  {fix}") from None
        return stored.flatten().view(torch.uint8).numpy().data


def type_named(text: str) -> str:
    """Return the name in TYPES that a spelling stands for: Q4_K_M, q4-k-m, q4km. Raises ConfigError."""
    plain = text.lower().replace("-", "").replace("_", "").replace("fp", "f")
    for name in TYPES:
        if name.replace("_", "") == plain:
            return name
    raise ConfigError(f"{text} is no type that can be written\n  choose from: {', '.join(TYPES)}")


def types_of(name: str, shapes: Mapping[str, tuple[int, ...]], model: MixedModel) -> dict[str, str]:
    """Return each tensor's type. Those that no mix quantizes are float32.

    name: one of TYPES. shapes: by the file's names.
    """
    if name in MIXES:
        # A layer that predicts further tokens is the last block.
        beside = {key: shape for key, shape in shapes.items() if key.startswith(f"blk.{model.num_layers}.")}
        own = {key: shape for key, shape in shapes.items() if key not in beside}
        types = mix_types(name, own, model, beside)
        return {key: types[key] or "F32" for key in shapes}
    return {key: name.upper() if is_quantizable(key, shape) else "F32" for key, shape in shapes.items()}


def type_values(name: str) -> dict[str, int]:
    """Return the key-values that say a file's type."""
    return {"general.file_type": _FILE_TYPES[name], "general.quantization_version": _QUANTIZATION_VERSION}


def size_label(shapes: Mapping[str, Sequence[int]]) -> str:
    """Return general.size_label: the number of weights, such as 7.2B, or 8x7.2B with experts.

    As in llama.cpp, the biases of all experts count as those of one.
    """
    expert_shapes = [shape for name, shape in shapes.items() if "_exps." in name and len(shape) > 2]
    count = max((shape[0] for shape in expert_shapes), default=0)
    total = sum(prod(shape) for shape in shapes.values())
    in_experts = sum(map(prod, expert_shapes))
    return f"{count}x{_rounded(total - in_experts + in_experts // count)}" if count else _rounded(total)


def _rounded(count: int) -> str:
    power = next((power for power in (4, 3, 2) if count > 1000**power), 1)
    scaled = count / 1000**power
    digits = max(0, 2 - len(str(round(scaled)).lstrip("0")))
    return f"{scaled:.{digits}f}{' KMBT'[power]}"


def written_types(types: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Yield each type and the number of tensors that have it, the most frequent first."""
    names = list(types.values())
    for name in sorted(set(names), key=names.count, reverse=True):
        yield name, names.count(name)
