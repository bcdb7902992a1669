"""VisionFamily: what the vision parts of one kind in GGUF files mean. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

LINEAR: Final = ".linear"
"""The end of the names of weights whose products have limits; the limits stand beside it."""


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """The meaning of the vision parts of one kind, which the key projector_type names.

    models: general.architecture of the text part -> the architecture in config.json. is_shared: models that only read
    text have these, too. text_types: the architecture of the text part by itself -> its model_type, in families that
    have several.
    whole, block: names of tensors.
    activation: of the blocks, and the keys clip.use_* that say so. limits: pixels of an image, the least and the most,
    in the files that the authors publish; (0, 0) where these do not decide. eps: that of the norms, and others that
    files may have in its place. is_gated: MLPs have gates. is_interleaved: the sections of the rotation are.
    has_frames: a patch has a weight for each of two pictures.
    prefix: of all names in the checkpoint. blocks: the name of the list of blocks. offset_norms: norms in the file to
    whose weights 1 was added. output: the tensor whose last dimension is the width of the rows; None: a key has it.
    bare: tensors, by their names in the file or within a block, whose names in the checkpoint have no ending.
    is_permuted: the rows of queries and keys are stored with the two halves of each head interleaved.
    colours_last: the patches, where the checkpoint has the colours of each pixel side by side. has_patch_bias: they may
    have a bias. others: a regular expression of tensors that no image needs, such as those of a part that hears.
    placeholder: the token that stands for an image. stand_in: a regular expression of control tokens of which the last
    one does it in files whose vocabulary ends before that token; the model never sees which token it is.
    """

    models: Mapping[str, str]
    whole: Mapping[str, str]
    block: Mapping[str, str]
    activation: str
    uses: frozenset[str]
    limits: tuple[int, int] = (0, 0)
    eps: tuple[float, ...] = (1e-6,)
    is_shared: bool = False
    text_types: Mapping[str, str] = field(default_factory=dict)
    is_gated: bool = False
    is_interleaved: bool = False
    has_frames: bool = True
    prefix: str = "visual."
    blocks: str = "blocks"
    offset_norms: frozenset[str] = frozenset()
    output: str | None = None
    bare: frozenset[str] = frozenset()
    is_permuted: bool = False
    colours_last: str | None = None
    has_patch_bias: bool = True
    others: str = ""
    placeholder: str = "<|image_pad|>"
    stand_in: str | None = None
