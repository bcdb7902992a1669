"""Models for benchmarks.gpu: the sizes of known models, with random weights that are made on the device.

Nothing is read from a disk and nothing is copied from the host: an 8B model is ready in seconds. Quantized weights are
some quantized random rows, repeated, as quantizing all of them would take longer than the measurements.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor

from pagewick.config import EngineConfig
from pagewick.engine.engine import Engine
from pagewick.engine.preflight import WeightBytes
from pagewick.models.registry import read_config
from pagewick.models.tensor_sizes import DTYPE_BYTES, ModelTensor
from pagewick.models.tensors import model_tensors
from pagewick.quantization.at_load import quantize_rows
from pagewick.quantization.block_formats import stored_block
from pagewick.weights.source import TensorSource

# Names on the command line and in results -> block formats; None: numbers in bfloat16.
FORMATS: Final[Mapping[str, str | None]] = {
    "bf16": None,
    "q4_k": "Q4_K",
    "q8_0": "Q8_0",
    "int4-g128": "int4_g128",
    "fp8": "fp8_g128",
}
# A decoder's config.json; "bos" and "eos" are no tokens of the benchmarks.
_COMMON: Final[dict[str, Any]] = {"torch_dtype": "bfloat16", "rms_norm_eps": 1e-6, "max_position_embeddings": 40960}
SHAPES: Final[Mapping[str, dict[str, Any]]] = {
    "Qwen3-0.6B": {
        **_COMMON, "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "rope_theta": 1e6, "tie_word_embeddings": True,
    },
    "Llama-3.1-8B": {
        **_COMMON, "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 128256, "rope_theta": 5e5, "tie_word_embeddings": False,
    },
    "Qwen3-30B-A3B": {
        **_COMMON, "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 151936, "rope_theta": 1e6, "tie_word_embeddings": False, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
    },
}  # fmt: skip
# A dry run replaces these sizes of a shape by small ones; the layers stay, so that it takes the same paths.
_TINY: Final[dict[str, Any]] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 2048,
}  # fmt: skip
_TINY_EXPERTS: Final[dict[str, Any]] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
_TILE_ROWS: Final = 64


@dataclass(frozen=True, slots=True)
class Place:
    """Where the benchmarks run. is_dry: with small models, to see that everything works; figures mean nothing."""

    device: str = "cuda"
    is_dry: bool = False

    def shape(self, name: str) -> dict[str, Any]:
        """Return the config.json of one of SHAPES."""
        shape = dict(SHAPES[name])
        if self.is_dry:
            shape |= _TINY | (_TINY_EXPERTS if "num_experts" in shape else {})
        return shape

    def finish(self) -> None:
        """Wait until the device has done everything that was called."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)


