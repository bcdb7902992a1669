"""PatchReader: the patches of an image as numbers, and their rotation, which all vision encoders have in common."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pagewick.errors import ModelLoadError
from pagewick.layers.context import LayerContext
from pagewick.layers.patches import Rotation, rotary_angles
from pagewick.models.vision.config import VisionConfig
from pagewick.models.vision.positions import PatchOrder


class PixelSettings(Protocol):
    """How pixels become numbers: (pixel * rescale_factor - mean) / std for each colour, from 0 .. 255."""

    @property
    def patch_size(self) -> int: ...

    @property
    def merge_size(self) -> int: ...

    @property
    def temporal_patch_size(self) -> int: ...

    @property
    def mean(self) -> tuple[float, float, float]: ...

    @property
    def std(self) -> tuple[float, float, float]: ...

    @property
    def rescale_factor(self) -> float: ...


class EncodedImage(NamedTuple):
    """An image as the decoder takes it, in the model's dtype.

    rows: [N, out_hidden_size], the inputs of the first layer for the placeholder tokens of the image. deepstack:
    [blocks, N, out_hidden_size], what is added to these tokens' hidden states after the first layer, the second one and
    so on.
    """

    rows: Tensor
    deepstack: Tensor


class PatchReader(nn.Module):
    """The base of encoders of one image at a time.

    blocks: those that make most of the work; a derived class sets them. merge_entry: what config.json calls merge_size.
    pixel_dtype: that in which red, green and blue are normalised.

    Raises ConfigError if there are more ranks than heads.
    """

    blocks: nn.ModuleList
    merge_entry = "vision_config.spatial_merge_size"
    pixel_dtype = torch.float32

    def __init__(self, context: LayerContext, config: VisionConfig) -> None:
        super().__init__()
        config.check_ranks(context.tp_size)
        self.config = config
        self._dtype, self._device = context.dtype, context.device
        self._pixels: tuple[float, Tensor, Tensor] | None = None

    def use_pixels(self, settings: PixelSettings) -> None:
        """Read images as `settings` says. Raises ModelLoadError if the files of the model disagree."""
        for name in ("patch_size", "merge_size", "temporal_patch_size"):
            if (found := getattr(settings, name)) != (expected := getattr(self.config, name)):
                entry = self.merge_entry if name == "merge_size" else f"vision_config.{name}"
                raise ModelLoadError(
                    f"preprocessor_config.json: {name} is {found}, and config.json says {expected} ({entry})\n"
                    "  these files do not belong together; download or copy both again"
                )
        mean, std = (
            torch.tensor(numbers, dtype=self.pixel_dtype, device=self._device)
            for numbers in (settings.mean, settings.std)
        )
        self._pixels = settings.rescale_factor, mean, std

    def num_tokens(self, height: int, width: int) -> int:
        """Return N for an image of height x width pixels. Raises ValueError if its patches cannot be merged."""
        side, step = self.config.side, self.config.step
        if height < side or width < side or height % step or width % step:
            raise ValueError(f"an image of {height} x {width} pixels, whose sides must be multiples of {step}")
        return height // side * (width // side)

    def _patches(self, pixels: Tensor, place: Tensor) -> Tensor:
        """Return the patches at `place` [T], counted row by row: [T, numbers of a patch] in the model's dtype."""
        assert self._pixels is not None, "use_pixels comes first"
        factor, mean, std = self._pixels
        height, width, colours = pixels.shape
        num_pictures, size = self.config.temporal_patch_size, self.config.patch_size
        squares = pixels.view(height // size, size, width // size, size, colours).permute(0, 2, 4, 1, 3).flatten(0, 1)
        shape = (1, colours, 1, 1)
        normed = (squares[place].to(self.pixel_dtype) * factor - mean.view(shape)) / std.view(shape)
        patches = normed.to(self._dtype).unsqueeze(2).expand(-1, -1, num_pictures, -1, -1)
        return patches.flatten(1)

    def _with_colours_last(self, patches: Tensor) -> Tensor:
        """Return patches [T, numbers of a patch] of one picture with the colours of each pixel side by side."""
        side = self.config.patch_size
        return patches.view(-1, 3, side, side).permute(0, 2, 3, 1).flatten(1)

    def _rotation(self, order: PatchOrder, of_rows: Tensor, of_columns: Tensor) -> Rotation:
        """Return the rotation of heads: half of the pairs by a patch's row, half by its column.

        of_rows, of_columns: [P], the angle of each pair for a step of one row or column.
        """
        by_row = rotary_angles(self._to_device(order.rows), of_rows)
        by_column = rotary_angles(self._to_device(order.columns), of_columns)
        cos, sin = (torch.cat(parts, dim=-1) for parts in zip(by_row, by_column, strict=True))
        return Rotation(cos, sin)

    def _to_device(self, numbers: object) -> Tensor:
        return torch.as_tensor(numbers, dtype=torch.int64).to(self._device)


def stretched(grid: Tensor, order: PatchOrder, rows: int, columns: int) -> Tensor:
    """Return learned positions, stretched over the rows x columns patches of an image by a bicubic filter.

    grid: [side, side, size]. Returns [T, size], computed in float32 and rounded to the positions' dtype.
    """
    device, dtype = grid.device, grid.dtype
    image = grid.permute(2, 0, 1).unsqueeze(0).to(torch.float32)
    # The middle of a patch, from -1 at the left or upper edge of the image to 1 at the other one.
    across = (torch.from_numpy(order.columns).to(device) + 0.5) / float(columns) * 2 - 1
    down = (torch.from_numpy(order.rows).to(device) + 0.5) / float(rows) * 2 - 1
    places = torch.stack((across, down), dim=-1).view(1, -1, 1, 2)
    found = nn.functional.grid_sample(image, places, mode="bicubic", padding_mode="border", align_corners=False)
    return found[0, :, :, 0].t().to(dtype)
