"""A checkpoint, or a GGUF file, as an Export: what `pagewick quantize` writes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from pagewick.cli.quantizing.hybrid import file_architecture, linear_layers, part_of, separate_shared_mlps
from pagewick.cli.quantizing.metadata import check_same, metadata_of, text_config
from pagewick.cli.quantizing.text_names import TEXT_PART, text_name
from pagewick.cli.quantizing.value_heads import in_order_of_files, separate_projections, state_of
from pagewick.cli.quantizing.values_2026 import Factors
from pagewick.errors import ConfigError, ModelLoadError
from pagewick.models.config import ModelConfig
from pagewick.models.mtp_offers import holds_mtp, with_mtp
from pagewick.models.reading import borrowers_tensors
from pagewick.models.registry import filled_config, read_config
from pagewick.models.tensors import model_tensors
from pagewick.models.vision.tensor_names import TENSORS as VISION_TENSORS
from pagewick.quantization.mixes import MixedModel
from pagewick.text.gguf_vocabulary import gguf_vocabulary
from pagewick.weights.files import name_some
from pagewick.weights.gguf.assembly import Assembly, Rows
from pagewick.weights.gguf.checkpoint import GgufCheckpoint
from pagewick.weights.gguf.config import SAMPLING
from pagewick.weights.gguf.export import Export, size_label, type_values, types_of
from pagewick.weights.gguf.header import FORMATS_BY_NAME, GgufTensor
from pagewick.weights.gguf.importance import IMPORTANCE_KEYS, Importance
from pagewick.weights.gguf.naming import gguf_shapes
from pagewick.weights.gguf.source import GgufSource
from pagewick.weights.gguf.writing import encoded_values, place_tensors
from pagewick.weights.opening import open_source
from pagewick.weights.packed.config import packed_rules
from pagewick.weights.same_tensors import check_tied_heads, check_zeros
from pagewick.weights.source import TensorSource
from pagewick.weights.tensor_check import check_names, spare_biases

_NUMBERS: Final = ("F32", "F16", "BF16", "F64")
# Keys that describe one file, and no copy of it in another type.
_OWN_KEYS: Final = re.compile(r"general\.(file_type|quantization_version|alignment)|split\..*|quantize\.imatrix\..*")
# Copies of the model's embedding and head in layers that predict further tokens.
_REPEATED: Final = (".embed_tokens.weight", ".shared_head.head.weight")
_ORIGINAL: Final = "quantize the original, with weights in bfloat16, float16 or float32"


@contextmanager
def planned_export(
    path: Path, name: str, kind: str, importance: Importance | None = None
) -> Iterator[tuple[Export, list[str]]]:
    """Yield what to write for the model in `path`, and what readers of the file should know.

    name: the model's, for people. kind: one of export.TYPES. Raises ModelLoadError for a model that is quantized
    already, that GGUF files cannot describe, or whose tokenizer they cannot; ConfigError for importance of another
    model, or of weights that are not quantized.
    """
    with open_source(path, mix=kind) as source:
        planned = _from_file(source, path) if isinstance(source, GgufSource) else _from_checkpoint(source, path, name)
        values, shapes, rows, config, notes = planned
        types = types_of(kind, shapes, mixed_model(config, has_importance=importance is not None))
        values |= type_values(kind)
        weights: dict[str, Tensor] = {}
        if importance is not None:
            blocks = {key: shape for key, shape in shapes.items() if _is_block(types[key])}
            if not blocks:
                raise ConfigError(
                    f"{importance.name} has no effect: no weight is quantized in {kind}\n"
                    "  leave it out, or choose another type, such as q4_k_m"
                )
            weights, missing = importance.of_tensors(blocks)
            if missing:
                notes.append(f"{importance.name} has no importance for {name_some(missing)}: all columns count alike")
            values |= {IMPORTANCE_KEYS["file"]: importance.name, IMPORTANCE_KEYS["entries"]: len(weights)}
        yield Export(values, shapes, types, rows, weights), notes


def mixed_model(config: ModelConfig, *, has_importance: bool) -> MixedModel:
    """Return the facts that llama.cpp's rules of mixes need."""
    return MixedModel(config.num_layers, config.num_heads, config.num_kv_heads, config.num_experts, has_importance)


