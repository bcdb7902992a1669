"""Rows that the decoder adds behind its first layers (deepstack) equal those of Qwen3-VL in transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from pagewick.layers.context import LayerContext
from tests.layers.ranks import on_ranks, single_context
from tests.models.checkpoints import VARIANTS, write_checkpoint
from tests.models.test_given_embeddings import IS_GIVEN, NUM_TOKENS, Loaded, make_inputs

NUM_DEEP = 2


def deep_rows(hidden_size: int) -> torch.Tensor:
    """[NUM_DEEP, T, hidden_size], 0 for text."""
    rows = torch.randn(NUM_DEEP, sum(NUM_TOKENS), hidden_size, generator=torch.Generator().manual_seed(2))
    return rows * IS_GIVEN.unsqueeze(-1)


@torch.inference_mode()
def test_deep_rows_are_added_as_in_transformers(tmp_path: Path) -> None:
    text_only = write_checkpoint("qwen3", tmp_path)
    entries = {**VARIANTS["qwen3"].all_entries(), "use_sliding_window": False}
    config = transformers.Qwen3VLTextConfig(**entries, attn_implementation="eager")
    reference = transformers.Qwen3VLTextModel(config).eval()
    reference.load_state_dict(text_only.model.state_dict())  # type: ignore[union-attr]

    loaded = Loaded(tmp_path, single_context())
    token_ids, given = make_inputs(loaded.config.hidden_size)
    deep = deep_rows(loaded.config.hidden_size)
    embeds = reference.get_input_embeddings()(token_ids).masked_scatter(IS_GIVEN.unsqueeze(-1), given[IS_GIVEN])
    parts = []
    for index, rows in enumerate(embeds.split(NUM_TOKENS)):
        is_given = IS_GIVEN.split(NUM_TOKENS)[index]
        own = [layer.split(NUM_TOKENS)[index][is_given] for layer in deep]
        out = reference(
            inputs_embeds=rows[None], use_cache=False, visual_pos_masks=is_given[None], deepstack_visual_embeds=own
        )
        parts.append(out[0].squeeze(0))
    expected = torch.cat(parts)
    fields = {"inputs_embeds": given, "embeds_mask": IS_GIVEN}
    found = loaded.model(loaded.batch(token_ids, **fields, deep_embeds=deep))
    torch.testing.assert_close(found, expected, atol=VARIANTS["qwen3"].tolerance, rtol=0)
    without = loaded.model(loaded.batch(token_ids, **fields))
    assert float((without - expected).abs().max()) > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_rows_of_text_keep_their_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    write_checkpoint("qwen3", tmp_path)
    loaded = Loaded(tmp_path, replace(single_context(), dtype=dtype))
    token_ids, given = make_inputs(loaded.config.hidden_size)
    fields = {"inputs_embeds": given.to(dtype), "embeds_mask": IS_GIVEN}
    deep = deep_rows(loaded.config.hidden_size).to(dtype)
    is_before = torch.tensor([*range(3), *range(NUM_TOKENS[0], 30)])
    text = loaded.model(loaded.batch(token_ids)).clone()
    found = loaded.model(loaded.batch(token_ids, **fields, deep_embeds=deep))
    assert torch.equal(found[is_before], text[is_before])


@torch.inference_mode()
def test_every_rank_adds_the_whole_rows(tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path)
    alone = Loaded(tmp_path, single_context())
    token_ids, given = make_inputs(alone.config.hidden_size)
    fields = {"inputs_embeds": given, "embeds_mask": IS_GIVEN, "deep_embeds": deep_rows(alone.config.hidden_size)}
    expected = alone.model(alone.batch(token_ids, **fields))

    def on_a_rank(context: LayerContext) -> torch.Tensor:
        loaded = Loaded(tmp_path, context)
        with torch.inference_mode():
            return loaded.model(loaded.batch(token_ids, **fields))  # type: ignore[no-any-return]

    for found in on_ranks(2, on_a_rank):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