class RandomSource(TensorSource):
    """A checkpoint of a shape. format: a value of FORMATS, that of all matrices that are multiplied.

    has_row_scales: in fp8, all groups of a row have the same scale.

    Every tensor depends on the seed and its place in the table alone, and is the same on each device of one kind.
    """

    def __init__(
        self, config: Mapping[str, Any], format: str | None, device: str, seed: int = 0, *, has_row_scales: bool = False
    ) -> None:
        self._config, self._format, self._device, self._seed = dict(config), format, device, seed
        self._has_row_scales = has_row_scales
        self._tensors = {tensor.name: tensor for tensor in model_tensors(read_config(self._config))}
        self._order = {name: place for place, name in enumerate(self._tensors)}
        self._blocks: dict[int, Tensor] = {}

    def names(self) -> Sequence[str]:
        return tuple(self._tensors)

    def stored_type(self, name: str) -> torch.dtype | str:
        return self._format if self._format and self._is_quantized(self._tensors[name]) else torch.bfloat16

    def dtype(self, name: str) -> torch.dtype:
        return torch.uint8 if isinstance(self.stored_type(name), str) else torch.bfloat16

    def shape(self, name: str) -> tuple[int, ...]:
        shape, kind = self._tensors[name].shape, self.stored_type(name)
        if not isinstance(kind, str):
            return shape
        numbers, num_bytes = stored_block(kind)
        return shape[0], shape[1] // numbers * num_bytes

    def get(self, name: str) -> Tensor:
        shape, kind = self._tensors[name].shape, self.stored_type(name)
        if isinstance(kind, str):
            rows = self._quantized_rows(kind, shape[1])
            return rows.repeat(-(-shape[0] // len(rows)), 1)[: shape[0]]
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=self._device)
        return self._numbers(shape, self._order[name]).to(torch.bfloat16)

    def release(self, tensor: Tensor) -> None:
        """Do nothing: no file is mapped."""

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def generation_config(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._blocks.clear()

    def bytes_in_step(self) -> int:
        """Return the bytes that a step with one token reads: all weights but rows of the embedding and idle experts."""
        model = read_config(self._config)
        experts = model.mixtures[0].routing.top_k / model.num_experts if model.mixtures else 1.0
        total = 0.0
        for name, tensor in self._tensors.items():
            if tensor.role == "embedding" and not model.tie_word_embeddings:
                continue
            num_bytes = math.prod(self.shape(name)) * self.dtype(name).itemsize
            num_bytes = tensor.num_elements * DTYPE_BYTES["float32"] if tensor.role == "router" else num_bytes
            total += num_bytes * (experts if tensor.role == "expert" else 1)
        return int(total)

    def _is_quantized(self, tensor: ModelTensor) -> bool:
        assert self._format is not None
        is_multiplied = tensor.is_linear or tensor.role == "head"
        return is_multiplied and tensor.shape[-1] % stored_block(self._format)[0] == 0

    def _numbers(self, shape: tuple[int, ...], place: int) -> Tensor:
        """Return numbers that keep hidden states as large as they are: a variance of 1 over the number of columns."""
        generator = torch.Generator(self._device).manual_seed(self._seed * 2**20 + place)
        numbers = torch.randn(shape, generator=generator, device=self._device)
        return numbers.mul_(shape[-1] ** -0.5)

    def _quantized_rows(self, kind: str, num_columns: int) -> Tensor:
        """Return some rows of blocks [n, bytes] uint8, made once for each width."""
        if num_columns not in self._blocks:
            numbers = self._numbers((_TILE_ROWS, num_columns), -1 - num_columns)
            is_fp8 = kind.startswith("fp8")
            rows = _fp8_rows(kind, numbers, self._has_row_scales) if is_fp8 else quantize_rows(kind, numbers)
            self._blocks[num_columns] = rows
        return self._blocks[num_columns]


def _fp8_rows(kind: str, numbers: Tensor, has_row_scales: bool) -> Tensor:
    """Return rows as blocks of a scale in float32, the same in a row if has_row_scales, and numbers in E4M3."""
    size, _ = stored_block(kind)
    groups = torch.unflatten(numbers, 1, (-1, size))
    scales = groups.abs().amax((1, 2) if has_row_scales else -1, keepdim=True).expand(-1, groups.shape[1], 1) / 448
    levels = (groups / scales).to(torch.float8_e4m3fn)
    return torch.cat([scales.float().view(torch.uint8), levels.view(torch.uint8)], -1).flatten(1)


@contextmanager
def running(source: RandomSource, place: Place, **options: Any) -> Iterator[Engine]:
    """An engine with the weights of a source; options are EngineConfig's."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(source.config()), encoding="utf-8")
        # Pinning memory for swapped blocks would take seconds, and no block is swapped.
        options = {"dtype": "bfloat16", "swap_space": 0, **options}
        config = EngineConfig(model=folder, device=place.device, **options)
        # The checks of files ask for headers, which these weights do not have.
        with mock.patch("pagewick.engine.model_loading.open_source", lambda path, mix=None, mmproj=None: source):
            engine = Engine(config, weights=WeightBytes(0, 0, 0))
        try:
            yield engine
        finally:
            engine.close()
