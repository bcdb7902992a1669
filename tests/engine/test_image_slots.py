"""ImageSlots adds rows and positions to batches: random plans are compared with plain loops over their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from pagewick.engine.batch import SlotSampling, SlotStart, SlotWork, StepPlan, StreamWork
from pagewick.engine.device_copies import Array
from pagewick.engine.host_batch import HostBatch, ragged_batch
from pagewick.engine.image_slots import ImageSlots, pixels_of
from pagewick.engine.images import without_computed
from pagewick.engine.messages import ImageInput
from pagewick.sampling_params import SamplingParams
from tests.engine.requests import full_spec

HIDDEN_SIZE, NUM_DEEP = 3, 2
SPEC = full_spec()


class Encoded(NamedTuple):
    rows: Tensor
    deepstack: Tensor


def encoded(image: ImageInput) -> Encoded:
    """Rows that differ for each token and image."""
    token = torch.arange(image.num_tokens, dtype=torch.float32).unsqueeze(1) + 100 * image.pixels[0]
    rows = token + torch.arange(HIDDEN_SIZE) / 10
    return Encoded(rows, torch.stack([rows + 1000 * (layer + 1) for layer in range(NUM_DEEP)]))


def axes_of(token_ids: Sequence[int], images: Sequence[ImageInput]) -> tuple[Array, int, int]:
    """Positions of no particular meaning, which differ on each axis."""
    index = np.arange(len(token_ids))
    return np.stack([index * 7, index * 11, index * 13]), -2, images[-1].end


@dataclass
class Held:
    images: list[ImageInput]
    num_prompt_tokens: int
    num_tokens: int
    num_computed: int = 0


class Maker:
    """Random sequences with images, and plans that compute them in chunks of any length."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.held: dict[int, Held] = {}
        self.num_images = 0

    def plan(self) -> StepPlan:
        plan = StepPlan(streams=StreamWork())
        for slot in self.random.sample(range(4), self.random.randint(1, 4)):
            held = self.held.get(slot)
            if held is None or held.num_computed == held.num_tokens or self.random.random() < 0.1:
                held = self.held[slot] = self._start(slot, plan)
            start = held.num_computed
            if start >= held.num_prompt_tokens and self.random.random() < 0.7:
                plan.streams.slots.append(slot)
                plan.streams.starts.append(start)
                held.num_computed += 1
            else:
                num_tokens = self.random.randint(1, held.num_tokens - start)
                plan.work.append(SlotWork(slot, start, num_tokens, [0] * num_tokens, [[]], False))
                held.num_computed += num_tokens
        return plan

    def _start(self, slot: int, plan: StepPlan) -> Held:
        images, position = [], self.random.randint(0, 3)
        for _ in range(self.random.choice([0, 0, 1, 2, 3])):
            num_tokens = self.random.randint(1, 6)
            self.num_images = (self.num_images + 1) % 256
            images.append(ImageInput(position, num_tokens, 1, num_tokens, bytes([self.num_images] * 3 * num_tokens)))
            position += num_tokens + self.random.choice([0, 1, 4])
        num_prompt_tokens = max(1, position + self.random.choice([0, 3]))
        held = Held(images, num_prompt_tokens, num_prompt_tokens + self.random.randint(1, 8))
        # A part of the prompt may be in the prefix cache.
        held.num_computed = self.random.choice([0, 0, self.random.randrange(num_prompt_tokens)])
        sampling = SlotSampling(SamplingParams(), 0, choice_index=0, num_prompt_tokens=num_prompt_tokens)
        kept = without_computed(images, held.num_computed)
        prompt_ids = [0] * num_prompt_tokens if kept else []
        plan.starts.append(SlotStart(slot, sampling, [[0] * 20], images=kept, prompt_ids=prompt_ids))
        return held


def batch_of(plan: StepPlan) -> HostBatch:
    starts = [*plan.streams.starts, *(work.start for work in plan.work)]
    counts = [1] * len(plan.streams.starts) + [work.num_tokens for work in plan.work]
    tables = [np.zeros((len(starts), 20), np.int32)]
    ids = np.zeros(sum(counts), np.int64)
    return ragged_batch(ids, starts=starts, num_tokens=counts, block_tables=tables, specs=[SPEC])


def tokens_of(plan: StepPlan) -> list[tuple[int, int]]:
    """(slot, position) of every token of the batch."""
    found = list(zip(plan.streams.slots, plan.streams.starts, strict=True))
    for work in plan.work:
        found += [(work.slot, work.start + index) for index in range(work.num_tokens)]
    return found


