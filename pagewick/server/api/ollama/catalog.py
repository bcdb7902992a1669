"""Descriptions of models in Ollama's API: in its list, among those that are loaded, and of one alone."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from msgspec import UNSET

from pagewick.async_llm import AsyncEngine
from pagewick.engine.model_info import ModelInfo
from pagewick.local_models import weight_files
from pagewick.outputs import PartKind
from pagewick.sampling_params import SamplingParams
from pagewick.server.api.ollama.responses import ListedModel, ModelDescription, ModelDetails, RunningModel, timestamp
from pagewick.server.core.thinking import ThinkingModel

# When a model expires that stays loaded; Ollama, too, names a day that is far away.
NEVER = "9999-12-31T23:59:59Z"
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The weights of a model on this disk. size: in bytes. modified_at: of the newest file, in the form of RFC 3339."""

    size: int = 0
    modified_at: str = "1970-01-01T00:00:00Z"
    format: str = ""

    @classmethod
    def of(cls, path: Path) -> Self:
        """Look at a GGUF file, or a directory. A model that is not on this disk has no size."""
        try:
            states = [file.stat() for file in weight_files(path)]
            newest = datetime.fromtimestamp(max((state.st_mtime for state in states), default=0), UTC)
        # A file may have a time that no calendar has.
        except (OSError, ValueError, OverflowError):
            return cls()
        if not states:
            return cls()
        size = sum(state.st_size for state in states)
        return cls(size, timestamp(newest), "gguf" if path.suffix == ".gguf" else "safetensors")


def listed(name: str, files: ModelFiles, info: ModelInfo | None) -> ListedModel:
    """Return a model's entry in the list. info: None: it is not loaded."""
    return ListedModel(
        name=name,
        model=name,
        modified_at=files.modified_at,
        size=files.size,
        digest=_digest(name, files),
        details=_details(files, info),
    )


def running(name: str, files: ModelFiles, info: ModelInfo, expires_at: str = NEVER) -> RunningModel:
    """Return a loaded model's entry."""
    return RunningModel(
        name=name,
        model=name,
        size=files.size,
        digest=_digest(name, files),
        details=_details(files, info),
        expires_at=expires_at,
        size_vram=0 if info.device == "cpu" else files.size,
        context_length=info.max_model_len,
    )


def described(files: ModelFiles, engine: AsyncEngine | None) -> ModelDescription:
    """Return what is known of a model. engine: None: it is not loaded."""
    info = None if engine is None else engine.info
    details = _details(files, info)
    numbers: dict[str, Any] = {}
    if info is not None:
        family = details.family
        numbers = {
            "general.architecture": family,
            "general.parameter_count": info.num_parameters,
            f"{family}.context_length": info.max_model_len,
            f"{family}.embedding_length": info.embedding_size,
        }
    return ModelDescription(
        parameters="" if engine is None else _parameters(engine.default_params),
        template="" if engine is None else engine.template_source,
        details=details,
        model_info=numbers,
        capabilities=UNSET if engine is None else capabilities(engine),
        modified_at=files.modified_at,
    )


def capabilities(engine: AsyncEngine) -> list[str]:
    """Return Ollama's words for what a model can do."""
    thinking, info = ThinkingModel.of(engine), engine.info
    if info.num_labels:
        return []
    if info.embedding:
        return ["embedding"]
    found: Mapping[str, bool] = {
        "completion": True,
        "tools": engine.has_chat_template and PartKind.TOOL_CALL in engine.part_kinds,
        "thinking": thinking.has_thoughts,
        "vision": info.image_token_id is not None,
        "insert": engine.can_infill,
    }
    return [word for word, has in found.items() if has]


def _details(files: ModelFiles, info: ModelInfo | None) -> ModelDetails:
    if info is None:
        return ModelDetails(format=files.format)
    family = re.sub(r"(For[A-Z]\w*|Model|LMHeadModel)$", "", info.architecture).lower()
    weights = _DTYPES.get(info.dtype, info.dtype) if info.weights in ("", info.dtype) else info.weights.upper()
    return ModelDetails(
        format=files.format,
        family=family,
        families=[family],
        parameter_size=_in_words(info.num_parameters),
        quantization_level=weights,
    )


def _in_words(count: int) -> str:
    """Return a number as Ollama writes it: 596.0M, 8.03B."""
    if count >= 1e9:
        return f"{count / 1e9:.2f}".rstrip("0").rstrip(".") + "B"
    return f"{count / 1e6:.1f}M"


def _parameters(params: SamplingParams) -> str:
    """Return the defaults that differ from those of SamplingParams, under Ollama's names."""
    names = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
    shown = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "repetition_penalty", "presence_penalty")
    usual = SamplingParams()
    chosen = (name for name in shown if getattr(params, name) != getattr(usual, name))
    return "\n".join(f"{names.get(name, name):<30} {getattr(params, name)}" for name in chosen)


def _digest(name: str, files: ModelFiles) -> str:
    return hashlib.sha256(f"{name}\0{files.size}\0{files.modified_at}".encode()).hexdigest()
