"""Image processors of transformers that need torchvision, with Pillow in its place.

Pillow's and torchvision's filters differ by the rounding of their weights, so that pixels may differ by 1 of 255.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import image_processing_backends as backends
from transformers.image_utils import SizeDict

_NAMES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional")


class _WithPillow(backends.TorchvisionBackend):  # type: ignore[misc]
    def resize(self, image: torch.Tensor, size: Any, resample: Any = None, **others: Any) -> torch.Tensor:
        """Resize images [N, 3, height, width] uint8."""
        images = [Image.fromarray(one.permute(1, 2, 0).numpy()) for one in image]
        found = [np.asarray(one.resize((size.width, size.height), Image.Resampling(resample))) for one in images]
        return torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2)

    def pad(self, images: torch.Tensor, pad_size: Any = None, **others: Any) -> torch.Tensor:
        """Fill up images [N, 3, height, width] with zeros, right and below."""
        height, width = images.shape[-2:]
        return torch.nn.functional.pad(images, (0, pad_size.width - width, 0, pad_size.height - height))

    def normalize(self, image: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, **others: Any) -> torch.Tensor:
        mean, std = (torch.as_tensor(numbers, dtype=image.dtype).view(3, 1, 1) for numbers in (mean, std))
        return (image - mean) / std


@contextmanager
def _without_torchvision() -> Iterator[None]:
    """Let modules import the names of torchvision that stand in annotations."""
    before = {name: sys.modules.get(name) for name in _NAMES}
    modules = {name: ModuleType(name) for name in _NAMES}
    for name in _NAMES[1:]:
        outer, _, inner = name.rpartition(".")
        setattr(modules[outer], inner, modules[name])
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def lfm2_vl_processor(**entries: Any) -> Any:
    """Return Lfm2VlImageProcessor with these entries of preprocessor_config.json."""
    with _without_torchvision():
        from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor

    class Processor(Lfm2VlImageProcessor, _WithPillow):  # type: ignore[misc]
        pass

    return Processor(**entries)


def cohere2_vision_processor(**entries: Any) -> Any:
    """Return Cohere2VisionImageProcessor with these entries of preprocessor_config.json."""
    with _without_torchvision():
        from transformers.models.cohere2_vision.image_processing_cohere2_vision import Cohere2VisionImageProcessor

    class Processor(Cohere2VisionImageProcessor, _WithPillow):  # type: ignore[misc]
        pass

    return Processor(**entries)


def optimal_tiled_canvas(*arguments: Any) -> tuple[int, int]:
    """The columns and rows of tiles that Cohere2VisionImageProcessor finds."""
    with _without_torchvision():
        from transformers.models.cohere2_vision.image_processing_cohere2_vision import get_optimal_tiled_canvas

    columns, rows = get_optimal_tiled_canvas(*arguments)
    return int(columns), int(rows)


def kimi_k25_processor(**entries: Any) -> Any:
    """Return Kimi_K25ImageProcessor with these entries of preprocessor_config.json."""
    with _without_torchvision():
        from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor

    class Processor(Kimi_K25ImageProcessor, _WithPillow):  # type: ignore[misc]
        pass

    return Processor(**entries)


def navit_resize(*arguments: Any) -> Any:
    """The heights and widths that Kimi_K25ImageProcessor finds: of the resized image, and of the filled-up one."""
    with _without_torchvision():
        from transformers.models.kimi_k25.image_processing_kimi_k25 import navit_resize

    return navit_resize(*arguments)


def _llama4_module() -> Any:
    with _without_torchvision():
        return importlib.import_module("transformers.models.llama4.image_processing_llama4")


def _filled_up(images: torch.Tensor, *, padding: list[int], fill: list[int]) -> torch.Tensor:
    """In place of torchvision's pad: lengths left, above, right and below, in black."""
    left, above, right, below = padding
    assert not any(fill)
    return torch.nn.functional.pad(images, (left, right, above, below))


def llama4_processor(**entries: Any) -> Any:
    """Return Llama4ImageProcessor with these entries of preprocessor_config.json."""
    module = _llama4_module()
    module.tvF = SimpleNamespace(pad=_filled_up)

    class Processor(module.Llama4ImageProcessor, _WithPillow):  # type: ignore[misc]
        pass

    return Processor(**entries)


def llama4_sizes(height: int, width: int, side: int, most: int, fills_canvas: bool) -> Any:
    """The canvas that Llama4ImageProcessor finds, and the size of the image in it, as its _preprocess does."""
    module = _llama4_module()
    canvases = torch.tensor(module.find_supported_resolutions(most, SizeDict(height=side, width=side)))
    canvas = module.get_best_fit((height, width), canvases, resize_to_max_canvas=fills_canvas)
    target = canvas
    if not fills_canvas:
        target = min(max(height, side), canvas[0]), min(max(width, side), canvas[1])
    found = module.get_max_res_without_distortion((height, width), target)
    return tuple(canvas.tolist()), tuple(max(int(length), 1) for length in found)
