"""Engines of Gemma 4 with images of many sizes: the tokens of transformers, however they come."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from pagewick.engine.messages import EngineRequest, ImageInput
from tests.engine.serving import Answers, assert_same, running, serve
from tests.engine.test_image_requests import Prompt, exact
from tests.models.checkpoints import VARIANTS, write_checkpoint

# max_model_len leaves room for the largest image of 70 tokens, which a step of the second model must take whole.
OPTIONS: dict[str, Any] = {
    "block_size": 8, "max_model_len": 160, "dtype": "float32", "num_kv_blocks": 120, "max_num_batched_tokens": 70,
}  # fmt: skip
IMAGE, PATCH = 196, 4


class Kind(NamedTuple):
    """pooled: patches along the side of a token. sees_whole: whether tokens of an image see later ones."""

    name: str
    pooled: int
    sees_whole: bool

    @property
    def side(self) -> int:
        return PATCH * self.pooled

    def write(self, directory: Path) -> nn.Module:
        model = write_checkpoint(self.name, directory)
        settings = {
            "image_processor_type": "Gemma4ImageProcessor", "patch_size": PATCH, "pooling_kernel_size": self.pooled,
            "max_soft_tokens": 70, "do_normalize": False,
        }  # fmt: skip
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))
        return model

    def image_at(self, start: int, seed: int, rows: int, columns: int) -> ImageInput:
        shape = rows * self.side, columns * self.side, 3
        pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8).tobytes()
        return ImageInput(start, rows * columns, shape[0], shape[1], pixels)

    def prompt(self, seed: int, *parts: int | tuple[int, int, int]) -> Prompt:
        """A prompt of random texts of these numbers of tokens, and of images: (seed, rows, columns)."""
        random = Random(seed)
        token_ids: list[int] = []
        images = []
        for part in parts:
            if isinstance(part, int):
                token_ids += [random.randrange(4, 190) for _ in range(part)]
                continue
            images.append(self.image_at(len(token_ids), *part))
            token_ids += [IMAGE] * images[-1].num_tokens
        return Prompt(token_ids, images)

    def prompts(self) -> list[Prompt]:
        return [
            self.prompt(1, 5, (1, 3, 7), 9),
            # transformers takes images without a token between them for one.
            self.prompt(2, (2, 1, 1), 3, (3, 6, 4), 1, (1, 3, 7), 2),
            self.prompt(3, 30),
            self.prompt(4, 4, (3, 6, 4)),
            self.prompt(1, 5, (9, 3, 7), 9),
        ]

    def requests(self) -> list[EngineRequest]:
        return [one.request(f"r{number}") for number, one in enumerate(self.prompts())]

    def by_transformers(self, model: nn.Module, one: Prompt, answer: Sequence[int]) -> torch.Tensor:
        """Logits of the tokens of the answer."""
        token_ids = torch.tensor([[*one.token_ids, *answer]])
        given: dict[str, Any] = {}
        if one.images:
            patches, places = zip(*(self._patches(image) for image in one.images), strict=True)
            most = max(map(len, patches))
            given["pixel_values"] = torch.stack([nn.functional.pad(x, (0, 0, 0, most - len(x))) for x in patches])
            given["image_position_ids"] = torch.stack(
                [nn.functional.pad(x, (0, 0, 0, most - len(x)), value=-1) for x in places]
            )
            is_image = token_ids == IMAGE
            is_image[:, len(one.token_ids) :] = False
            given["mm_token_type_ids"] = is_image.long()
        with torch.inference_mode():
            logits = model(input_ids=token_ids, attention_mask=torch.ones_like(token_ids), **given).logits[0]
        return logits[len(one.token_ids) - 1 : -1]

    def _patches(self, image: ImageInput) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers of the patches, row by row, and their columns and rows."""
        rows, columns = image.height // PATCH, image.width // PATCH
        pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(rows, PATCH, columns, PATCH, 3)
        numbers = pixels.transpose(1, 2).reshape(rows * columns, -1).float() / 255
        place = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
        return numbers, place


KINDS = [Kind("gemma-4-multimodal", 3, sees_whole=False), Kind("gemma-4-31b-multimodal", 2, sees_whole=True)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_tokens_and_logprobs_are_those_of_transformers(kind: Kind, tmp_path: Path) -> None:
    model = kind.write(tmp_path)
    with running(tmp_path, **OPTIONS) as engine:
        info = engine.info
        assert (info.image_token_id, info.image_side) == (IMAGE, kind.side)
        assert info.max_image_tokens == (70 if kind.sees_whole else 0)
        found = serve(engine, kind.requests())
    for number, one in enumerate(kind.prompts()):
        answer = found[f"r{number}", 0]
        logits = kind.by_transformers(model, one, answer.token_ids)
        assert logits.argmax(-1).tolist() == answer.token_ids, number
        expected = torch.log_softmax(logits, -1)
        logprobs = torch.tensor([step.logprob for step in answer.logprobs])
        chosen = expected.gather(1, torch.tensor(answer.token_ids).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(logprobs, chosen, atol=2e-3, rtol=0)
    # The picture matters, not only its size.
    assert found["r0", 0].logprobs != found["r4", 0].logprobs


@exact
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_however_they_are_served(kind: Kind, tmp_path: Path) -> None:
    kind.write(tmp_path)
    alone: Answers = {}
    for one in kind.requests():
        with running(tmp_path, **OPTIONS, enable_prefix_caching=False) as engine:
            alone |= serve(engine, [one])
    least = 70 if kind.sees_whole else 16
    for options in (
        {"max_num_batched_tokens": least, "max_steps_in_flight": 2},
        {"max_num_seqs": 2, "num_kv_blocks": 24},
        {"num_threads": 2},
    ):
        with running(tmp_path, **{**OPTIONS, **options}) as engine:
            assert_same(serve(engine, kind.requests(), arrivals=[0, 1, 1, 3, 6]), alone)
            # Prompts and their images are found again.
            assert_same(serve(engine, kind.requests()), alone)
            assert options.get("num_kv_blocks") or engine.stats().prefix_cache_hits > 60


def test_two_ranks_see_the_same(tmp_path: Path) -> None:
    kind = KINDS[0]
    kind.write(tmp_path)
    with running(tmp_path, **OPTIONS) as engine:
        expected = serve(engine, kind.requests())
    with running(tmp_path, **OPTIONS, tensor_parallel_size=2) as engine:
        found = serve(engine, kind.requests())
    for key, answer in expected.items():
        assert found[key].token_ids == answer.token_ids


def test_tokens_of_images_have_the_inputs_of_layers_that_the_file_names(tmp_path: Path) -> None:
    """Else the number of the row would not matter in the comparison with transformers."""
    kind = KINDS[0]
    kind.write(tmp_path)
    assert VARIANTS[kind.name].all_entries()["text_config"]["pad_token_id"] != 0
    answers = []
    for row in (3, 7):
        config = json.loads((tmp_path / "config.json").read_text())
        config["text_config"]["pad_token_id"] = row
        (tmp_path / "config.json").write_text(json.dumps(config))
        with running(tmp_path, **OPTIONS) as engine:
            answers.append(serve(engine, kind.requests()[:1]))
    assert answers[0]["r0", 0].logprobs != answers[1]["r0", 0].logprobs
