"""Tokens whose embeddings are given, and positions of three axes: the whole decoder against transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from pagewick.engine.cache.kv_cache import allocate_cache, cache_groups
from pagewick.engine.host_batch import Batch, ragged_batch
from pagewick.layers.context import LayerContext
from pagewick.models.config import ModelConfig
from pagewick.models.decoder import Decoder
from pagewick.models.registry import build_model, read_config
from pagewick.weights.loader import load_weights
from pagewick.weights.opening import open_source
from tests.layers.ranks import on_ranks, single_context
from tests.models.checkpoints import VARIANTS, write_checkpoint

CPU = torch.device("cpu")
# Two sequences, each with an image in the middle; the second one ends in its image.
NUM_TOKENS = (23, 14)
IS_GIVEN = torch.tensor([3 <= token < 12 or 17 <= token < 19 or token >= 30 for token in range(sum(NUM_TOKENS))])
SECTIONS = (1, 5, 2)


class Loaded:
    """Our decoder of a checkpoint, with a cache. change: replaces entries of the file's config."""

    def __init__(
        self,
        directory: Path,
        context: LayerContext,
        change: Callable[[ModelConfig], ModelConfig] = lambda config: config,
    ) -> None:
        with open_source(directory) as source:
            self.config = change(read_config(source.config()))
            self.model: Decoder = build_model(context, self.config, source.names())
            load_weights(self.model, source)
        groups = cache_groups(self.model)
        self.specs = [group.spec for group in groups]
        allocate_cache(groups, [40] * len(groups), CPU)

    def batch(self, token_ids: Tensor, *, num_tokens: Sequence[int] = NUM_TOKENS, **fields: Any) -> Batch:
        blocks = np.arange(40, dtype=np.int32).reshape(2, 20)
        # A row of states says last after how many tokens the state is stored: after all of them.
        states = np.array([[0, 1, 0], [20, 21, 0]], np.int32)
        tables = [states if spec.has_snapshots else blocks for spec in self.specs]
        host = ragged_batch(
            token_ids.numpy(),
            starts=[0, 0],
            num_tokens=num_tokens,
            block_tables=tables,
            specs=self.specs,
        )
        return replace(host.to(CPU), **fields)

    def logits(self, batch: Batch) -> Tensor:
        return self.model.compute_logits(self.model(batch))


def make_inputs(hidden_size: int) -> tuple[Tensor, Tensor]:
    """Token ids [T]; rows [T, hidden_size], which are NaN except where IS_GIVEN, as the others must not be read."""
    generator = torch.Generator().manual_seed(6)
    token_ids = torch.randint(2, 193, (sum(NUM_TOKENS),), generator=generator)
    given = torch.randn(sum(NUM_TOKENS), hidden_size, generator=generator)
    given[~IS_GIVEN] = torch.nan
    return token_ids, given


def by_transformers(model: nn.Module, embeds: Tensor, **options: Any) -> Tensor:
    parts: list[Tensor] = []
    for index, rows in enumerate(embeds.split(NUM_TOKENS)):
        own = {name: value.split(NUM_TOKENS, dim=-1)[index].unsqueeze(1) for name, value in options.items()}
        parts.append(model(inputs_embeds=rows[None], use_cache=False, **own)[0].squeeze(0))
    return torch.cat(parts)


def embed(model: nn.Module, token_ids: Tensor, given: Tensor) -> Tensor:
    """Embeddings as transformers combines them: the model's own, with the given rows scattered into them."""
    embeds = model.get_input_embeddings()(token_ids)  # type: ignore[operator]
    return embeds.masked_scatter(IS_GIVEN.unsqueeze(-1), given[IS_GIVEN])  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["llama", "gemma-3-1b", "granite", "starcoder"])
