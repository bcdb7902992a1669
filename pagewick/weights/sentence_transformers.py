"""Reads what sentence-transformers writes beside a model: how the model's hidden states become embeddings.

modules.json lists what a text runs through: the model itself, the pooling, perhaps linear layers (Dense), and the
division by the length (Normalize). They become two entries of the model's own config.json, so that the rest of the
program reads them like any other. Classes are compared by name and never imported. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.files import CONFIG_NAME, MODULES_NAME, SINGLE_NAME, name_some
from pagewick.weights.module_files import (
    DENSE,
    FETCH_AGAIN,
    PACKAGE,
    POOLING,
    ModuleEntries,
    ModuleFiles,
    kind_of,
    shown,
)

POOLING_ENTRY: Final = "embedding_pooling"
DENSE_ENTRY: Final = "embedding_dense"

_TRANSFORMER: Final = "Transformer"
# Kind of module -> its letter in _ORDER. Dropout does nothing after training.
_KINDS: Final = {_TRANSFORMER: "T", POOLING: "P", DENSE: "D", "Normalize": "N", "Dropout": ""}
_ORDER: Final = re.compile("TPD*N*")
# These modules make scores of pairs of texts, for which no pooling is needed.
_OF_RERANKERS: Final = f"{PACKAGE}.cross_encoder."
# The library's name of a pooling -> ours.
_POOLINGS: Final = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
# Older files have a flag for each pooling -> its name.
_FLAGS: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_FLAG_PREFIX: Final = "pooling_mode_"
# The number of columns, by its newer and its older name.
_WIDTHS: Final = ("embedding_dimension", "word_embedding_dimension")
_ACTIVATIONS: Final = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.SiLU": "silu",
}
# The library's default.
_DEFAULT_ACTIVATION: Final = "torch.nn.modules.activation.Tanh"
_PLACE: Final = "sentence_embedding"
# Far more than any model has.
_MAX_MODULES: Final = 64
_OTHERWISE: Final = (
    f"use another model; or say in its {CONFIG_NAME} how embeddings are made:\n"
    f'  "{POOLING_ENTRY}" (mean, cls or last) and "{DENSE_ENTRY}" ([] for no layers), which take precedence'
)


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A linear layer that changes pooled vectors. name: the folder that holds it, within the model's directory.

    activation: identity, tanh, sigmoid, relu, gelu or silu.
    """

    name: str
    in_features: int
    out_features: int
    bias: bool
    activation: str

    @property
    def file_name(self) -> str:
        """The file with its weights, within the model's directory."""
        return f"{self.name}/{SINGLE_NAME}"


@dataclass(frozen=True, slots=True)
class _Module:
    """kind: one of _KINDS. path: the module's folder; empty for the model itself."""

    kind: str
    path: str


def with_modules(config: Mapping[str, Any], files: ModuleFiles) -> dict[str, Any]:
    """Return a model's config.json with the entries that modules.json, and the files that it names, stand for.

    POOLING_ENTRY is mean, cls or last; DENSE_ENTRY lists the fields of DenseModule, and is left out if there is none.
    The entries that config.json has take precedence. Nothing is added without modules.json, or for a reranker.
    Raises ModelLoadError for files that are malformed, and for modules that are not supported.
    """
    if config.get(POOLING_ENTRY) not in (None, *_POOLINGS.values()):
        raise ModuleEntries(CONFIG_NAME, config).wrong(POOLING_ENTRY, f"one of {', '.join(_POOLINGS.values())}")
    missing = [entry for entry in (POOLING_ENTRY, DENSE_ENTRY) if config.get(entry) is None]
    if not missing or not files.has(MODULES_NAME):
        return dict(config)
    modules = _read_modules(files)
    found: dict[str, Any] = {}
    width: int | None = None
    for folder in (one.path for one in modules if one.kind == POOLING and POOLING_ENTRY in missing):
        entries = files.config_of(folder)
        found[POOLING_ENTRY] = _read_pooling(entries)
        width = next((entries.size(name) for name in _WIDTHS if name in entries.values), None)
    if DENSE_ENTRY in missing:
        dense = [_read_dense(files, one.path) for one in modules if one.kind == DENSE]
        _check_widths(files, width, dense)
        found |= {DENSE_ENTRY: [asdict(one) for one in dense]} if dense else {}
    return {**config, **found}


def dense_modules(config: Mapping[str, Any]) -> list[DenseModule]:
    """Return the layers that DENSE_ENTRY of a config.json lists.

    Raises ModelLoadError if it is malformed: it may have been written by hand.
    """
    listed = config.get(DENSE_ENTRY)
    if listed is None:
        return []
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise ModuleEntries(CONFIG_NAME, config).wrong(DENSE_ENTRY, "a list of objects")
    if len(listed) > _MAX_MODULES:
        raise ModelLoadError(f"{CONFIG_NAME}: {DENSE_ENTRY} lists {len(listed)} layers, and at most {_MAX_MODULES} run")
    found: list[DenseModule] = []
    for number, one in enumerate(listed):
        entries = ModuleEntries(f"{CONFIG_NAME}: {DENSE_ENTRY}[{number}]", one)
        name, activation = entries.folder("name"), entries.text("activation", "identity")
        if any(name == other.name for other in found):
            raise entries.wrong("name", "another than that of any layer before it")
        sizes = entries.size("in_features"), entries.size("out_features")
        found.append(DenseModule(name, *sizes, entries.flag("bias", True), activation))
    return found


