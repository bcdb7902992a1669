"""All encoders of images are precise in bfloat16, and their ranks share the heads."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewick.errors import ConfigError
from pagewick.models.registry import read_config
from pagewick.models.vision.pixels import PatchReader, PixelSettings
from tests.layers.ranks import single_context
from tests.models import (
    plain_images,
    test_clip_vision,
    test_cohere_vision,
    test_gemma4_vision,
    test_idefics3_vision,
    test_intern_vision,
    test_kimi_vision,
    test_lfm3_vision,
    test_llama4_vision,
    test_merging_siglip,
    test_paddle_vision,
    test_pixtral,
    test_siglip,
    test_vision,
)
from tests.models.checkpoints import write_checkpoint
from tests.models.encoders_on_ranks import encoded_on_ranks
from tests.models.test_vision import Pixels, build, compare, image_of


@dataclass(frozen=True)
class Encoder:
    """variant: of VARIANTS. by_transformers: returns the rows of an image. images: in which the precision is measured.

    shared: what ranks encode, as exactly as `tolerance` says; None: they are not tested. guard: around transformers.
    """

    variant: str
    by_transformers: Callable[[Any, Tensor], Tensor]
    pixels: PixelSettings
    images: Sequence[Tensor]
    shared: Tensor | None
    tolerance: float = 2e-4
    guard: Callable[[], AbstractContextManager[None]] = nullcontext

    def of(self, directory: Path, dtype: torch.dtype = torch.float32) -> PatchReader:
        model = build(directory, replace(single_context(), dtype=dtype))
        assert model.visual is not None
        model.visual.use_pixels(self.pixels)
        return model.visual


def turned(side: int, number: int) -> list[Tensor]:
    """Images for a model that reads one size only."""
    return [image_of(side, side).roll(turn, 0) for turn in range(number)]


def of_qwen(variant: str, *, is_shared: bool = True) -> Encoder:
    """And of GLM."""
    images = [image_of(*size) for size in test_vision.SIZES]

    def rows(reference: Any, image: Tensor) -> Tensor:
        return test_vision.by_transformers(reference, image).rows

    return Encoder(variant, rows, test_vision.PIXELS, images, image_of(40, 72) if is_shared else None, 3e-5)


def of_mistral(variant: str, *, is_shared: bool = False) -> Encoder:
    images = [test_pixtral.image_for(variant, *size) for size in test_pixtral.SIZES]
    shared = test_pixtral.image_for(variant, 3, 7) if is_shared else None
    pixels = test_pixtral.pixels_of(test_pixtral.MERGED[variant])
    return Encoder(variant, test_pixtral.by_transformers, pixels, images, shared, guard=test_pixtral.without_onednn)


def of_gemma_4(variant: str) -> Encoder:
    images = [test_gemma4_vision.image_for(variant, *size) for size in test_gemma4_vision.SIZES]
    pixels = test_gemma4_vision.Pixels(test_gemma4_vision.MERGED[variant])
    shared = test_gemma4_vision.image_for(variant, 3, 7)
    return Encoder(variant, test_gemma4_vision.by_transformers, pixels, images, shared, 1e-3)


def of_internvl(variant: str) -> Encoder:
    side, pixels = test_intern_vision.SIZES[variant][1], test_intern_vision.pixels_of(variant)
    return Encoder(variant, test_intern_vision.by_transformers, pixels, turned(side, 16), image_of(side, side))


def whole_by_transformers(pixels: Pixels) -> Callable[[Any, Tensor], Tensor]:
    return lambda reference, image: plain_images.by_transformers(reference, image, pixels)


def of_lfm_3(variant: str) -> Encoder:
    pixels = test_lfm3_vision.SETTINGS[variant]

    def rows(reference: Any, image: Tensor) -> Tensor:
        return test_lfm3_vision.by_transformers(reference, image, pixels)

    (shared,) = test_lfm3_vision.images_for(pixels, ((3, 7),))
    return Encoder(variant, rows, pixels, test_lfm3_vision.images_for(pixels), shared)


ENCODERS = {
    encoder.variant: encoder
    for encoder in (
        *(of_qwen(name, is_shared=False) for name in ("qwen2-vl", "qwen3.5-multimodal")),
        *map(of_qwen, ("qwen2.5-vl-window", "qwen3-vl", "exaone-4.5", "glm-4.1v", "glm-ocr")),
        *map(of_mistral, ("mistral-small-3.1", "pixtral-12b", "lighton-ocr")),
        of_mistral("ministral-3-multimodal", is_shared=True),
        *map(of_gemma_4, test_gemma4_vision.NAMES),
        *map(of_internvl, test_intern_vision.SIZES),
        *map(of_lfm_3, test_lfm3_vision.SETTINGS),
        Encoder(
            test_kimi_vision.NAME, test_kimi_vision.by_transformers, test_kimi_vision.PIXELS,
            [image_of(*size) for size in test_vision.SIZES], image_of(40, 72),
        ),
        Encoder(
            test_clip_vision.NAME, test_clip_vision.by_transformers, test_clip_vision.PIXELS,
            turned(test_clip_vision.SEEN, 16), image_of(test_clip_vision.SEEN, test_clip_vision.SEEN), 1e-3,
        ),
        Encoder(
            test_paddle_vision.NAME, test_paddle_vision.by_transformers, test_paddle_vision.PIXELS,
            [image_of(*size) for size in test_vision.SIZES], image_of(40, 72),
        ),
        Encoder(
            test_llama4_vision.NAME, test_llama4_vision.by_transformers, test_llama4_vision.PIXELS,
            turned(test_llama4_vision.SIDE, 16), image_of(test_llama4_vision.SIDE, test_llama4_vision.SIDE),
        ),
        Encoder(
            test_siglip.NAME, whole_by_transformers(test_siglip.PIXELS), test_siglip.PIXELS,
            turned(test_siglip.SIDE, 4), image_of(test_siglip.SIDE, test_siglip.SIDE),
        ),
        Encoder(
            "smolvlm", test_idefics3_vision.by_transformers, test_idefics3_vision.pixels_of("smolvlm"),
            turned(24, 16), image_of(24, 24),
        ),
        # Ranks share both halves of its projector, too.
        Encoder(
            test_cohere_vision.NAME, whole_by_transformers(test_cohere_vision.PIXELS), test_cohere_vision.PIXELS,
            turned(24, 16), image_of(24, 24),
        ),
        Encoder(
            "lfm2-vl", test_merging_siglip.by_transformers, Pixels(temporal_patch_size=1),
            [image_of(8 * rows, 8 * columns) for rows, columns in test_merging_siglip.SIZES], image_of(24, 40),
        ),
    )
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in ENCODERS if name != "lfm3-vl-wide"])
@torch.inference_mode()
def test_it_is_as_near_in_bfloat16_as_transformers(name: str, tmp_path: Path) -> None:
    family = ENCODERS[name]
    reference = write_checkpoint(name, tmp_path).bfloat16()
    encoder = family.of(tmp_path, torch.bfloat16)
    with family.guard():
        theirs = torch.cat([family.by_transformers(reference, image) for image in family.images])
        exact = torch.cat([family.by_transformers(reference.float(), image) for image in family.images])
    ours = torch.cat([encoder(image).rows for image in family.images])
    assert ours.dtype == torch.bfloat16
    our_error, their_error = ((rows.float() - exact).abs().mean().item() for rows in (ours, theirs))
    assert 1e-3 < our_error < 1.1 * their_error


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", [name for name, family in ENCODERS.items() if family.shared is not None])
@torch.inference_mode()
def test_ranks_share_the_heads(name: str, num_ranks: int, tmp_path: Path) -> None:
    """Six heads on four ranks are two, two, one and one."""
    family = ENCODERS[name]
    write_checkpoint(name, tmp_path)
    assert family.shared is not None
    expected = family.of(tmp_path)(family.shared)
    for found in encoded_on_ranks(tmp_path, num_ranks, family.shared, family.pixels):
        compare(found, expected, family.tolerance)


@pytest.mark.parametrize("name", ENCODERS)
def test_there_must_be_a_head_for_each_rank(name: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path)
    vision = read_config(json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))).vision
    assert vision is not None
    vision.check_ranks(6)
    with pytest.raises(ConfigError, match="7 is more than the vision encoder's 6 attention heads"):
        vision.check_ranks(7)
