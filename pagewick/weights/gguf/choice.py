"""Which of several GGUF files to load: the one that is named, or the best one that runs. Imports no torch."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pagewick.errors import ModelLoadError
from pagewick.quantization.block_formats import BLOCK_FORMATS
from pagewick.weights.files import GGUF_SUFFIX, has_safetensors, is_plain_name, name_some
from pagewick.weights.gguf.checkpoint import split_names
from pagewick.weights.progress import format_bytes

# Files that belong to a model, but are not the model: a part of their names, and the beginnings and an end of others.
# "M-imatrix-Q4_K_M.gguf" is a model.
_VISION: Final = "mmproj"
_PARTS_OF_MODELS: Final = ("mtp-", "imatrix")
_MATRIX_END: Final = f"imatrix{GGUF_SUFFIX}"
_PART_NUMBER: Final = re.compile(r"-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
# Such as Q8_0, Q4_K_M, IQ2_XXS, TQ1_0, MXFP4_MOE, BF16, and UD-Q4_K_XL.
_LABEL: Final = re.compile(
    r"(?<![A-Z0-9])(UD-)?(I?Q\d+(_(\d|K|NL|P|X{0,2}S|M|X{0,2}L))*|TQ\d_\d|MXFP4(_MOE)?|NVFP4|BF16|FP?16|FP?32)"
    r"(?![A-Z0-9])"
)
# Quantizations that are chosen where none is named, best first, with the block formats of their tensors.
_PREFERRED: Final = {"Q4_K_M": ("Q4_K", "Q6_K"), "Q4_0": ("Q4_0", "Q6_K"), "Q8_0": ("Q8_0",)}
_UNSLOTH: Final = "UD-"
_MAX_LISTED, _LINE_WIDTH = 12, 110

SizeOf = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class GgufModel:
    """One model among GGUF files. first: its file, or the first part of it. label: its quantization as its name says.

    The label is in capital letters, and empty if the name says nothing.
    """

    first: str
    num_parts: int = 1

    @property
    def files(self) -> list[str]:
        return [self.first] if self.num_parts == 1 else split_names(self.first, self.num_parts)

    @property
    def label(self) -> str:
        """Found in the file's name, or in that of its directory; the last one, as a name may have several."""
        stem = _PART_NUMBER.sub("", self.first).removesuffix(GGUF_SUFFIX).upper()
        found = [match for part in stem.split("/") for match in _LABEL.finditer(part)]
        return _normal(found[-1][0]) if found else ""


def find_models(names: Iterable[str]) -> list[GgufModel]:
    """Return the models among files, some of which may lie in directories; files of other kinds are left out."""
    models = set()
    for name in names:
        base = name.rpartition("/")[2]
        is_inside = all(map(is_plain_name, name.split("/")))  # names may come from a server
        lower = base.lower()
        is_part = _VISION in lower or lower.startswith(_PARTS_OF_MODELS) or lower.endswith(_MATRIX_END)
        if not is_inside or is_part or not base.endswith(GGUF_SUFFIX):
            continue
        match, count = _PART_NUMBER.search(name), 1
        if match is not None and (count := int(match["count"])):
            name = f"{name[: match.start()]}-00001-of-{match['count']}{GGUF_SUFFIX}"
        models.add(GgufModel(name, max(1, count)))
    return sorted(models, key=lambda model: model.first)


def complete_models(names: Collection[str]) -> list[GgufModel]:
    """Return the models all of whose parts are among these files."""
    return [model for model in find_models(names) if set(model.files) <= set(names)]


def vision_parts(names: Iterable[str]) -> list[str]:
    """Return the GGUF files that hold the vision part of a model."""
    return sorted(name for name in names if _VISION in name.rpartition("/")[2].lower() and name.endswith(GGUF_SUFFIX))


def candidates(models: Sequence[GgufModel], wanted: str | None) -> list[GgufModel]:
    """Return the models that `wanted` names: a file, its bare name, or a quantization in upper or lower case.

    None stands for the best quantization that runs, and for the only model.
    """
    if wanted is not None and wanted.endswith(GGUF_SUFFIX):
        holders = {name: model for model in models for name in model.files}
        same_name = {model for name, model in holders.items() if name.rpartition("/")[2] == wanted}
        return [holders[wanted]] if wanted in holders else list(same_name)
    if wanted is not None:
        return _with_label(models, _normal(wanted))
    if len(models) == 1:
        return list(models)
    return next(filter(None, (_with_label(models, label) for label in _preferred())), [])


