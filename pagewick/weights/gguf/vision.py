"""VisionFile: the GGUF file with the part of a model that sees, which llama.cpp calls mmproj. Imports no torch.

Source of the keys, of the names of tensors and of the rules: https://github.com/ggml-org/llama.cpp, tools/mtmd/clip.cpp
and clip-impl.h, gguf-py/gguf/constants.py (clip.vision.*), and its converter, which writes the files. `{}` in a name
stands for a block of the encoder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.files import name_some
from pagewick.weights.gguf.header import GgufArray, GgufHeader, GgufTensor
from pagewick.weights.gguf.metadata import Metadata
from pagewick.weights.gguf.pieces import GatheredPiece, Piece
from pagewick.weights.gguf.vision_entries import processor_files, whole_entries
from pagewick.weights.gguf.vision_families import DEEPSTACK, FAMILIES
from pagewick.weights.gguf.vision_family import LINEAR
from pagewick.weights.gguf.vision_keys import NUMBERED, ProcessorFiles, VisionKeys
from pagewick.weights.gguf.vocabulary import TokenType, token_types

# general.type and general.architecture of these files.
_TYPE: Final = "mmproj"
_ARCHITECTURE: Final = "clip"
_LIMITS: Final = ("input_min", "input_max", "output_min", "output_max")
_NAME: Final = re.compile(rf"(?P<stem>(v|mm)(\.[a-z0-9_]+)+?)(\.(?P<leaf>weight|bias|{'|'.join(_LIMITS)}))?", re.ASCII)
# The picture of the second frame; an image is repeated.
_PATCH_STEM: Final = "v.patch_embd"
_PATCHES: Final = (f"{_PATCH_STEM}.weight", f"{_PATCH_STEM}.weight.1")
_QUERIES_KEYS_VALUES: Final = ("attn_q", "attn_k", "attn_v")
# general.architecture of text parts whose first layers get features of the image.
_DEEPSTACK_KINDS: Final = ("qwen3vl", "qwen3vlmoe")
# Entries of vision_config, and the keys that decide them.
_KEYS: Final = {
    "depth": "block_count",
    "num_hidden_layers": "block_count",
    "num_heads": "attention.head_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "embed_dim": "embedding_length",
    "hidden_size": "embedding_length",
    "out_hidden_size": "projection_dim",
    "layer_norm_eps": "attention.layer_norm_epsilon",
}
# Entries beside vision_config, and the keys that decide them.
_PROJECTOR_KEYS: Final = dict.fromkeys(
    ("scale_factor", "downsample_factor", "downsample_ratio"), "projector.scale_factor"
)
_NOT_FITTING: Final = "give the two files of one model"


@dataclass(frozen=True)
class VisionFile(VisionKeys):
    """A vision part. where: the file, for people. values: its key-values. tensors: all of them."""

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

    def check_fits(self, text: Metadata) -> None:
        """Raise ModelLoadError, which names both files, unless they are the parts of one model.

        The vocabulary is looked at if it was read.
        """
        problem = ""
        if text.kind not in self.family.models:
            problem = f"vision parts of the kind {self.projector} belong to {', '.join(self.family.models)}, "
            problem += f"and this is {text.kind}"
        elif (ours := self.out_size) != (theirs := text.get("embedding_length")):
            named = "clip.vision.projection_dim" if self.family.output is None else f"the width of {self.family.output}"
            problem = f"{named} is {ours}, and {text.kind}.embedding_length {theirs}"
        else:
            num_ours = len(self.deepstack)
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
        if isinstance(text.values.get("tokenizer.ggml.tokens"), list):
            self._placeholder(text)

    def whole_config(self, text: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config.json of the whole model. config: that of the text part. Raises ModelLoadError."""
        self.check_fits(text)
        return {**whole_entries(self, text, config), "image_token_id": self._placeholder(text)}

    def reworded(self, message: str, sections: str) -> str:
        """Return an error about the result of whole_config as one about this file.

        sections: names the sections of the rotation, which the text part has.
        """

        def key_of(match: re.Match[str]) -> str:
            return f"{self.where}: clip.vision.{_KEYS.get(match[1], match[1])}"

        message = message.replace("config.json: rope_scaling.mrope_section", sections)
        for entry, key in _PROJECTOR_KEYS.items():
            message = message.replace(f"config.json: {entry}", f"{self.where}: clip.vision.{key}")
        message = message.replace("config.json: text_config.", "config.json: ")
        return re.sub(r"config\.json: vision_config\.(\w+)", key_of, message)

    def processor_files(self) -> ProcessorFiles:
        """Return the files that say how the model wants its images. Raises ModelLoadError."""
        return processor_files(self)

    def pieces(self, text: Metadata) -> list[Piece | GatheredPiece]:
        """Return the tensors of the checkpoint that this file holds. Raises ModelLoadError for unknown ones."""
        by_name = {tensor.name: tensor for tensor in self.tensors}
        found: list[Piece | GatheredPiece] = []
        unknown: list[str] = []
        family = self.family
        for tensor in sorted(self.tensors, key=lambda tensor: tensor.offset):
            if tensor.name in _PATCHES and family.has_frames:
                if tensor.name == _PATCHES[0]:
                    found.append(self._patches(f"{family.prefix}patch_embed.proj.weight", by_name))
                continue
            if re.fullmatch(family.others, tensor.name):
                continue
            match = _NAME.fullmatch(tensor.name)
            names = [] if match is None else list(self._names(match["stem"], match["leaf"]))
            if match is None or not names:
                unknown.append(tensor.name)
                continue
            # The name of one tensor has its ending within.
            is_bare = names[0].endswith("_weight") or self._is_bare(match["stem"])
            name = names[0] if is_bare else f"{names[0]}.{match['leaf']}"
            if match["leaf"] in _LIMITS:
                # A number, which the file has as a vector.
                if tensor.shape != (1,) or tensor.format.num_elements > 1:
                    raise ModelLoadError(f"{self.where}: {tensor.name} must be one number\n  use another file")
                found.append(Piece(name, (), tensor, 0, 1))
                continue
            if match["stem"] == family.colours_last and match["leaf"] == "weight":
                if len(tensor.shape) != 4:
                    raise ModelLoadError(f"{self.where}: {tensor.name} must have four dimensions\n  use another file")
                found.append(GatheredPiece(name, (tensor,), tensor.shape, 0, colours_last=True))
                continue
            if names[0].endswith(".attn.qkv") and not match["stem"].endswith("attn_qkv"):
                if match["stem"].endswith(_QUERIES_KEYS_VALUES[0]):
                    found.append(self._queries_keys_values(name, tensor, by_name))
                continue
            found.append(self._whole(name, match["stem"], tensor))
        if unknown:
            raise ModelLoadError(
                f"{self.where} holds tensors that {family.models.get(text.kind, self.projector)} does not have: "
                f"{name_some(unknown)}\n  use another file of this model"
            )
        return found

    def _names(self, stem: str, leaf: str | None) -> Iterator[str]:
        """Yield the name of a tensor in the checkpoint, without its leaf; nothing for one that the family has not."""
        if stem == _PATCH_STEM and leaf == "bias" and not self.family.has_patch_bias:
            return
        for name in self._names_of(stem):
            if leaf in _LIMITS:
                if name.endswith(LINEAR):
                    yield name.removesuffix(LINEAR)
            elif leaf is not None or self._is_bare(stem):
                yield name

    def _is_bare(self, stem: str) -> bool:
        numbered = NUMBERED.fullmatch(stem)
        return (stem if numbered is None else numbered["stem"]) in self.family.bare

    def _names_of(self, stem: str) -> Iterator[str]:
        family, match = self.family, NUMBERED.fullmatch(stem)
        if match is None:
            if stem in family.whole:
                yield f"{family.prefix}{family.whole[stem]}"
            return
        block, name = int(match["block"]), match["stem"]
        if match["kind"] == "deepstack":
            if name in DEEPSTACK and block in self.deepstack:
                yield f"{family.prefix}deepstack_merger_list.{self.deepstack.index(block)}.{DEEPSTACK[name]}"
            return
        if name in _QUERIES_KEYS_VALUES and name not in family.block:
            name = "attn_qkv"
        if self.is_swapped:
            name = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}.get(name, name)
        if name in family.block:
            yield f"{family.prefix}{family.blocks}.{block}.{family.block[name]}"

    def _whole(self, name: str, stem: str, tensor: GgufTensor) -> Piece | GatheredPiece:
        """A tensor as it is; one in blocks becomes numbers, because encoders are not quantized."""
        is_turned = self.family.is_permuted and stem.endswith(_QUERIES_KEYS_VALUES[:2])
        num_heads = self.count("attention.head_count") if is_turned else 0
        if tensor.format.num_elements > 1:
            return GatheredPiece(name, (tensor,), tensor.shape, 0, num_heads=num_heads)
        num_rows = prod(tensor.shape[:-1]) if len(tensor.shape) > 1 else tensor.shape[0]
        offset = 1.0 if stem in self.family.offset_norms else 0.0
        return Piece(name, tensor.shape, tensor, 0, num_rows, num_heads, offset)

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

    def _placeholder(self, text: Metadata) -> int:
        """The id of the token that stands for an image."""
        tokens, family = text.values.get("tokenizer.ggml.tokens"), self.family
        found = [] if isinstance(tokens, GgufArray) or tokens is None else list(tokens)
        if family.placeholder in found:
            return found.index(family.placeholder)
        if family.stand_in is not None:
            types = token_types(text.values, len(found))
            for token_id in reversed(range(len(found))):
                if types[token_id] == TokenType.CONTROL and re.fullmatch(family.stand_in, found[token_id]):
                    return token_id
        raise ModelLoadError(
            f"{text.where} has no token {family.placeholder}, which stands for an image in a prompt\n"
            "  use another file of this model, or read text with --language-model-only"
        )
