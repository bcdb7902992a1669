"""Gives an engine prompts of which it returns vectors: embeddings, or the logits of labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagewick.engine.engine import Engine
from pagewick.engine.messages import EngineRequest, RequestOptions
from pagewick.pooling_params import EMBEDDING


def pooled(
    engine: Engine, prompts: Sequence[list[int]], pooling: str, *, cache_salt: str | None = None, **fields: Any
) -> list[Tensor]:
    """Give all prompts to the engine at once, and return their vectors. fields: others of the requests."""
    ids = [f"{pooling}-{cache_salt}-{index}" for index in range(len(prompts))]
    for request_id, prompt in zip(ids, prompts, strict=True):
        options = RequestOptions(cache_salt=cache_salt)
        engine.add(EngineRequest(
            request_id=request_id, prompt_token_ids=prompt, params=EMBEDDING, seed=0, pooling=pooling, options=options,
            **fields,
        ))  # fmt: skip
    found: dict[str, bytes] = {}
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None and not delta.token_ids
            if delta.embedding:
                assert delta.finish_reason == "length" and delta.request_id not in found
                found[delta.request_id] = delta.embedding
    return [torch.from_numpy(np.frombuffer(found[request_id], "<f4").copy()) for request_id in ids]
