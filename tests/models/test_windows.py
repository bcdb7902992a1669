"""Layers with a window keep only the blocks of that window, and their outputs are as if they kept all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagewick.engine.messages import EngineRequest
from pagewick.sampling_params import SamplingParams
from tests.models.answers import answers, judge, make_prompts, running
from tests.models.checkpoints import VARIANTS, write_checkpoint

BLOCK_SIZE = 8
# variant -> its window, and whether there are layers that see everything.
WINDOWS = {
    "llama4-scout": (21, True),
    "mistral-v0.1": (24, False),
    "mistral-short-window": (5, False),
    "mixtral-window": (19, False),
    "qwen2-window": (20, True),
    "qwen2-moe-window": (20, True),
    "qwen3-moe-window": (21, False),
    "phi-3-mini-4k": (23, False),
    "gemma-2": (21, True),
    "gemma-3-1b": (18, True),
    "starcoder2-3b": (22, False),
    "gpt-oss": (20, True),
    "gemma-4-e2b": (18, True),
    "olmo-3": (19, True),
    "exaone-4-32b": (20, True),
    "smollm3-window": (21, True),
    "command-r7b": (20, True),
    "cwm": (20, True),
    "mellum-2": (19, True),
    "granite-swash": (18, True),
    "north-mini": (20, True),
    "laguna-xs": (21, True),
    "flint": (20, True),
    "step-3.7": (20, True),
    "mimo-v2-flash": (22, True),
}


def num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


@pytest.mark.parametrize("name", WINDOWS)
def test_blocks_behind_the_window_are_given_back(name: str, tmp_path: Path) -> None:
    window, has_full_layers = WINDOWS[name]
    write_checkpoint(name, tmp_path)
    prompt, num_new_tokens, chunk = make_prompts((85,))[0], 60, 16
    with running(tmp_path, block_size=BLOCK_SIZE, max_num_batched_tokens=chunk) as engine:
        params = SamplingParams(temperature=0, max_tokens=num_new_tokens, ignore_eos=True)
        engine.add(EngineRequest(request_id="a", prompt_token_ids=prompt, params=params, seed=1))
        held, num_computed = [], 0
        while engine.has_work:
            engine.step()
            num_computed += min(chunk, len(prompt) - num_computed) if num_computed < len(prompt) else 1
            held.append(engine.stats().num_referenced_blocks)
            # A step looks at its tokens and the window before the first of them; blocks may cut both.
            seen = num_blocks(window - 1 + chunk) + 1
            assert held[-1] <= min(seen, num_blocks(num_computed)) + has_full_layers * num_blocks(num_computed)
        assert engine.check_integrity() == []
    longest = num_blocks(len(prompt) + num_new_tokens - 1)
    # The last step frees everything; the one before holds the window, and all of it where layers see everything.
    assert held[-2] - has_full_layers * longest in range(num_blocks(window - 1), num_blocks(window) + 2)
    assert held[-1] == 0


def test_a_chunk_gives_back_its_blocks_when_it_ends(tmp_path: Path) -> None:
    chunk, _ = WINDOWS["llama4-scout"]
    write_checkpoint("llama4-scout", tmp_path)
    prompt = make_prompts((40,))[0]
    with running(tmp_path, block_size=BLOCK_SIZE, max_num_batched_tokens=16) as engine:
        params = SamplingParams(temperature=0, max_tokens=2 * chunk * BLOCK_SIZE - 40, ignore_eos=True)
        engine.add(EngineRequest(request_id="a", prompt_token_ids=prompt, params=params, seed=1))
        num_computed = 0
        while engine.has_work:
            engine.step()
            num_computed += min(16, len(prompt) - num_computed) if num_computed < len(prompt) else 1
            # One of four layers sees everything. The others need nothing where a chunk begins with a block.
            of_chunk = num_blocks(num_computed) - num_computed // chunk * chunk // BLOCK_SIZE
            if engine.has_work:
                assert engine.stats().num_referenced_blocks == num_blocks(num_computed) + of_chunk
    assert num_computed == 2 * chunk * BLOCK_SIZE - 1


@pytest.mark.parametrize("name", WINDOWS)
def test_answers_are_the_same(name: str, tmp_path: Path) -> None:
    """With this few blocks, those behind the windows are reused at once."""
    window, has_full_layers = WINDOWS[name]
    model = write_checkpoint(name, tmp_path)
    prompts = make_prompts((85, 9))
    few = num_blocks(85 + 64) + 1 if has_full_layers else num_blocks(window + 15) + 2
    with running(tmp_path, block_size=BLOCK_SIZE, max_num_batched_tokens=16, num_kv_blocks=few) as engine:
        found = answers(engine, prompts)
    for answer, expected in zip(found, judge(model, prompts, found), strict=True):
        torch.testing.assert_close(answer.logits, expected, atol=VARIANTS[name].tolerance, rtol=0)
        assert answer.token_ids == expected.argmax(-1).tolist()
