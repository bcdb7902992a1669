"""Pagewick: an LLM inference and serving engine.

The public names below are imported when first used, so that `import pagewick` costs nothing and needs no torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from pagewick.openmp import limit_spinning

if TYPE_CHECKING:
    from pagewick.async_llm import AsyncEngine
    from pagewick.config import EngineConfig
    from pagewick.engine.messages import PrefixMiss, RequestOptions
    from pagewick.errors import (
        ArgumentError,
        ConfigError,
        ContextLengthError,
        DeadlineExceededError,
        EngineDeadError,
        EngineError,
        InvalidRequestError,
        ModelLoadError,
        ModelNotFoundError,
        NotEnoughMemoryError,
        PagewickError,
        QueueFullError,
        UnsupportedError,
    )
    from pagewick.llm import LLM
    from pagewick.lora_request import LoRARequest
    from pagewick.outputs import (
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingRequestOutput,
        RequestOutput,
        ScoringRequestOutput,
    )
    from pagewick.pooling_params import PoolingParams
    from pagewick.sampling_params import SamplingParams
    from pagewick.vllm_rs import Engine, Message

__version__ = "0.1.0"

# torch's OpenMP runtime reads its variables when torch is imported, which may be next.
limit_spinning()

# MKL, which multiplies matrices for images, then has the same bits wherever its operands lie in memory. Elsewhere, they
# differed with the number of threads on processors with AVX2 only. MKL reads this before its first product.
os.environ.setdefault("MKL_CBWR", "AUTO")

# Pagewick tokenizes one text at a time; the library's own threads would only compete with the engine.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

__all__ = [
    "LLM",
    "ArgumentError",
    "AsyncEngine",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "ConfigError",
    "ContextLengthError",
    "DeadlineExceededError",
    "EmbeddingRequestOutput",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "EngineError",
    "InvalidRequestError",
    "LoRARequest",
    "Message",
    "ModelLoadError",
    "ModelNotFoundError",
    "NotEnoughMemoryError",
    "PagewickError",
    "PoolingParams",
    "PrefixMiss",
    "QueueFullError",
    "RequestOptions",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "UnsupportedError",
    "__version__",
]

_MODULES = {
    "LLM": "llm",
    "LoRARequest": "lora_request",
    "AsyncEngine": "async_llm",
    "ClassificationRequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "EmbeddingRequestOutput": "outputs",
    "PoolingParams": "pooling_params",
    "RequestOutput": "outputs",
    "EngineConfig": "config",
    "PrefixMiss": "engine.messages",
    "RequestOptions": "engine.messages",
    "SamplingParams": "sampling_params",
    "ScoringRequestOutput": "outputs",
    "Engine": "vllm_rs",
    "Message": "vllm_rs",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'pagewick' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"pagewick.{_MODULES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
