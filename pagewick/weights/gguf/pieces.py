"""Which rows of a GGUF file's tensors make up each tensor of the Hugging Face checkpoint. Imports no torch.

A piece is a range of rows: llama.cpp stacks experts into one tensor, and fuses projections that Hugging Face separates.
Rows are independent of each other in all of ggml's formats, so that a piece has the format of its tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.files import name_some
from pagewick.weights.gguf.architecture import CONVOLUTIONS, GgufArchitecture
from pagewick.weights.gguf.header import GgufTensor

# Tensors that are part of the config, or are computed.
_NOT_LOADED: Final = re.compile(
    r"(blk\.\d+\.)?rope_(freqs|factors_long|factors_short)\.weight|blk\.\d+\.attn_rot_embd\.weight"
)
_LAYER: Final = re.compile(r"blk\.(\d{1,6})\.", re.ASCII)
# Mixtral's first files have a tensor for each expert, with its number.
_NAME: Final = re.compile(
    r"(blk\.(?P<layer>\d+)\.)?(?P<stem>cls\.(output|norm)|shortconv\.(conv|in_proj|out_proj)"
    r"|indexer\.(attn_q_b|attn_k|k_norm|proj)|nextn\.[a-z_]+|[a-z0-9_]+)"
    r"(\.(?P<expert>\d+))?(\.(?P<leaf>weight|bias|scale))?",
    re.ASCII,
)
_KEYS_PART, _VALUES_PART = "attn_k_b", "attn_v_b"
# Copies of the model's embeddings and head, beside a layer that predicts further tokens.
_SPARE: Final = frozenset({"nextn.embed_tokens", "nextn.shared_head_head"})
# The decay of linear attention, stored as exp of the number, or as that below 0.
_DECAY: Final = "ssm_a"
# Files in NVFP4 may scale whole tensors. The scale of inputs is meant for activations in 4 bits, and is not used.
_SCALE, _INPUT_SCALE = ".scale", ".input_scale"


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the checkpoint: rows [start, start + num_rows) of a file's tensor; a number of a vector is a row.

    shape: outermost first. num_heads: in each of this number of heads the two halves of the rows are interleaved, and
    must be separated; 0: they are separate. offset: has to be subtracted from every number. decay_sign: the file has
    this times exp(x) for every number x; 0: it has x. key_heads: numbers of key heads and of the queries of each, if
    the file has all queries, all keys and all values, and the checkpoint those of one key head after the other. halved:
    the number of heads, and how many of the first rows of each are in two halves, which must be interleaved.
    """

    name: str
    shape: tuple[int, ...]
    tensor: GgufTensor
    start: int
    num_rows: int
    num_heads: int = 0
    offset: float = 0.0
    decay_sign: float = 0.0
    key_heads: tuple[int, int] | None = None
    halved: tuple[int, int] | None = None

    @property
    def row_size(self) -> int:
        """Numbers in a row of the file's tensor."""
        return self.tensor.shape[-1] if len(self.tensor.shape) > 1 else 1

    @property
    def stored_type(self) -> str:
        return self.tensor.format.name


@dataclass(frozen=True, slots=True)
class JoinedPiece:
    """kv_b_proj of latent attention, in float32. keys: [heads, latent, nope]; values: [heads, v_head_dim, latent].

    The keys' part is transposed, and so cannot stay in its format.
    """

    name: str
    keys: GgufTensor
    values: GgufTensor

    @property
    def shape(self) -> tuple[int, ...]:
        num_heads, latent_size, nope_size = self.keys.shape
        return num_heads * (nope_size + self.values.shape[1]), latent_size

    @property
    def stored_type(self) -> str:
        return "F32"


@dataclass(frozen=True, slots=True)
class GatheredPiece:
    """A tensor in float32 that a file has in parts, or in blocks that its layer cannot multiply with.

    tensors: the parts, one after the other along `axis`; part_shape: the shape of each in the checkpoint.
    colours_last: the one part is [width, colours, rows, columns], and the checkpoint has the colours of each pixel side
    by side: [width, rows * columns * colours]. num_heads: as in Piece.
    """

    name: str
    tensors: tuple[GgufTensor, ...]
    part_shape: tuple[int, ...]
    axis: int
    colours_last: bool = False
    num_heads: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        if self.colours_last:
            return self.part_shape[0], prod(self.part_shape[1:])
        size = len(self.tensors) * self.part_shape[self.axis]
        return (*self.part_shape[: self.axis], size, *self.part_shape[self.axis + 1 :])

    @property
    def stored_type(self) -> str:
        return "F32"


AnyPiece = Piece | JoinedPiece | GatheredPiece