def _is_block(kind: str) -> bool:
    return FORMATS_BY_NAME[kind].num_elements > 1


_Planned = tuple[dict[str, Any], dict[str, tuple[int, ...]], Any, ModelConfig, list[str]]


def _from_file(source: GgufSource, path: Path) -> _Planned:
    """Another GGUF file of the model: its key-values and its tensors, as they are."""
    checkpoint = source.checkpoint
    quantized = [tensor for tensor in checkpoint.tensors if tensor.format.name not in _NUMBERS]
    if quantized:
        raise ModelLoadError(
            f"{path} is quantized already: {quantized[0].name} is {quantized[0].format.name}\n  {_ORIGINAL}"
        )
    stored = {tensor.name: tensor for tensor in checkpoint.tensors}

    def rows(tensor: GgufTensor) -> Rows:
        found = source.stored_rows(stored[tensor.name])
        num_parts = tensor.shape[0] if len(tensor.shape) > 2 else 1
        for index, part in enumerate(found.view(num_parts, -1, found.shape[1])):
            yield index, part
            source.release(part)

    values = {
        key: value for key, value in encoded_values(checkpoint.paths[0]).items() if _OWN_KEYS.fullmatch(key) is None
    }
    return values, {key: tensor.shape for key, tensor in stored.items()}, rows, read_config(checkpoint.config), []


def _from_checkpoint(source: TensorSource, path: Path, name: str) -> _Planned:
    """A checkpoint of safetensors, with the configuration and the tokenizer beside it."""
    whole = source.config()
    rules = packed_rules(whole)
    config = text_config(whole)
    model = read_config(config)
    kind, architecture = file_architecture(model)
    _check_tied_heads(source, model)
    unused = borrowers_tensors([layer.lender for layer in model.layers]) if architecture.has_unused_keys else ()
    names = [text_name(name) for name in source.names()]
    if architecture.predicting and holds_mtp(model, names):
        model = with_mtp(model, names)
    places, skipped, dropped = _text_tensors(source, model, unused)
    _drop_spare_biases(source, places, model)
    values, factors = metadata_of(config, has_mtp=model.has_mtp)
    shapes = {name: source.shape(place) for name, place in places.items()}
    _check_tensors(shapes, model, unused)
    state = state_of(model)
    shapes, places = separate_projections(shapes, places, state)
    shapes, places = separate_shared_mlps(shapes, places, model)
    stored = gguf_shapes(shapes, architecture, filled_config(config), linear_layers(model), model.num_layers)
    # Some readers look for the rotary factors before they meet the first layer.
    stored = {name: (len(numbers),) for name, numbers in factors.items()} | stored
    values |= {"general.name": name, "general.size_label": size_label(stored)}
    values |= _sampling(source.generation_config())
    vocabulary, remarks = gguf_vocabulary(path, model.vocab_size, keeps_merges=kind == "gemma4")
    values |= vocabulary
    checkpoint = _as_read(values, stored, factors, str(path))
    notes = [*check_same(config, checkpoint.config), *remarks]
    if rules is not None:
        notes.append(f"{name} is quantized already, as {rules.label}: its weights are rounded again")
    if unused and not any(re.fullmatch(unused[0], place) for place in places):
        notes.append(f"llama.cpp does not load it: {name} lacks keys and values of layers that borrow those of others")
    if skipped:
        notes.append(f"the file holds the text part only, without {name_some(skipped[:1])} and its like")
    if dropped:
        notes.append(f"the file lacks {name_some(dropped[:1])} and its like, which Pagewick does not use")

    def weight_of(name: str) -> Tensor:
        found = source.get(places[name])
        moved = part_of(name, places[name], in_order_of_files(name, found, state))
        if moved is not found:
            source.release(found)
        return moved

    assembly = Assembly(checkpoint.text_pieces, factors, weight_of, source.release)
    return values, stored, assembly.rows, model, notes


