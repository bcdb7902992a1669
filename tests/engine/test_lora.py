"""LoRA adapters: the tokens of PEFT's, however requests with different adapters are served beside each other."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

from pagewick.engine.messages import EngineRequest
from pagewick.kernels import cpu
from tests.engine.serving import Answers, request, running, serve
from tests.models.checkpoints import write_checkpoint
from tests.models.lora_adapters import adapted, linear_names, write_adapter

exact = pytest.mark.skipif(cpu.library() is None, reason="needs the native library: make install")

OPTIONS: dict[str, Any] = {"block_size": 8, "max_model_len": 96, "dtype": "float32", "num_kv_blocks": 100}
# The adapter of each prompt; the first two prompts are equal.
ADAPTERS = ["wide", "", "narrow", "wide", ""]


def prompts() -> list[list[int]]:
    random = Random(5)
    first = [random.randrange(2, 180) for _ in range(21)]
    return [first, first, first, *([random.randrange(2, 180) for _ in range(length)] for length in (1, 40))]


def requests(adapters: list[str] | None = None) -> list[EngineRequest]:
    wanted = zip(prompts(), ADAPTERS if adapters is None else adapters, strict=True)
    return [
        request(prompt, f"r{number}", temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0, adapter=adapter)
        for number, (prompt, adapter) in enumerate(wanted)
    ]


def write(name: str, directory: Path) -> nn.Module:
    """Write a model and two adapters: "wide" changes all linear layers, "narrow" a few, and its rank is odd."""
    model = write_checkpoint(name, directory / "model")
    names = linear_names(model)
    write_adapter(model, directory / "wide", names, seed=1)
    some = [one for one in names if one.endswith(("q_proj", "v_proj", "qkv_proj", "c_attn", "down_proj", "o_proj"))]
    write_adapter(model, directory / "narrow", some, seed=2, rank=5, use_rslora=True)
    return model


def modules(directory: Path) -> tuple[str, ...]:
    return tuple(f"{name}={directory / name}" for name in ("wide", "narrow"))


def assert_peft_agrees(model: nn.Module, directory: Path, found: Answers) -> None:
    for number, (prompt, adapter) in enumerate(zip(prompts(), ADAPTERS, strict=True)):
        answer = found[f"r{number}", 0]
        with adapted(model, directory / adapter if adapter else None) as logits_of:
            logits = logits_of([*prompt, *answer.token_ids])[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer.token_ids, number
        logprobs = torch.tensor([step.logprob for step in answer.logprobs])
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(answer.token_ids).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(logprobs, chosen, atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    "name",
    ["llama", "phi-3-mini-4k", "starcoder", "qwen2-moe", "qwen3.5", "deepseek-v2-lite", "deepseek-v3", "gemma-4-e2b",
     "qwen3-vl", "gemma-3-multimodal", "olmo-2", "phi-2", "granite-moe"],
)  # fmt: skip
def test_tokens_and_logprobs_are_those_of_peft(name: str, tmp_path: Path) -> None:
    model = write(name, tmp_path)
    with running(tmp_path / "model", **OPTIONS, lora_modules=modules(tmp_path)) as engine:
        found = serve(engine, requests())
    assert_peft_agrees(model, tmp_path, found)
    # The adapters matter.
    assert len({tuple(found[f"r{number}", 0].token_ids) for number in range(3)}) == 3