def pieces_of(
    tensors: Sequence[GgufTensor], architecture: GgufArchitecture, config: Mapping[str, Any], where: str
) -> list[Piece | JoinedPiece]:
    """Return the tensors of the checkpoint that a file holds, in the order of their bytes.

    config: what hugging_face_config returned. Raises ModelLoadError for tensors that the architecture does not have.
    """
    maker = _Maker(architecture, config)
    by_name = {tensor.name: tensor for tensor in tensors}
    found: list[Piece | JoinedPiece] = []
    unknown: list[str] = []
    num_layers = config.get("num_hidden_layers", config.get("n_layer", 0))
    for tensor in sorted(tensors, key=lambda tensor: (tensor.part, tensor.offset)):
        layer = _LAYER.match(tensor.name)
        # Layers beyond the model's own predict further tokens. The first of them may be read.
        num_beyond = 0 if layer is None else int(layer[1]) + 1 - num_layers
        if _NOT_LOADED.fullmatch(tensor.name) or num_beyond > bool(architecture.predicting):
            continue
        if _is_scale(tensor, by_name):
            continue
        match = _NAME.fullmatch(tensor.name)
        pieces = [] if match is None else list(maker.pieces(tensor, match, by_name))
        if len(tensor.shape) == 1 and tensor.format.num_elements > 1:
            raise ModelLoadError(
                f"{where} holds the vector {tensor.name} in {tensor.format.name}, and only matrices can be in blocks\n"
                "  use another file of this model"
            )
        found += pieces
        is_spare = match is not None and (match["stem"] == _VALUES_PART or match["stem"] in _SPARE)
        if not pieces and not is_spare:
            unknown.append(tensor.name)
    if unknown:
        raise ModelLoadError(
            f"{where} holds tensors that {architecture.name} does not have: {name_some(unknown)}\n"
            "  use another file of this model"
        )
    return found


def scale_of(tensor: GgufTensor, by_name: Mapping[str, GgufTensor]) -> GgufTensor | None:
    """Return the tensor with the factor of all of a tensor's numbers, or one for each expert; None: there is none."""
    scale = by_name.get(tensor.name.removesuffix(".weight") + _SCALE)
    return scale if scale is not None and _is_scale(scale, by_name) else None


def _is_scale(tensor: GgufTensor, by_name: Mapping[str, GgufTensor]) -> bool:
    """Whether a tensor holds the scale of a weight in NVFP4, or of its inputs: a number, or one for each expert."""
    owner = tensor.name.removesuffix(_INPUT_SCALE).removesuffix(_SCALE)
    weight = by_name.get(f"{owner}.weight")
    if owner == tensor.name or weight is None or weight.format.name != "NVFP4" or tensor.format.name != "F32":
        return False
    return prod(tensor.shape) in (1, prod(weight.shape[:-2]))


