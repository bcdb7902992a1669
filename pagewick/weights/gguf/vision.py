"""VisionFile: the GGUF file with the part of a model that sees, which llama.cpp calls mmproj. Imports no torch.

Source of the keys, of the names of tensors and of the rules: https://github.com/ggml-org/llama.cpp, tools/mtmd/clip.cpp
and clip-impl.h, gguf-py/gguf/constants.py (clip.vision.*), and its converter, which writes the files. `{}` in a name
stands for a block of the encoder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isclose, prod
from typing import Any, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.files import name_some
from pagewick.weights.gguf.header import GgufArray, GgufHeader, GgufTensor
from pagewick.weights.gguf.metadata import Metadata
from pagewick.weights.gguf.pieces import GatheredPiece, Piece
from pagewick.weights.gguf.vision_families import DEEPSTACK, FAMILIES, VisionFamily

PLACEHOLDER: Final = "<|image_pad|>"
# general.type and general.architecture of these files.
_TYPE: Final = "mmproj"
_ARCHITECTURE: Final = "clip"
_NAME: Final = re.compile(r"(?P<stem>(v|mm)(\.[a-z0-9_]+)+)\.(?P<leaf>weight|bias)", re.ASCII)
_NUMBERED: Final = re.compile(r"v\.(?P<kind>blk|deepstack)\.(?P<block>\d{1,6})\.(?P<stem>[a-z0-9_]+)", re.ASCII)
# The picture of the second frame; an image is repeated.
_PATCHES: Final = ("v.patch_embd.weight", "v.patch_embd.weight.1")
_QUERIES_KEYS_VALUES: Final = ("attn_q", "attn_k", "attn_v")
# The encoders of these families have one eps; the converter writes that of the text part, which is the same.
_EPS: Final = 1e-6
_WINDOW: Final = 112
# general.architecture of text parts whose first layers get features of the image.
_DEEPSTACK_KINDS: Final = ("qwen3vl", "qwen3vlmoe")
# Entries of vision_config, and the keys that decide them.
_KEYS: Final = {
    "depth": "block_count",
    "num_heads": "attention.head_count",
    "embed_dim": "embedding_length",
    "hidden_size": "embedding_length",
    "out_hidden_size": "projection_dim",
}
_NOT_FITTING: Final = "give the two files of one model"


@dataclass(frozen=True)
class VisionFile:
    """A vision part. where: the file, for people. values: its key-values. tensors: all of them."""

    where: str
    values: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]

    @classmethod
    def of(cls, header: GgufHeader, where: str) -> VisionFile:
        """Read a header. Raises ModelLoadError unless it is that of a vision part of a supported family."""
        found = cls(where, header.values, header.tensors)
        kind = header.values.get("general.architecture")
        if kind != _ARCHITECTURE or header.values.get("general.type", _TYPE) != _TYPE:
            raise ModelLoadError(f"{where} does not hold the vision part of a model\n  give its mmproj file")
        if found.projector not in FAMILIES:
            raise ModelLoadError(
                f"{where} holds a vision part of the kind {found.projector[:80]!r}, which is not supported\n"
                f"  supported: {', '.join(FAMILIES)}; --language-model-only reads text"
            )
        return found

    @property
    def projector(self) -> str:
        """clip.projector_type; empty if there is none."""
        return str(self.values.get("clip.projector_type", self.values.get("clip.vision.projector_type", "")))

    @property
    def _family(self) -> VisionFamily:
        return FAMILIES[self.projector]

    def check_fits(self, text: Metadata) -> None:
        """Raise ModelLoadError, which names both files, unless they are the parts of one model."""
        problem = ""
        if text.kind not in self._family.models:
            problem = f"vision parts of the kind {self.projector} belong to {', '.join(self._family.models)}, "
            problem += f"and this is {text.kind}"
        elif (ours := self._out_size) != (theirs := text.get("embedding_length")):
            problem = f"clip.vision.projection_dim is {ours}, and {text.kind}.embedding_length {theirs}"
        else:
            num_ours = len(self._deepstack)
            num_theirs = text.values.get(f"{text.kind}.n_deepstack_layers", num_ours)
            if text.kind not in _DEEPSTACK_KINDS:
                num_theirs = 0
            if num_ours != num_theirs:
                problem = f"it has v.deepstack.* for {num_ours} layers, and the text part takes {num_theirs}"
        if problem:
            raise ModelLoadError(
                f"{self.where} is not the vision part of {text.where}: {problem}\n  {_NOT_FITTING}, or read text with "
                "--language-model-only"
            )

    def whole_config(self, text: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config.json of the whole model. config: that of the text part. Raises ModelLoadError."""
        self.check_fits(text)
        found = {
            **config,
            "architectures": [self._family.models[text.kind]],
            "image_token_id": _placeholder(text),
            "vision_config": self._entries(text),
        }
        scaling = found.get("rope_scaling") or {"rope_type": "default"}
        found["rope_scaling"] = {**scaling, "mrope_section": _sections(text)}
        if self._family.is_interleaved:
            found["rope_scaling"]["mrope_interleaved"] = True
        # Heads of Qwen2-VL always share out the hidden size.
        head_dim = found.pop("head_dim") if text.kind == "qwen2vl" else 0
        if head_dim and head_dim * found["num_attention_heads"] != found["hidden_size"]:
            raise text.wrong("qwen2vl.attention.key_length", f"{head_dim}, and heads share out embedding_length")
        return found

    def reworded(self, message: str, sections: str) -> str:
        """Return an error about the result of whole_config as one about this file.

        sections: names the sections of the rotation, which the text part has.
        """

        def key_of(match: re.Match[str]) -> str:
            return f"{self.where}: clip.vision.{_KEYS.get(match[1], match[1])}"

        message = message.replace("config.json: rope_scaling.mrope_section", sections)
        return re.sub(r"config\.json: vision_config\.(\w+)", key_of, message)

    def processor_entries(self) -> dict[str, Any]:
        """Return the preprocessor_config.json that the file amounts to. Raises ModelLoadError.

        Files rarely limit the pixels of an image; those of the models as they are published count then.
        """
        entries: dict[str, Any] = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": self._count("patch_size"),
            "merge_size": self._count("spatial_merge_size", 2),
            "temporal_patch_size": 2,
        }
        for name, default in zip(("min_pixels", "max_pixels"), self._family.limits, strict=True):
            entries[name] = self._count(f"image_{name}", default)
        for name in ("image_mean", "image_std"):
            value = self.values.get(f"clip.vision.{name}")
            if value is None or isinstance(value, GgufArray):
                raise self._wrong(name, "missing, and must be three numbers")
            entries[name] = value
        return entries

    def pieces(self, text: Metadata) -> list[Piece | GatheredPiece]:
        """Return the tensors of the checkpoint that this file holds. Raises ModelLoadError for unknown ones."""
        by_name = {tensor.name: tensor for tensor in self.tensors}
        found: list[Piece | GatheredPiece] = []
        unknown: list[str] = []
        prefix = "visual."
        for tensor in sorted(self.tensors, key=lambda tensor: tensor.offset):
            if tensor.name in _PATCHES:
                if tensor.name == _PATCHES[0]:
                    found.append(self._patches(f"{prefix}patch_embed.proj.weight", by_name))
                continue
            match = _NAME.fullmatch(tensor.name)
            names = [] if match is None else list(self._names(match["stem"]))
            if match is None or not names:
                unknown.append(tensor.name)
                continue
            name = f"{prefix}{names[0]}.{match['leaf']}"
            if names[0].endswith(".attn.qkv") and not match["stem"].endswith("attn_qkv"):
                if match["stem"].endswith(_QUERIES_KEYS_VALUES[0]):
                    found.append(self._queries_keys_values(name, tensor, by_name))
                continue
            found.append(_whole(name, tensor))
        if unknown:
            raise ModelLoadError(
                f"{self.where} holds tensors that {self._family.models.get(text.kind, self.projector)} does not have: "
                f"{name_some(unknown)}\n  use another file of this model"
            )
        return found

    def _entries(self, text: Metadata) -> dict[str, Any]:
        """The entry vision_config."""
        width = self._count("embedding_length")
        self._check_effects()
        if (depth := self._count("block_count")) > len(self.tensors):
            raise self._wrong("block_count", f"{depth}, more than the tensors of the file")
        # The key feed_forward_length is another number in files of Qwen2-VL.
        inner = prod(self._shape("v.blk.0.ffn_up.weight")) // width
        found: dict[str, Any] = {
            "depth": depth,
            "num_heads": self._count("attention.head_count"),
            "hidden_act": self._family.activation,
            "patch_size": self._count("patch_size"),
            "spatial_merge_size": self._count("spatial_merge_size", 2),
            "temporal_patch_size": 2,
            "hidden_size": width,
            "intermediate_size": inner,
            "out_hidden_size": text.get("embedding_length"),
        }
        if self.projector == "qwen2vl_merger":
            found |= {"embed_dim": width, "hidden_size": text.get("embedding_length"), "mlp_ratio": inner / width}
        if self.projector == "qwen2.5vl_merger":
            every = self._count("n_wa_pattern")
            found["fullatt_block_indexes"] = list(range(every - 1, depth, every))
            found["window_size"] = self._count("window_size", _WINDOW)
        if self.projector == "qwen3vl_merger":
            found["num_position_embeddings"] = self._shape("v.position_embd.weight")[0]
            found["deepstack_visual_indexes"] = self._deepstack
        return found

    def _check_effects(self) -> None:
        """Raise ModelLoadError for keys with which the encoder computes something else than that of its family."""
        for kind in ("gelu", "silu"):
            if bool(self.values.get(f"clip.use_{kind}", False)) != (kind in self._family.uses):
                raise self._wrong(f"clip.use_{kind}", f"not what {self.projector} has", is_whole=True)
        eps = self.values.get("clip.vision.attention.layer_norm_epsilon", _EPS)
        if not isinstance(eps, int | float) or not isclose(eps, _EPS, rel_tol=1e-4):
            raise self._wrong("attention.layer_norm_epsilon", f"{eps!r:.80}, and only {_EPS:g} is supported")

    @cached_property
    def _out_size(self) -> int:
        """Width of the rows that the text part gets. In the first files of Qwen2-VL the key is 0."""
        key = "clip.vision.projection_dim"
        return self._shape("mm.2.weight")[0] if self.values.get(key) == 0 else self._count("projection_dim")

    @cached_property
    def _deepstack(self) -> list[int]:
        """Blocks whose output the first layers of the text part get: those that have tensors for it.

        Files have a key for it, too, but its value is whatever config.json has, even in families without such blocks.
        """
        found = (_NUMBERED.match(tensor.name) for tensor in self.tensors)
        return sorted({int(match["block"]) for match in found if match is not None and match["kind"] == "deepstack"})

    @cached_property
    def _is_swapped(self) -> bool:
        """Whether the two projections of MLPs have each other's names, as in the first files of Qwen2-VL."""
        if self.projector == "qwen3vl_merger":
            return False
        up, down = (self._shape(f"v.blk.0.ffn_{name}.weight") for name in ("up", "down"))
        width = self._count("embedding_length")
        return down[-1] == width and up[-1] != width

    def _names(self, stem: str) -> Iterator[str]:
        """Yield the name of a tensor in the checkpoint; nothing for one that the family does not have."""
        family, match = self._family, _NUMBERED.fullmatch(stem)
        if match is None:
            if stem in family.whole:
                yield family.whole[stem]
            return
        block, name = int(match["block"]), match["stem"]
        if match["kind"] == "deepstack":
            if name in DEEPSTACK and block in self._deepstack:
                yield f"deepstack_merger_list.{self._deepstack.index(block)}.{DEEPSTACK[name]}"
            return
        if name in _QUERIES_KEYS_VALUES:
            name = "attn_qkv"
        if self._is_swapped:
            name = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}.get(name, name)
        if name in family.block:
            yield f"blocks.{block}.{family.block[name]}"

    def _patches(self, name: str, by_name: Mapping[str, GgufTensor]) -> GatheredPiece:
        """The weight of the patches: [width, colours, frames, rows, columns], of which the file has one per frame."""
        if _PATCHES[1] not in by_name or by_name[_PATCHES[1]].shape != by_name[_PATCHES[0]].shape:
            raise ModelLoadError(f"{self.where} must hold a {_PATCHES[1]} like {_PATCHES[0]}\n  use another file")
        shape = by_name[_PATCHES[0]].shape
        return GatheredPiece(name, tuple(by_name[frame] for frame in _PATCHES), (*shape[:2], 1, *shape[2:]), 2)

    def _queries_keys_values(self, name: str, first: GgufTensor, by_name: Mapping[str, GgufTensor]) -> GatheredPiece:
        names = [first.name.replace(_QUERIES_KEYS_VALUES[0], kind) for kind in _QUERIES_KEYS_VALUES]
        if any(one not in by_name or by_name[one].shape != first.shape for one in names):
            raise ModelLoadError(
                f"{self.where} must hold {' and '.join(names[1:])} like {names[0]}\n  use another file"
            )
        return GatheredPiece(name, tuple(by_name[one] for one in names), first.shape, 0)

    def _shape(self, name: str) -> Sequence[int]:
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor.shape
        raise ModelLoadError(f"{self.where} holds no {name}\n  use another file of this model")

    def _count(self, key: str, default: int | None = None) -> int:
        value = self.values.get(f"clip.vision.{key}", default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._wrong(key, "missing" if value is None else f"{value!r:.80}, and must be a whole number from 1")
        return value

    def _wrong(self, key: str, problem: str, *, is_whole: bool = False) -> ModelLoadError:
        key = key if is_whole else f"clip.vision.{key}"
        return ModelLoadError(f"{self.where}: {key} is {problem}\n  use another file of this model")


def _whole(name: str, tensor: GgufTensor) -> Piece | GatheredPiece:
    """A tensor as it is; one in blocks becomes numbers, because encoders are not quantized."""
    if tensor.format.num_elements > 1:
        return GatheredPiece(name, (tensor,), tensor.shape, 0)
    return Piece(name, tensor.shape, tensor, 0, prod(tensor.shape[:-1]) if len(tensor.shape) > 1 else tensor.shape[0])


def _placeholder(text: Metadata) -> int:
    tokens = text.values.get("tokenizer.ggml.tokens")
    if isinstance(tokens, GgufArray) or tokens is None or PLACEHOLDER not in tokens:
        raise ModelLoadError(
            f"{text.where} has no token {PLACEHOLDER}, which stands for an image in a prompt\n"
            "  use another file of this model, or read text with --language-model-only"
        )
    return list(tokens).index(PLACEHOLDER)


def _sections(text: Metadata) -> list[int]:
    """The pairs that turn with time, row and column. A fourth number, for another axis, must be 0."""
    key = f"{text.kind}.rope.dimension_sections"
    sections = text.values.get(key)
    if not isinstance(sections, list) or len(sections) not in (3, 4) or any(sections[3:]):
        raise text.wrong(key, "missing" if sections is None else f"{sections!r:.80}, and must be three numbers")
    return sections[:3]
