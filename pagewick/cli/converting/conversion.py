"""convert: writes a model as a GPTQ, AWQ or Marlin checkpoint. It is the function behind `pagewick convert`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pagewick
from pagewick.cli.converting.calibrating import Calibration
from pagewick.cli.converting.repacking import Repacking, check_marlin, planned_repacking
from pagewick.cli.converting.text import calibration_tokens
from pagewick.errors import ConfigError
from pagewick.models.registry import read_config
from pagewick.quantization.calibrated.results import Method, Recipe
from pagewick.weights.description import check_is_model, is_gguf
from pagewick.weights.files import CONFIG_NAME, read_json_object
from pagewick.weights.packed.awq import AwqFormat
from pagewick.weights.packed.config import with_rules
from pagewick.weights.packed.gptq import GptqFormat
from pagewick.weights.packed.integer_format import IntegerFormat
from pagewick.weights.packed.marlin import MarlinFormat
from pagewick.weights.progress import Progress
from pagewick.weights.safetensors import SafetensorsSource
from pagewick.weights.unfinished import UnfinishedCheckpoint, check_place, unfinished_checkpoint

LAYOUTS: Final = ("gptq", "awq", "marlin")
# The method of a layout, unless another is chosen.
_METHODS: Final[Mapping[str, Method]] = {"gptq": "gptq", "awq": "awq", "marlin": "gptq"}
_NUM_TOKENS: Final = 4096
_VERSION: Final = 1  # of what a part holds
_HEAD_BYTES: Final = 2**20


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The checkpoint to write. None stands for the layout's default, or what a packed source has.

    to: gptq, awq or marlin. method: gptq, awq or rtn. text: the file to calibrate on; None: the built-in text. seed:
    chooses the text's parts. is_resumed: whether what an interrupted run has written is used. typed: the options of
    the command line, by name, each as it was written there: only these are refused if they have no effect.
    """

    to: str
    method: Method | None = None
    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    act_order: bool = False
    text: Path | None = None
    num_tokens: int | None = None
    seed: int | None = None
    is_resumed: bool = True
    typed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Converted:
    """label: the format's name for people. num_bytes: of the directory. num_weights: that are packed."""

    label: str
    num_bytes: int
    num_weights: int


def convert(
    source: Path, target: Path, wanted: Conversion, *, progress: Progress, note: Callable[[str], None]
) -> Converted:
    """Write the model in the directory `source` to the directory `target`, which appears when it is complete.

    A checkpoint with packed weights is repacked: its numbers stay the same. Others are quantized. note: gets lines for
    people. Raises ConfigError and ModelLoadError, whose messages name cause and fix.
    """
    if is_gguf(source):
        raise ConfigError(
            f"{source} is a GGUF file, and --to {wanted.to} reads safetensors\n"
            "  give the checkpoint that it was made from, or write GGUF: --to gguf"
        )
    check_is_model(source)
    check_place(target)
    with SafetensorsSource(source, has_modules=False) as checkpoint:
        repacking = planned_repacking(checkpoint, source, wanted.to)
        job: Repacking | Calibration
        if repacking is not None:
            job = repacking
            _check_kept(repacking, wanted)
        else:
            job = _planned_calibration(checkpoint, source, wanted)
        key = {"format": job.form.label, **_state(source), **job.key}
        with unfinished_checkpoint(
            target, key, job.num_parts, job.num_bytes, is_resumed=wanted.is_resumed
        ) as unfinished:
            if unfinished.done:
                note(f"{len(unfinished.done)} of {job.num_parts} parts are there already: {unfinished.directory}")
            _run(job, unfinished, progress, note)
            for remark in job.remarks(unfinished):
                note(remark)
            num_weights = len(job.packed(unfinished))
            config = with_rules(read_json_object(source / CONFIG_NAME), job.entries(unfinished))
            return Converted(job.form.label, unfinished.finish(config, source), num_weights)


def _run(
    job: Repacking | Calibration, unfinished: UnfinishedCheckpoint, progress: Progress, note: Callable[[str], None]
) -> None:
    try:
        job.run(unfinished, progress)
    except KeyboardInterrupt:
        if unfinished.done:
            done = f"{len(unfinished.done)} of {job.num_parts} parts"
            note(f"stopped: {unfinished.directory} keeps {done}; the same command goes on from there")
        raise