@torch.inference_mode()
def test_given_rows_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Gemma 3 scales only its own embeddings, Granite all of them; starcoder adds learned positions."""
    reference = write_checkpoint(name, tmp_path)
    loaded = Loaded(tmp_path, single_context())
    token_ids, given = make_inputs(loaded.config.hidden_size)
    expected = by_transformers(reference, embed(reference, token_ids, given))
    if name == "granite":
        assert loaded.config.embedding_scale != 1
        given = given * loaded.config.embedding_scale
    found = loaded.logits(loaded.batch(token_ids, inputs_embeds=given, embeds_mask=IS_GIVEN))
    torch.testing.assert_close(found, expected, atol=VARIANTS[name].tolerance, rtol=0)
    text = loaded.logits(loaded.batch(token_ids))
    assert float((found - text)[IS_GIVEN].abs().amax(-1).min()) > 0.1


@pytest.mark.parametrize("name", ["llama", "gemma-3-1b"])
@torch.inference_mode()
def test_rows_of_text_have_the_bits_they_have_without_an_image(name: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path)
    loaded = Loaded(tmp_path, single_context())
    token_ids, given = make_inputs(loaded.config.hidden_size)
    stack = loaded.model.model
    text_batch = loaded.batch(token_ids)
    text, text_logits = stack.embed(text_batch).clone(), loaded.logits(text_batch).clone()

    batch = loaded.batch(token_ids, inputs_embeds=given, embeds_mask=IS_GIVEN)
    embedded = stack.embed(batch)
    assert torch.equal(embedded[~IS_GIVEN], text[~IS_GIVEN])
    assert torch.equal(embedded[IS_GIVEN], given[IS_GIVEN])
    # Tokens before a sequence's first image cannot see it.
    is_before = torch.tensor([*range(3), *range(NUM_TOKENS[0], 30)])
    assert torch.equal(loaded.logits(batch)[is_before], text_logits[is_before])
    # The table's own rows, given.
    own = loaded.batch(token_ids, inputs_embeds=text, embeds_mask=IS_GIVEN)
    assert torch.equal(loaded.logits(own), text_logits)
    none = loaded.batch(token_ids, inputs_embeds=given, embeds_mask=torch.zeros_like(IS_GIVEN))
    assert torch.equal(loaded.logits(none), text_logits)


@torch.inference_mode()
def test_every_rank_takes_the_whole_rows(tmp_path: Path) -> None:
    write_checkpoint("gemma-3-1b", tmp_path)
    alone = Loaded(tmp_path, single_context())
    token_ids, given = make_inputs(alone.config.hidden_size)
    fields = {"inputs_embeds": given, "embeds_mask": IS_GIVEN}
    expected = alone.logits(alone.batch(token_ids, **fields))

    def on_a_rank(context: LayerContext) -> Tensor:
        loaded = Loaded(tmp_path, context)
        with torch.inference_mode():
            return loaded.logits(loaded.batch(token_ids, **fields))

    for found in on_ranks(3, on_a_rank):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def with_sections(config: ModelConfig) -> ModelConfig:
    def changed(rope: Any) -> Any:
        return replace(rope, mrope_section=SECTIONS)

    return replace(config, layers=tuple(replace(layer, rope=changed(layer.rope)) for layer in config.layers))


def image_positions() -> Tensor:
    """[3, T]: given tokens have a time, a row and a column; text continues after the largest of these."""
    positions = torch.cat([torch.arange(number) for number in NUM_TOKENS]).repeat(3, 1)
    positions[:, 3:12] = torch.tensor([[3] * 9, [3 + place // 3 for place in range(9)], [3, 4, 5] * 3])
    positions[:, 12:23] -= 6
    positions[:, 30:] = torch.tensor([[7] * 7, [7] * 3 + [8] * 4, [7, 8, 9, 7, 8, 9, 10]])
    return positions


@torch.inference_mode()
def test_a_decoder_with_three_axes_is_the_text_part_of_qwen2_vl(tmp_path: Path) -> None:
    text_only = write_checkpoint("qwen2", tmp_path)
    entries = {**VARIANTS["qwen2"].all_entries(), "use_sliding_window": False}
    parameters = {"rope_type": "default", "rope_theta": 10000.0, **entries.get("rope_parameters", {})}
    entries["rope_parameters"] = {**parameters, "mrope_section": list(SECTIONS)}
    config = transformers.Qwen2VLTextConfig(**entries, attn_implementation="eager")
    reference = transformers.Qwen2VLTextModel(config).eval()
    reference.load_state_dict(text_only.model.state_dict())  # type: ignore[union-attr]

    loaded = Loaded(tmp_path, single_context(), with_sections)
    token_ids, given = make_inputs(loaded.config.hidden_size)
    positions = image_positions()
    expected = by_transformers(reference, embed(reference, token_ids, given), position_ids=positions)
    fields = {"inputs_embeds": given, "embeds_mask": IS_GIVEN}
    found = loaded.model(loaded.batch(token_ids, **fields, positions=positions))
    torch.testing.assert_close(found, expected, atol=VARIANTS["qwen2"].tolerance, rtol=0)
    on_one_axis = loaded.model(loaded.batch(token_ids, **fields))
    assert float((on_one_axis - expected).abs().max()) > 0.1