@pytest.mark.parametrize("has_axes", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_rows_and_positions_of_random_plans(seed: int, has_axes: bool) -> None:
    maker = Maker(seed)
    num_encoded: dict[int, int] = {}

    def encode(image: ImageInput) -> Encoded:
        num_encoded[image.pixels[0]] = num_encoded.get(image.pixels[0], 0) + 1
        return encoded(image)

    slots = ImageSlots(4, encode, axes_of if has_axes else None)
    num_with_rows = num_with_axes = 0
    for _ in range(60):
        num_encoded.clear()
        plan = maker.plan()
        plain = batch_of(plan)
        batch = slots.fill(plan, plain)
        num_with_rows += batch.inputs_embeds is not None
        num_with_axes += len(batch.positions) == 3
        assert set(num_encoded.values()) <= {1}, "an image is encoded once for a start"
        for index, (slot, position) in enumerate(tokens_of(plan)):
            held = maker.held[slot]
            image = next((one for one in held.images if one.start <= position < one.end), None)
            is_given = batch.embeds_mask is not None and bool(batch.embeds_mask[index])
            assert is_given == (image is not None)
            if batch.deep_embeds is not None and image is None:
                assert not batch.deep_embeds[:, index].any()
            if image is not None:
                rows, deepstack = encoded(image)
                assert batch.inputs_embeds is not None and batch.deep_embeds is not None
                assert torch.equal(batch.inputs_embeds[index], rows[position - image.start])
                assert torch.equal(batch.deep_embeds[:, index], deepstack[:, position - image.start])
            expected = [position] * len(batch.positions)
            if has_axes and held.images:
                is_prompt = position < held.num_prompt_tokens
                is_before = position < held.images[-1].end
                work = next((one for one in plan.work if one.slot == slot), None)
                is_before = is_before or (work is not None and work.start < held.images[-1].end)
                # In the prompt, axes count from the first image's end on; a chunk behind it may use the delta.
                if is_prompt and is_before:
                    expected = [position * 7, position * 11, position * 13]
                else:
                    expected = [position - 2] * len(batch.positions)
            assert batch.positions[:, index].tolist() == expected
        assert batch.slot_mappings[0] is plain.slot_mappings[0], "slots of the cache follow the index, not the position"
    assert num_with_rows > 10 and (num_with_axes > 10) == has_axes


def test_tokens_of_an_image_see_it_whole() -> None:
    slots = ImageSlots(4, encoded, sees_whole=True)
    sampling = SlotSampling(SamplingParams(), 0, choice_index=0, num_prompt_tokens=15)
    images = [ImageInput(2, 3, 1, 3, b"\x01" * 9), ImageInput(8, 4, 1, 4, b"\x02" * 12)]
    starts = [SlotStart(slot, sampling, [[0] * 4], images=images) for slot in (1, 2)]
    # A stream, a prompt whose first image is cached but for its end, and a prompt up to its second image.
    parts = [SlotWork(1, 4, 11, [0] * 11, [[]], False), SlotWork(2, 0, 8, [0] * 8, [[]], False)]
    plan = StepPlan(starts=starts, streams=StreamWork(slots=[0], starts=[6]), work=parts)
    ends = slots.fill(plan, batch_of(plan)).key_ends
    assert ImageSlots(4, encoded).fill(plan, batch_of(plan)).key_ends is None
    assert ends is not None and ends.dtype == np.int32
    assert ends.tolist() == [7, *[5, 6, 7, 8, 12, 12, 12, 12, 13, 14, 15], *[1, 2, 5, 5, 5, 6, 7, 8]]
    # Text that follows is the usual step.
    plan = StepPlan(work=[SlotWork(1, 15, 2, [0] * 2, [[]], False)])
    assert slots.fill(plan, batch_of(plan)).key_ends is None


def test_text_alone_leaves_the_batch_as_it_is() -> None:
    slots = ImageSlots(4, encoded, axes_of)
    sampling = SlotSampling(SamplingParams(), 0, choice_index=0, num_prompt_tokens=5)
    plan = StepPlan(starts=[SlotStart(1, sampling, [[0]])], work=[SlotWork(1, 0, 5, [0] * 5, [[]], False)])
    batch = batch_of(plan)
    assert slots.fill(plan, batch) is batch


def test_rows_are_forgotten_when_all_of_them_have_been_used_or_the_slot_starts_anew() -> None:
    slots = ImageSlots(4, encoded)
    sampling = SlotSampling(SamplingParams(), 0, choice_index=0, num_prompt_tokens=9)
    image = ImageInput(2, 6, 1, 6, b"\x01" * 18)
    start = SlotStart(3, sampling, [[0] * 3], images=[image])
    for plan, is_kept in [
        (StepPlan(starts=[start], work=[SlotWork(3, 0, 5, [0] * 5, [[]], False)]), True),
        (StepPlan(work=[SlotWork(3, 5, 3, [0] * 3, [[]], False)]), False),
        (StepPlan(starts=[start], work=[SlotWork(3, 0, 3, [0] * 3, [[]], False)]), True),
        (StepPlan(starts=[SlotStart(3, sampling, [[0]])], work=[SlotWork(3, 0, 5, [0] * 5, [[]], False)]), False),
    ]:
        slots.fill(plan, batch_of(plan))
        assert any(one.encoded for one in slots._slots.values()) == is_kept


def test_pixels_become_a_tensor() -> None:
    values = list(range(2 * 3 * 3))
    pixels = pixels_of(ImageInput(0, 1, 2, 3, bytes(values)), torch.device("cpu"))
    assert pixels.shape == (2, 3, 3) and pixels.dtype == torch.uint8
    assert pixels.flatten().tolist() == values