def _text_tensors(
    source: TensorSource, model: ModelConfig, unused: Sequence[str]
) -> tuple[dict[str, str], list[str], list[str]]:
    """Return the tensors of the text part, by their names without its prefix, those of other parts, and dropped ones.

    Those that the model ignores are left out, but for names that match a pattern in `unused`; dropped ones are those of
    them that are matrices and repeat no other tensor. Raises ModelLoadError for tensors that hold no floating-point
    numbers.
    """
    used = {tensor.name for tensor in model_tensors(model, [text_name(name) for name in source.names()])}
    ignored = [re.compile(pattern) for pattern in model.ignored_tensors if pattern not in unused]
    has_parts = any(TEXT_PART.match(name) for name in source.names())
    found: dict[str, str] = {}
    skipped, dropped = [], []
    for name in source.names():
        short = text_name(name)
        is_of_vision = re.fullmatch(VISION_TENSORS, name) is not None
        if is_of_vision or (has_parts and short == name and not name.startswith(("lm_head.", "mtp."))):
            skipped.append(name)
        elif short in used or not any(pattern.fullmatch(short) for pattern in ignored):
            found[short] = name
        elif name.endswith(".weight") and len(source.shape(name)) in (2, 3) and not name.endswith(_REPEATED):
            dropped.append(name)
    if wrong := [name for name in found.values() if source.dtype(name).itemsize < 2]:
        raise ModelLoadError(f"{wrong[0]} is stored as {source.dtype(wrong[0])}, not as plain numbers\n  {_ORIGINAL}")
    return found, skipped, dropped


def _check_tied_heads(source: TensorSource, model: ModelConfig) -> None:
    """Raise ModelLoadError if the file would lack a head that differs from the embedding."""
    places = {text_name(name): name for name in source.names()}
    heads = model.tied_heads(list(places))
    check_tied_heads(source, {places[head]: places[embedding] for head, embedding in heads.items()})


def _drop_spare_biases(source: TensorSource, places: dict[str, str], model: ModelConfig) -> None:
    """Remove biases that the model has not. Raises ModelLoadError if one of them is not zero."""
    spare = spare_biases({tensor.name for tensor in model_tensors(model, list(places))}, list(places))
    check_zeros(source, [places.pop(name) for name in spare])


def _check_tensors(shapes: Mapping[str, tuple[int, ...]], model: ModelConfig, unused: Sequence[str]) -> None:
    """Raise ModelLoadError unless these are the tensors that config.json describes, and some that match `unused`."""
    tensors = model_tensors(model, list(shapes))
    expected = {tensor.name: tensor.shape for tensor in tensors}
    check_names(expected, list(shapes), unused)
    for name, shape in shapes.items():
        if tuple(shape) != expected.get(name, tuple(shape)):
            raise ModelLoadError(
                f"{name} has the shape {list(shape)}, and config.json means {list(expected[name])}\n"
                "  download or copy both again"
            )


def _as_read(
    values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Factors, where: str
) -> GgufCheckpoint:
    """Return what a reader finds in a file with these key-values and tensors."""
    tensors = place_tensors(shapes, dict.fromkeys(shapes, FORMATS_BY_NAME["F32"]))
    return GgufCheckpoint(where, values, tensors, (), lambda tensor: factors[tensor.name])


def _sampling(advice: Mapping[str, Any]) -> dict[str, Any]:
    """The authors' defaults for sampling; whole numbers stay whole. A GGUF file has no do_sample."""
    if advice.get("do_sample") is False:
        advice = {**advice, "temperature": 0.0}
    return {
        f"general.sampling.{key}": advice[entry] if key == "top_k" else float(advice[entry])
        for key, entry in SAMPLING.items()
        if isinstance(advice.get(entry), int | float) and not isinstance(advice[entry], bool)
    }


def check_output(path: Path, output: Path) -> None:
    """Raise ConfigError if the output is the file that is read."""
    if output.exists() and path.exists() and output.samefile(path):
        raise ConfigError(f"{output} is the model itself\n  choose another place")
