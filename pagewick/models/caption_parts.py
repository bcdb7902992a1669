"""The parts of models that write captions of images, as data, and their tensors. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pagewick.models.state_tensors import Named
from pagewick.models.tensor_sizes import Size, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageAttentionConfig:
    """Attention to the image ahead of the text, with as many heads of the same size as the layer's attention.

    num_tokens: those of an image, all of which come first. num_rows: the first ones of these, which are seen. row_size:
    width of the rows that the encoder makes of an image, from which its keys and values are made. All projections have
    biases.
    """

    num_tokens: int
    num_rows: int
    row_size: int


def image_attention_tensors(config: ImageAttentionConfig, hidden: Size, heads: Size) -> Iterator[Named]:
    """Yield the name behind the layer's, the role and the sizes of each tensor. heads: of queries, with their sizes."""
    rows = whole(config.row_size)
    for name, inputs in (("q_proj", hidden), ("k_proj", rows), ("v_proj", rows)):
        yield f"image_attn.{name}.weight", "attention", (heads, inputs)
        yield f"image_attn.{name}.bias", "attention", (heads,)
    yield "image_attn.o_proj.weight", "attention", (hidden, heads)
    yield "image_attn.o_proj.bias", "attention", (hidden,)


def head_transform_tensors(hidden: Size, vocabulary: Size) -> Iterator[Named]:
    """Yield the same of the layer ahead of a tied head, and of the head's bias."""
    yield "head_transform.dense.weight", "mlp", (hidden, hidden)
    yield "head_transform.dense.bias", "mlp", (hidden,)
    yield "head_transform.norm.weight", "norm", (hidden,)
    yield "head_transform.norm.bias", "norm", (hidden,)
    yield "model.embed_tokens.bias", "head", (vocabulary,)