def _planned_calibration(source: SafetensorsSource, path: Path, wanted: Conversion) -> Calibration:
    recipe = _recipe(wanted)
    job = Calibration(source, _form(wanted.to, recipe), recipe, ())
    job.check()
    if recipe.method == "rtn":
        return job
    longest = read_config(source.config()).max_position_embeddings
    tokens = calibration_tokens(wanted.text, path, recipe.num_tokens, longest, wanted.seed or 0)
    return Calibration(source, job.form, recipe, tokens)


def _recipe(wanted: Conversion) -> Recipe:
    """Return the numbers of a conversion. Raises ConfigError if the layout, or the method, does not have them."""
    bits = 4 if wanted.bits is None else wanted.bits
    size = 128 if wanted.group_size is None else wanted.group_size
    symmetric = wanted.to != "awq" if wanted.symmetric is None else wanted.symmetric
    method = wanted.method or _METHODS[wanted.to]
    act_order = wanted.act_order and (method == "gptq" or "act_order" in wanted.typed)
    num_tokens = _NUM_TOKENS if wanted.num_tokens is None or method == "rtn" else wanted.num_tokens
    recipe = Recipe(
        method=method, bits=bits, group_size=size, symmetric=symmetric, num_tokens=num_tokens,
        # Only GPTQ's layout can say which columns form a group.
        act_order=act_order, static_groups=act_order and wanted.to != "gptq",
    )  # fmt: skip
    if wanted.to == "awq" and bits != 4:
        raise ConfigError(f"AWQ checkpoints have 4 bits, not {bits}\n  leave out --bits, or choose --to gptq")
    if wanted.to == "marlin":
        check_marlin(bits, size, is_symmetric=symmetric, has_order=False)
    return recipe


def _form(to: str, recipe: Recipe) -> IntegerFormat:
    if to == "awq":
        return AwqFormat(recipe.group_size)
    if to == "marlin":
        return MarlinFormat(recipe.group_size)
    # Zero points of 0 occur, which only the second version of the format can store.
    return GptqFormat(
        recipe.bits, recipe.group_size, recipe.symmetric, recipe.act_order and recipe.group_size != -1,
        1 if recipe.symmetric else 0,
    )  # fmt: skip


def _check_kept(repacking: Repacking, wanted: Conversion) -> None:
    """Raise ConfigError for options on the command line that contradict the numbers of a packed checkpoint."""
    form = repacking.form
    asked = {
        "bits": (wanted.bits, form.num_bits),
        "group": (wanted.group_size, form.group_size),
        "method": (wanted.method, None),
        "text": (wanted.text, None),
        "num_tokens": (wanted.num_tokens, None),
        "seed": (wanted.seed, None),
        "act_order": (wanted.act_order, None),
        "sym": (wanted.symmetric, None),
    }
    for name, (given, there) in asked.items():
        if name in wanted.typed and given != there:
            flag = wanted.typed[name]
            words = flag if isinstance(given, bool) else f"{flag} {given}"
            has = "nothing is calibrated" if there is None else f"its weights have {there}"
            raise ConfigError(
                f"{words} has no effect: the checkpoint is quantized already, and {has}\n"
                f"  leave out {flag}: repacking keeps every number; or convert the original"
            )


def _state(source: Path) -> dict[str, str]:
    """Return texts that change if another checkpoint is converted, or if another version of Pagewick converts it."""
    hasher = hashlib.blake2b(digest_size=16)
    for path in sorted([*source.glob("*.safetensors"), source / CONFIG_NAME]):
        with path.open("rb") as file:
            hasher.update(json.dumps([path.name, path.stat().st_size, path.stat().st_mtime_ns]).encode())
            hasher.update(hashlib.blake2b(file.read(_HEAD_BYTES)).digest())
    return {"source": f"{source.resolve()} {hasher.hexdigest()}", "version": f"{pagewick.__version__} {_VERSION}"}
