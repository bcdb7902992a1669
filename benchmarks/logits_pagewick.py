"""Pagewick's logits: `python -m benchmarks.logits_pagewick MODEL DTYPE THREADS WAYS TOKENS NUM_LAST OUT`.

TOKENS and OUT are as in benchmarks/accuracy.py. WAYS is "both", or "prompt" for the first half of OUT.
"""

from __future__ import annotations

import sys
from contextlib import closing

import numpy as np
import torch
from torch import Tensor

from pagewick.cli.bench import open_engine
from pagewick.config import EngineConfig
from pagewick.engine.engine import Engine
from pagewick.engine.messages import EngineRequest
from pagewick.sampling_params import SamplingParams


def last_logits(engine: Engine, token_ids: list[int], num_last: int) -> Tensor:
    """Return the logits [num_last, vocab_size] of the last tokens of a prompt, in float32."""
    runner, found = engine._ranks.runner, list[Tensor]()
    forward = runner._forward

    def remembered(*given: object) -> object:
        output = forward(*given)  # type: ignore[arg-type]
        found.append(output.hidden_states.clone())
        return output

    runner._forward = remembered  # type: ignore[assignment]
    params = SamplingParams(temperature=0, max_tokens=1)
    engine.add(EngineRequest(request_id="logits", prompt_token_ids=token_ids, params=params, seed=0))
    while engine.has_work:
        engine.step()
    hidden_states = torch.cat(found)
    assert len(hidden_states) == len(token_ids)
    with torch.inference_mode():
        return runner.model.compute_logits(hidden_states[-num_last:].clone()).float()


def main() -> None:
    model, dtype, num_threads, ways, tokens, num_last, out = sys.argv[1:]
    token_ids = np.fromfile(tokens, np.int32).tolist()
    with open(out, "wb") as file:
        for num_batched_tokens in (len(token_ids), 1) if ways == "both" else (len(token_ids),):
            config = EngineConfig(
                model=model, dtype=dtype, device="cpu", num_threads=int(num_threads),
                max_model_len=len(token_ids) + 1, max_num_batched_tokens=num_batched_tokens, max_num_seqs=1,
            )  # fmt: skip
            with closing(open_engine(config, shape=None, max_num_seqs=1)) as engine:
                last_logits(engine, token_ids, int(num_last)).numpy().tofile(file)


if __name__ == "__main__":
    main()
