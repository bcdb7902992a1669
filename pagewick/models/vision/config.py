"""VisionConfig: a vision encoder as data. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from pagewick.errors import ConfigError
from pagewick.models.vision.caption_tokens import image_tokens
from pagewick.models.vision.tensor_names import TENSORS


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """A vision transformer over the patches of one image (arXiv:2010.11929), as Qwen's models have it.

    image_token_id: the token in the prompt that stands for one row of the encoder's output.
    hidden_size: width of a patch. out_hidden_size: that of the decoder. patch_size: pixels of a patch's side.
    temporal_patch_size: pictures in a patch; an image is repeated. merge_size: patches along a side of the square that
    becomes one row of the output.
    is_gated: the MLPs of blocks are activation(gate(x)) * up(x). is_rms: norms are RMS norms, else layer norms with a
    bias. patch_bias: whether the product with a patch has a bias. num_kv_heads: heads of keys and values, each of which
    serves several heads of queries; None: every head has its own. rope_theta: base of the rotation by a patch's row
    (first half of the pairs) and column (second half).
    positions_per_side: side of the square of learned positions, which is stretched over the image; None: there are
    none. window: rows of the output along a side of the windows in which patches see each other; None: all patches of
    the image do. full_blocks: blocks without windows.
    deepstack_blocks: blocks whose output is also merged and added to the decoder's hidden states, after its first
    layer, its second one and so on (arXiv:2406.04334).
    names: the file's names of tensors, as in NameMap.parts. tensors: a regular expression of all that it may have.
    """

    image_token_id: int
    hidden_size: int
    out_hidden_size: int
    num_blocks: int
    num_heads: int
    intermediate_size: int
    activation: str
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    is_gated: bool = False
    is_rms: bool = False
    norm_eps: float = 1e-6
    patch_bias: bool = False
    num_kv_heads: int | None = None
    rope_theta: float = 10000.0
    positions_per_side: int | None = None
    window: int | None = None
    full_blocks: tuple[int, ...] = ()
    deepstack_blocks: tuple[int, ...] = ()
    names: tuple[tuple[str, str], ...] = ()
    tensors: str = TENSORS

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def side(self) -> int:
        """Pixels of the side of the square that becomes one row of the output."""
        return self.patch_size * self.merge_size

    @property
    def step(self) -> int:
        """Pixels of which the sides of an image are multiples, from `side` on."""
        return self.side

    @property
    def pixels_per_token(self) -> int:
        """The most pixels that an image has for each of its tokens."""
        return self.side**2

    @property
    def projector_numbers(self) -> int:
        """Numbers that the projector holds at once for each row of the output; 0 where blocks hold more."""
        return 0

    @property
    def merged_size(self) -> int:
        """Width of the patches that become one row of the output, side by side."""
        return self.hidden_size * self.merge_size**2

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """The numbers of a patch in the file's order: colours, pictures, rows, columns."""
        return 3, self.temporal_patch_size, self.patch_size, self.patch_size

    @property
    def has_row_breaks(self) -> bool:
        """Whether another token follows each row of an image's placeholder tokens."""
        return False

    @property
    def tile_side(self) -> int | None:
        """Pixels of the side of tiles, whose tokens stand in common rows; None: no picture is read so."""
        return None

    @property
    def most_tiles(self) -> int | None:
        """The rows and columns of pictures with more tokens than this number of tiles are shrunk; None: of none."""
        return None

    @property
    def fixed_tokens(self) -> int:
        """The number of tokens of every image, whatever its size; 0: a token for each square of pixels."""
        return 0

    @property
    def num_leading(self) -> int:
        """The number of tokens ahead of an image that see it, and each other, as its own tokens do."""
        return 0

    @property
    def picture_sizes(self) -> tuple[tuple[int, int], ...]:
        """The heights and widths that pictures may have; empty: all multiples of `step`."""
        return ()

    @property
    def most_pixels(self) -> int:
        """Pixels of the largest image before preprocessor_config.json is read: those of Qwen's models."""
        return 2**24

    @property
    def fixed_pixels(self) -> int | None:
        """The number of pixels that every image has; None if sizes differ."""
        return None

    @property
    def mlp_inputs(self) -> tuple[str, ...]:
        """Names of the projections of a block's MLP before the activation."""
        return ("gate_proj", "up_proj") if self.is_gated else ("linear_fc1",)

    def check_ranks(self, num_ranks: int) -> None:
        """Raise ConfigError unless each of `num_ranks` ranks gets a head.

        Their numbers may differ by one, as no rank stores keys or values of images: a decoder of 28 heads runs on 7
        ranks, whatever the number of heads that its encoder has.
        """
        if num_ranks > self.num_heads:
            raise ConfigError(
                f"--tensor-parallel-size {num_ranks} is more than the vision encoder's {self.num_heads} attention heads"
                "; use fewer ranks, or --language-model-only if no request has images"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralConfig(VisionConfig):
    """The encoder of Mistral's models (Pixtral, arXiv:2410.07073) and the projector behind it (Mistral Small 3.1).

    Gated MLPs, RMS norms, no learned positions, and no biases. The frequencies of the rotation belong to a patch's row
    and to its column in turn.
    projector_eps: of the norm before patches are merged; None: each patch becomes a row (Pixtral 12B).
    projector_activation, projector_bias: of the MLP behind that. has_row_tokens: another token follows each row of an
    image's placeholder tokens. takes_rest: the sides of images are multiples of patch_size; patches at the right and
    lower edges that fill no square are seen by the others, and make no row of the output (LightOnOCR). is_interleaved:
    pairs that turn together are (2i, 2i + 1), else (i, i + head_dim / 2).
    """

    projector_eps: float | None
    projector_activation: str = "gelu"
    projector_bias: bool = False
    has_row_tokens: bool = True
    takes_rest: bool = False
    is_interleaved: bool = False

    @property
    def step(self) -> int:
        return self.patch_size if self.takes_rest else self.side

    @property
    def pixels_per_token(self) -> int:
        """Those of an image with one token, where one row and one column of patches more would make four of them."""
        rest = (self.merge_size - 1) * self.patch_size if self.takes_rest else 0
        return (self.side + rest) ** 2

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """Colours, rows, columns."""
        return 3, self.patch_size, self.patch_size

    @property
    def has_row_breaks(self) -> bool:
        return self.has_row_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SiglipConfig(VisionConfig):
    """The encoder of Gemma 3 (SigLIP, arXiv:2303.15343; arXiv:2503.19786, section 2.1), for images of one size.

    Layer norms, plain MLPs, a learned position for each patch, and no rotation. The rows of the output are the means of
    merge_size x merge_size patches, normed and projected.
    """

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """Colours, rows, columns."""
        return 3, self.patch_size, self.patch_size

    @property
    def fixed_pixels(self) -> int | None:
        assert self.positions_per_side is not None, "each patch has a learned position"
        return (self.positions_per_side * self.patch_size) ** 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmVisionConfig(VisionConfig):
    """The encoder of GLM-4.1V, GLM-4.5V and GLM-4.6V (arXiv:2507.01006), and of GLM-OCR, for images of any shape.

    RMS norms and gated MLPs. If there are learned positions, patches are normalised before a square of these is
    stretched over the image by a bicubic filter. A product with each square of patches makes a row, and an MLP follows.
    has_qkv_bias: of queries, keys and values. has_bias: of the other products in blocks. is_qk_normed: queries and keys
    are normalised per head. merger_size: width within the last MLP.
    """

    has_qkv_bias: bool
    merger_size: int
    has_bias: bool = False
    is_qk_normed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4VisionConfig(VisionConfig):
    """The encoder of Gemma 4, for images of any shape.

    Gated MLPs, RMS norms before and after attention and MLP, no biases. Each patch has the sum of two learned
    positions, its column's and its row's. The first half of a head turns by the column, the second by the row. Queries,
    keys and values are normalised, and scores are not scaled. The rows of the output are the means of merge_size x
    merge_size patches times sqrt(hidden_size), normed and projected.
    num_positions: of each axis. is_clipped: inputs and outputs of the products in blocks are limited by numbers of the
    file. is_standardized: the means are (mean - bias) * scale, with vectors of the file.
    """

    num_positions: int
    is_clipped: bool = False
    is_standardized: bool = False

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """All numbers of a patch: its rows, in them its columns, in them the colours."""
        return (3 * self.patch_size**2,)

    @property
    def most_pixels(self) -> int:
        """The processor takes no more than 1,120 tokens."""
        return 1120 * self.side**2


@dataclass(frozen=True, slots=True, kw_only=True)
class BlipVisionConfig(VisionConfig):
    """The encoder of BLIP (arXiv:2201.12086), for images of one size.

    Layer norms and plain MLPs. One learned row, which no patch makes, goes through the blocks ahead of the patches.
    Each has a learned position, and a norm follows the last block. All rows are the output, and rows of zeros behind
    them fill up the tokens of an image.
    """

    @property
    def num_rows(self) -> int:
        """The number of rows of the output."""
        assert self.positions_per_side is not None, "each patch has a learned position"
        return self.positions_per_side**2 + 1

    @property
    def fixed_tokens(self) -> int:
        return image_tokens(self.num_rows)

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """Colours, rows, columns."""
        return 3, self.patch_size, self.patch_size

    @property
    def fixed_pixels(self) -> int | None:
        assert self.positions_per_side is not None, "each patch has a learned position"
        return (self.positions_per_side * self.patch_size) ** 2