@dataclass(frozen=True, slots=True)
class _Maker:
    architecture: GgufArchitecture
    config: Mapping[str, Any]

    def pieces(
        self, tensor: GgufTensor, match: re.Match[str], by_name: Mapping[str, GgufTensor]
    ) -> Iterator[Piece | JoinedPiece]:
        """Yield the pieces of a tensor; none if its name means nothing in this architecture."""
        names, stem, leaf = self.architecture, match["stem"], match["leaf"] or "weight"
        if match["layer"] is None:
            if "{}" in names.whole.get(stem, ""):
                yield from self._stacked(f"{names.whole[stem]}.{leaf}", tensor, 0, tensor.shape[1:])
            elif stem in names.whole:
                yield self._piece(f"{names.whole[stem]}.{leaf}", tensor, stem)
            return
        is_predicting = int(match["layer"]) >= self.config.get("num_hidden_layers", self.config.get("n_layer", 0))
        prefix = (names.predicting[""] if is_predicting else names.layer_prefix).format(match["layer"])
        if is_predicting and stem in names.predicting:
            yield self._piece(f"{names.predicting[stem].format(match['layer'])}.{leaf}", tensor, stem)
            return
        if match["expert"] is not None:
            stem = f"{stem}_exps"
        if leaf == "scale":
            stem = f"{stem}.scale"
        name = names.layer.get(stem, names.linear.get(stem))
        if stem == "attn_qkv" and name is None and "attn_q" in names.layer:
            yield from self._queries_keys_values(prefix, leaf, tensor)
        elif stem == "ffn_gate_up_exps" and "ffn_gate_exps" in names.layer:
            yield from self._gates_and_ups(prefix, tensor)
        elif stem == _KEYS_PART and "attn_kv_b" in names.layer:
            values = by_name.get(tensor.name.replace(_KEYS_PART, _VALUES_PART))
            if values is not None and len(tensor.shape) == len(values.shape) == 3:
                yield JoinedPiece(f"{prefix}{names.layer['attn_kv_b']}.weight", tensor, values)
        elif name is None:
            return
        elif match["expert"] is not None:
            yield self._piece(f"{prefix}{name.format(match['expert'])}.{leaf}", tensor, stem)
        elif "{}" in name:
            yield from self._stacked(f"{prefix}{name}.{leaf}", tensor, 0, tensor.shape[1:])
        else:
            is_whole = names.ending_of(stem) is not None
            yield self._piece(f"{prefix}{name}" if is_whole else f"{prefix}{name}.{leaf}", tensor, stem)

    def _piece(self, name: str, tensor: GgufTensor, stem: str) -> Piece:
        """A whole tensor."""
        shape = (1, *tensor.shape) if stem in self.architecture.rows and len(tensor.shape) == 1 else tensor.shape
        decay_sign = self.architecture.decay_sign if stem == _DECAY else 0.0
        if stem in CONVOLUTIONS and len(shape) > 1:
            shape = (prod(shape[:-1]), 1, shape[-1])
        elif stem == _DECAY and self.architecture.decay_shape:
            shape = tuple(prod(shape) if size < 0 else size for size in self.architecture.decay_shape)
        elif stem in self.architecture.vectors:
            shape = (prod(shape),)
        num_rows = prod(tensor.shape[:-1]) if len(tensor.shape) > 1 else tensor.shape[0]
        has_offset = stem.endswith("norm") and stem not in self.architecture.plain_norms and name.endswith(".weight")
        offset = self.architecture.norm_offset if has_offset else 0.0
        num_permuted, key_heads, halved = self._num_permuted_heads(stem), self._key_heads(stem), self._halved(stem)
        return Piece(name, shape, tensor, 0, num_rows, num_permuted, offset, decay_sign, key_heads, halved)

    def _key_heads(self, stem: str) -> tuple[int, int] | None:
        if not self.architecture.is_by_head or stem != "attn_qkv":
            return None
        num_heads, num_kv_heads = self._num_heads
        return num_kv_heads, num_heads // max(1, num_kv_heads)

    def _num_permuted_heads(self, stem: str) -> int:
        return self._heads_of(stem) if self.architecture.is_permuted else 0

    def _halved(self, stem: str) -> tuple[int, int] | None:
        if not self.architecture.is_halved or not (num_heads := self._heads_of(stem)):
            return None
        return num_heads, int(self.config["head_dim"] * self.config["partial_rotary_factor"])

    def _heads_of(self, stem: str) -> int:
        """The number of heads of queries or keys, which turn; 0 for other tensors."""
        num_heads, num_kv_heads = self._num_heads
        return {"attn_q": num_heads, "attn_k": num_kv_heads}.get(stem, 0)

    @property
    def _num_heads(self) -> tuple[int, int]:
        num_heads = self.config["num_attention_heads"]
        # Falcon's entry has another name.
        names = ("num_key_value_heads", "num_kv_heads")
        return num_heads, next((self.config[name] for name in names if name in self.config), num_heads)

    def _queries_keys_values(self, prefix: str, leaf: str, tensor: GgufTensor) -> Iterator[Piece]:
        num_heads, num_kv_heads = self._num_heads
        head_dim, start = tensor.shape[0] // (num_heads + 2 * num_kv_heads), 0
        for stem, count in (("attn_q", num_heads), ("attn_k", num_kv_heads), ("attn_v", num_kv_heads)):
            name, size = f"{prefix}{self.architecture.layer[stem]}.{leaf}", count * head_dim
            shape = (size, *tensor.shape[1:])
            permuted, halved = self._num_permuted_heads(stem), self._halved(stem)
            yield Piece(name, shape, tensor, start, size, permuted, halved=halved)
            start += size

    def _gates_and_ups(self, prefix: str, tensor: GgufTensor) -> Iterator[Piece]:
        _, rows, columns = tensor.shape
        for index, kind in enumerate(("gate", "up")):
            name = f"{prefix}{self.architecture.layer[f'ffn_{kind}_exps']}.weight"
            yield from self._stacked(name, tensor, index * (rows // 2), (rows // 2, columns))

    def _stacked(self, name: str, tensor: GgufTensor, first_row: int, shape: tuple[int, ...]) -> Iterator[Piece]:
        """A piece for each index of the tensor's first dimension: `shape` from `first_row` on."""
        rows_each = prod(tensor.shape[1:-1])
        for index in range(tensor.shape[0]):
            yield Piece(name.format(index), shape, tensor, index * rows_each + first_row, prod(shape[:-1]))
