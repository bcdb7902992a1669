"""Encoders of images whose rows are merged patches, as data: SigLIP, InternViT and others. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from pagewick.models.vision.config import VisionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MergingConfig(VisionConfig):
    """Encoders whose rows are merge_size x merge_size patches side by side, projected.

    projector_eps: of the projector's layer norm; None: there is none. is_norm_merged: merged patches are normalised
    together, else each patch alone. projector_size: width within the MLP behind that; None: one product without a bias
    is in its place. projector_activation, projector_bias: of the MLP. is_projector_gated: it is activation(gate) * x,
    and the file has both in one tensor, the gate behind.
    """

    projector_eps: float | None = None
    is_norm_merged: bool = True
    projector_size: int | None = None
    projector_activation: str = "gelu"
    projector_bias: bool = False
    is_projector_gated: bool = False

    @property
    def projector_numbers(self) -> int:
        return self.merged_size + (3 if self.is_projector_gated else 2) * (self.projector_size or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergingSiglipConfig(MergingConfig):
    """SigLIP encoders, whose patches are merged.

    LFM2-VL (SigLIP 2, arXiv:2502.14786), Idefics3 and SmolVLM (arXiv:2408.12637, arXiv:2504.05299), and Command A
    Vision have it. is_stretched: the square of learned positions is stretched over an image of any shape; else all
    images have one size, and each patch has its position. is_rounded: positions are found as in Idefics3, see
    RoundingSiglipEncoder.
    """

    is_stretched: bool
    is_rounded: bool = False

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """Colours, rows, columns; in encoders for any shape all numbers: rows, in them columns, in them colours."""
        return (3 * self.patch_size**2,) if self.is_stretched else (3, self.patch_size, self.patch_size)

    @property
    def fixed_pixels(self) -> int | None:
        assert self.positions_per_side is not None, "patches have learned positions"
        return None if self.is_stretched else (self.positions_per_side * self.patch_size) ** 2

    @property
    def most_pixels(self) -> int:
        """Published processors make pictures of at most 256 tokens."""
        return 256 * self.side**2


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasMarks:
    """The tokens before and behind an image and a slice of it, and behind a row of slices."""

    image_start: int
    image_end: int
    slice_start: int
    slice_end: int
    row_end: int

    @property
    def all(self) -> frozenset[int]:
        return frozenset((self.image_start, self.image_end, self.slice_start, self.slice_end, self.row_end))


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniCPMVisionConfig(MergingConfig):
    """The encoder of MiniCPM-V 4.6 and 4.7 (SigLIP 2, arXiv:2509.18154), for images of any shape.

    Each patch has the learned position that is nearest to its place. Squares of 2 x 2 patches become one: behind a
    block, and again in the projector.
    window_block: the block behind which they do, after attention within each square; None: only the projector does so.
    canvas: the tokens that have positions on the canvas of an image (MiniCPM-V 4.7).
    """

    window_block: int | None
    canvas: CanvasMarks | None = None

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """Colours, rows, columns."""
        return 3, self.patch_size, self.patch_size

    @property
    def merged_size(self) -> int:
        return 4 * self.hidden_size

    @property
    def most_pixels(self) -> int:
        """Published processors make pictures of about 448 x 448 pixels, fewer than this however narrow they are.

        The narrowest have 116 tokens, or 342 where a token has fewer patches.
        """
        return (120 if self.merge_size == 4 else 350) * self.side**2


@dataclass(frozen=True, slots=True, kw_only=True)
class InternVisionConfig(MergingConfig):
    """The encoder of InternVL (InternViT, arXiv:2312.14238), for images of one size.

    One learned row, which no patch makes, goes through the blocks with the patches, and is then left out. Each has a
    learned position. Outputs of attention and MLPs are multiplied by vectors of the file.
    has_qkv_bias: of queries, keys and values. is_qk_normed: queries and keys are normalised over all heads together.
    has_norm: a layer norm follows the last block.
    """

    has_qkv_bias: bool
    is_qk_normed: bool
    has_norm: bool

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """Colours, rows, columns."""
        return 3, self.patch_size, self.patch_size

    @property
    def fixed_pixels(self) -> int | None:
        assert self.positions_per_side is not None, "each patch has a learned position"
        return (self.positions_per_side * self.patch_size) ** 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm3VisionConfig(MergingConfig):
    """The encoder of LFM3-VL, for images of any shape.

    RMS norms, gated MLPs, and no biases or learned positions. Most blocks have a convolution over the rows and columns
    of patches, with gates, in place of attention.
    num_kv_heads: heads of keys and values, each of which serves several heads of queries. attention_blocks: those with
    attention. conv_size: patches along a side of the square that a convolution sees, an odd number.
    """

    num_kv_heads: int
    attention_blocks: tuple[int, ...]
    conv_size: int

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """All numbers of a patch: its colours, in them pictures, rows and columns."""
        return (3 * self.temporal_patch_size * self.patch_size**2,)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoonVisionConfig(MergingConfig):
    """The encoder of Kimi K2.5 and K2.6 (MoonViT, arXiv:2504.07491, section 2.1), for images of any shape.

    Layer norms and plain MLPs. A square of learned positions is stretched over the image by a bicubic filter. The pairs
    of a head are neighbours; they belong to a patch's column and to its row in turn. A layer norm follows the last
    block.
    """

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """Colours, rows, columns."""
        return 3, self.patch_size, self.patch_size

    @property
    def most_pixels(self) -> int:
        """Published processors make pictures of at most 4,464 tokens, with what fills them up."""
        return 4464 * self.side**2


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipVisionConfig(MergingConfig):
    """The encoders of LLaVA's models (CLIP, arXiv:2103.00020; SigLIP, arXiv:2303.15343), for images of one size.

    Layer norms and plain MLPs. Each patch has a learned position, and no norm follows the blocks.
    has_first: one learned row, which no patch makes, goes through the blocks ahead of the patches and is then left out;
    a norm is ahead of the blocks (CLIP). features: the numbers of blocks behind which rows are read, from 0, ahead of
    all; what several of them return stands side by side. image_size: pixels of an image's side, of which only whole
    patches are seen. largest_canvas: pixels of the largest picture that is read in tiles, whose tokens stand in common
    rows, with a learned row behind each (LLaVA-NeXT); None: no picture is read so. shrinks_beyond: see most_tiles
    (LLaVA-OneVision).
    """

    has_first: bool
    features: tuple[int, ...]
    image_size: int
    largest_canvas: int | None = None
    shrinks_beyond: int | None = None

    @property
    def tile_side(self) -> int | None:
        return None if self.largest_canvas is None else self.image_size

    @property
    def most_tiles(self) -> int | None:
        return self.shrinks_beyond

    @property
    def most_pixels(self) -> int:
        return self.largest_canvas or self.image_size**2

    @property
    def pixels_per_token(self) -> int:
        """All of them where patches at edges have no tokens."""
        return self.largest_canvas or self.side**2

    @property
    def num_firsts(self) -> int:
        """The number of rows that no patch makes."""
        return 1 if self.has_first else 0

    @property
    def merged_size(self) -> int:
        return self.hidden_size * self.merge_size**2 * len(self.features)

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """Colours, rows, columns."""
        return 3, self.patch_size, self.patch_size

    @property
    def fixed_pixels(self) -> int | None:
        assert self.positions_per_side is not None, "each patch has a learned position"
        if self.largest_canvas is not None:
            return None
        return (self.positions_per_side * self.patch_size) ** 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddleVisionConfig(MergingConfig):
    """The encoder of PaddleOCR-VL (arXiv:2510.14528), for images of any shape: SigLIP's, whose heads also turn.

    A square of learned positions is stretched over the image by a bilinear filter. The first half of the pairs of a
    head turns by a patch's row, the second by its column.
    """

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """Colours, rows, columns."""
        return 3, self.patch_size, self.patch_size

    @property
    def most_pixels(self) -> int:
        """Published processors make pictures of at most 3,600 tokens."""
        return 3600 * self.side**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4VisionConfig(MergingConfig):
    """The encoder of Llama 4, for images of one size.

    Layer norms and plain MLPs. One learned row, which no patch makes, goes through the blocks behind the patches, and
    is then left out. Each has a learned position, and a norm follows. The pairs of a head are neighbours; the first
    half turns by a patch's column, the second by its row, both counted from 1, and the learned row does not turn.
    projector_size: of both products of the MLP behind merged patches, each with an activation; another product follows.
    """

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """All numbers of a patch: its colours, in them rows and columns."""
        return (3 * self.patch_size**2,)

    @property
    def fixed_pixels(self) -> int | None:
        assert self.positions_per_side is not None, "each patch has a learned position"
        return (self.positions_per_side * self.patch_size) ** 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CropVisionConfig(MergingConfig):
    """The encoder of Moondream 2, for images of any shape: SigLIP's blocks (arXiv:2303.15343) over squares of one size.

    A picture has the whole image at the left of its upper edge, as a square, and the image in crops below it. Crops
    overlap by 2 * margin patches; of what two crops show, each keeps the half nearer to it. The rows of all crops are
    averaged to as many as the whole has, and both stand side by side in the projector.
    max_crops: the most crops of an image, without the whole.
    """

    margin: int
    max_crops: int

    @property
    def crop_side(self) -> int:
        """Pixels of the side of a crop, and of the whole."""
        assert self.positions_per_side is not None, "each patch has a learned position"
        return self.positions_per_side * self.patch_size

    @property
    def stride(self) -> int:
        """Pixels from the edge of a crop to that of the next one."""
        return self.crop_side - 2 * self.margin * self.patch_size

    @property
    def merged_size(self) -> int:
        return 2 * self.hidden_size

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """All numbers of a patch: its colours, in them rows and columns."""
        return (3 * self.patch_size**2,)

    @property
    def fixed_tokens(self) -> int:
        assert self.positions_per_side is not None, "each patch has a learned position"
        return self.positions_per_side**2

    @property
    def num_leading(self) -> int:
        return 1

    @property
    def picture_sizes(self) -> tuple[tuple[int, int], ...]:
        seams = self.crop_side - self.stride
        return tuple(
            (self.crop_side + rows * self.stride + seams, columns * self.stride + seams)
            for rows in range(1, self.max_crops + 1)
            for columns in range(1, self.max_crops // rows + 1)
        )

    @property
    def most_pixels(self) -> int:
        return max(height * width for height, width in self.picture_sizes)

    @property
    def pixels_per_token(self) -> int:
        """All of them, since the number of tokens is fixed."""
        return self.most_pixels