def choose(models: Sequence[GgufModel], wanted: str | None, where: str, size_of: SizeOf) -> GgufModel:
    """Return the one model that `wanted` names; `where` is the repository. size_of: of a file, for messages.

    Raises ModelLoadError, with a list of the models, if there is none or more than one.
    """
    found = candidates(models, wanted)
    if len(found) == 1:
        return found[0]
    if wanted is None:
        reason = f"{where} holds {len(models)} GGUF models, and not exactly one in {' or '.join(_preferred())}"
    elif found:
        reason = f"{where} holds {len(found)} GGUF models that are called {wanted}"
    else:
        reason = f"{where} holds no GGUF model {'' if wanted.endswith(GGUF_SUFFIX) else 'in '}{wanted}"
    listed = found or models
    examples = [f"name one: {where}{name}" for name in names_of(listed).values()][:1]
    raise ModelLoadError("\n  ".join([reason, *describe_models(listed, size_of), *examples]))


def names_of(models: Sequence[GgufModel]) -> dict[GgufModel, str]:
    """Return what follows a repository's name to name each model: `:Q8_0`, or `/file.gguf` if that says too little."""
    return {
        model: f":{model.label}" if model.label and len(_with_label(models, model.label)) == 1 else f"/{model.first}"
        for model in models
    }


def describe_models(
    models: Sequence[GgufModel], size_of: SizeOf, names: Mapping[GgufModel, str] | None = None
) -> list[str]:
    """Return lines that list models with their sizes, the smallest first. names: None: those of `names_of`."""
    if not models:
        return ["it holds no model in GGUF files"]
    names = names or names_of(models)
    sizes = {model: sum(map(size_of, model.files)) for model in models}
    ordered = sorted(models, key=lambda model: sizes[model])
    listed = [f"{names[model].lstrip(':/')} ({format_bytes(sizes[model])})" for model in ordered[:_MAX_LISTED]]
    more = f", and {len(models) - _MAX_LISTED} more" if len(models) > _MAX_LISTED else ""
    return textwrap.wrap(f"it holds {', '.join(listed)}{more}", _LINE_WIDTH, max_lines=4, break_long_words=False)


def gguf_in_directory(directory: Path, wanted: str | None = None) -> Path | None:
    """Return the GGUF file that a directory without safetensors holds, or the `wanted` one; None if it holds none.

    Raises ModelLoadError if it holds several models, or not the wanted one.
    """
    try:
        names = [entry.name for entry in directory.iterdir()]
        files = {name: (directory / name).stat().st_size for name in names if name.endswith(GGUF_SUFFIX)}
        if wanted is None and (not files or has_safetensors(names)):
            return None
    except OSError:
        return None
    models = find_models(files)
    found = models if wanted is None else candidates(models, wanted)
    if len(found) == 1:
        return directory / found[0].first
    if files and not models:
        raise ModelLoadError(
            f"{directory} holds parts of models only: {name_some(sorted(files))}\n  give the model's file"
        )
    lines = describe_models(models, lambda name: files.get(name, 0), {model: model.first for model in models})
    count = f"{len(models)} models" if wanted is None else f"no {wanted}" if not found else f"several {wanted}"
    fixes = [f"name one: {directory / model.first}" for model in models[:1]]
    raise ModelLoadError("\n  ".join([f"{directory} holds {count}", *lines, *fixes]))


def _normal(label: str) -> str:
    return re.sub(r"^FP(?=\d\d)", "F", label.upper())


def _preferred() -> list[str]:
    """Return the quantizations that run among those that are chosen where none is named."""
    return [label for label, formats in _PREFERRED.items() if BLOCK_FORMATS.keys() >= set(formats)]


def _with_label(models: Sequence[GgufModel], label: str) -> list[GgufModel]:
    """Return the models of a quantization; one of the same name by Unsloth counts only if there is no other."""
    exact = [model for model in models if model.label == label]
    return exact or [model for model in models if model.label == f"{_UNSLOTH}{label}"]