def _read_modules(files: ModuleFiles) -> list[_Module]:
    """Read modules.json, and check that its modules follow each other as they do in every model that is supported.

    Return nothing for a reranker, and for a model with no module but itself.
    """
    place = f"{files.where}/{MODULES_NAME}"
    listed = files.read(MODULES_NAME)
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise ModelLoadError(f"{place} does not hold a list of objects\n  {FETCH_AGAIN}")
    if len(listed) > _MAX_MODULES:
        raise ModelLoadError(f"{place} lists {len(listed)} modules; at most {_MAX_MODULES} are supported")
    entries = [ModuleEntries(f"{place}: module {number}", entry) for number, entry in enumerate(listed)]
    if any(entry.text("type").startswith(_OF_RERANKERS) for entry in entries):
        return []
    modules = [_read_module(entry) for entry in entries]
    letters = "".join(_KINDS[module.kind] for module in modules)
    if letters != "T" and not _ORDER.fullmatch(letters):
        raise ModelLoadError(
            f"{place} lists {name_some(module.kind for module in modules) or 'no modules'}, which is not supported;\n"
            f"  supported are Transformer, Pooling, any number of Dense, and Normalize, in this order\n  {_OTHERWISE}"
        )
    paths = [module.path for module in modules]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise ModelLoadError(f"{place} names the folder {twice} for two modules\n  {FETCH_AGAIN}")
    return modules


def _read_module(entry: ModuleEntries) -> _Module:
    kind = kind_of(entry.text("type"))
    if kind not in _KINDS:
        raise ModelLoadError(
            f"{entry.where}: type {shown(entry.values['type'])} is not supported, and no code of a checkpoint is run;\n"
            f"  supported are {', '.join(_KINDS)} of {PACKAGE}\n  {_OTHERWISE}"
        )
    if kind != _TRANSFORMER:
        return _Module(kind, entry.folder("path"))
    if entry.text("path"):
        raise entry.wrong("path", f"empty: the model has to lie beside {MODULES_NAME}")
    return _Module(kind, "")


def _read_pooling(entries: ModuleEntries) -> str:
    """Return the pooling, in our words. Raises ModelLoadError."""
    key, modes = _pooling_modes(entries)
    if len(modes) > 1:
        raise _unsupported(entries, key, f"it asks for {len(modes)} poolings at once: {name_some(modes)}")
    pooling = _POOLINGS.get(modes[0])
    if pooling is None:
        raise _unsupported(entries, key, f"{shown(modes[0])} is none of {', '.join(_POOLINGS)}")
    # The last token is never one of an instruction before the text.
    if not entries.flag("include_prompt", True) and pooling != "last":
        raise _unsupported(entries, "include_prompt", "the tokens of an instruction cannot be left out")
    return pooling


def _pooling_modes(entries: ModuleEntries) -> tuple[str, list[str]]:
    """Return the library's names of all poolings that a file asks for, and the entry that does."""
    mode = entries.values.get("pooling_mode")
    if mode is not None:
        modes = [mode] if isinstance(mode, str) else mode
        if not isinstance(modes, list) or not modes or not all(isinstance(one, str) for one in modes):
            raise entries.wrong("pooling_mode", "a name or a list of names")
        return "pooling_mode", modes
    flags = [key for key in entries.values if key.startswith(_FLAG_PREFIX)]
    chosen = [key for key in flags if entries.flag(key, False)]
    if not chosen and "pooling_mode_mean_tokens" in flags:
        raise entries.wrong("pooling_mode_mean_tokens", "true, if no other pooling is")
    # Without any entry, the library takes the mean.
    return next(iter(chosen), "pooling_mode"), [_FLAGS.get(key, key) for key in chosen] or ["mean"]


def _read_dense(files: ModuleFiles, folder: str) -> DenseModule:
    entries = files.config_of(folder)
    for key in ("module_input_name", "module_output_name"):
        if entries.text(key, _PLACE) != _PLACE:
            raise _unsupported(entries, key, f"a layer changes the embedding ({_PLACE}) and nothing else")
    if entries.flag("use_residual", False):
        raise _unsupported(entries, "use_residual", "what a layer takes is not added to what it gives")
    activation = _ACTIVATIONS.get(entries.text("activation_function", _DEFAULT_ACTIVATION))
    if activation is None:
        known = ", ".join(name.rpartition(".")[2] for name in _ACTIVATIONS)
        raise _unsupported(entries, "activation_function", f"known are torch's {known}")
    sizes = entries.size("in_features"), entries.size("out_features")
    found = DenseModule(folder, *sizes, entries.flag("bias", True), activation)
    files.refuse_pickle(found.file_name)
    return found


def _check_widths(files: ModuleFiles, width: int | None, dense: Sequence[DenseModule]) -> None:
    """Raise ModelLoadError if a layer does not take as many numbers as it gets. width: of a pooled vector, if known."""
    for one in dense:
        if width is not None and one.in_features != width:
            raise ModelLoadError(
                f"{files.where}/{one.name}/{CONFIG_NAME}: in_features is {one.in_features}, and the module before it "
                f"gives {width} numbers\n  the files are of different models; download or copy all of them again"
            )
        width = one.out_features


def _unsupported(entries: ModuleEntries, key: str, why: str) -> ModelLoadError:
    value = shown(entries.values.get(key))
    return ModelLoadError(f"{entries.where}: {key} {value} is not supported: {why}\n  {_OTHERWISE}")
