"""A model's description and the headers of its files, wherever it is: built in, a directory, a GGUF file, or a hub.

If a model is on a hub and not in the cache, only config.json, the index and the headers of the weights are fetched.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pagewick.doctor.stored import described_tensors
from pagewick.doctor.support import Verdict, read_model, refusal
from pagewick.errors import ModelLoadError, ModelNotFoundError, PagewickError
from pagewick.log import printable
from pagewick.models.config import ModelConfig
from pagewick.models.mtp_offers import with_mtp
from pagewick.models.tensors import model_tensors
from pagewick.quantization.plan import QuantizationPlan, plan_quantization
from pagewick.weights import files
from pagewick.weights import hub as hubs
from pagewick.weights.dense_tensors import checkpoint_tensors, with_dense_tensors
from pagewick.weights.description import GGUF, directory_config, is_gguf
from pagewick.weights.gguf.checkpoint import GgufCheckpoint, open_gguf
from pagewick.weights.gguf.vision_choice import vision_of
from pagewick.weights.hub_settings import HubSettings
from pagewick.weights.packed.config import quant_method
from pagewick.weights.packed.headers import logical_tensors
from pagewick.weights.remote_description import (
    read_remote,
    read_remote_config,
    remote_gguf_with_images,
    remote_module_files,
)
from pagewick.weights.tensor_headers import (
    TensorInfo,
    gguf_tensors,
    in_formats,
    kept_blocks,
    parse_safetensors_header,
    remote_tensors,
    with_stored_dtype,
)

if TYPE_CHECKING:
    from pagewick.weights.remote import RemoteRepository

# Endings of files that hold weights or list them; the code that reads weights refuses some of these, with a reason.
_MAX_NAME_CHARS: Final = 80
_WEIGHTS: Final = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model without its weights.

    where: a directory, a file or an address, for people. config: config.json, or a GGUF file's metadata in its terms.
    model_config: the model that config describes; None if Pagewick does not run such a model, and verdict says why.
    tensors: the headers of those that are loaded; all headers if model_config is None. ignored: those of others.
    file_names: all files that lie beside the weights. is_downloaded: whether they are on this disk. is_only_described:
    there are no weights, and the tensors follow from config.json. plan: how the weights are quantized at load, if they
    are.
    """

    model: str
    where: str
    config: Mapping[str, Any]
    model_config: ModelConfig | None
    verdict: Verdict
    tensors: tuple[TensorInfo, ...]
    file_names: frozenset[str] = frozenset()
    is_gguf: bool = False
    is_downloaded: bool = True
    is_only_described: bool = False
    plan: QuantizationPlan | None = None
    ignored: tuple[TensorInfo, ...] = ()

    @property
    def kept_tensors(self) -> tuple[TensorInfo, ...]:
        """The tensors as they are in memory."""
        return self.tensors if self.plan is None else in_formats(self.tensors, self.plan.formats)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def is_quantized(self) -> bool:
        """Whether linear weights are stored in another form than as numbers of one dtype."""
        return self.is_gguf or any(tensor.label for tensor in self.tensors)

    @property
    def kind(self) -> str:
        """The word for the weights that EngineConfig.for_weights takes."""
        return GGUF if self.is_gguf else quant_method(self.config)

    @property
    def architecture(self) -> str:
        """The name in the registry, or as config.json has it if Pagewick does not run the model."""
        if self.model_config is not None:
            return self.model_config.architecture
        names = self.config.get("architectures") or [self.config.get("model_type")]
        # A line break in a name would forge lines of the report.
        return printable(str(names[0] if isinstance(names, list) and names else names)[:_MAX_NAME_CHARS])


def quantized_at_load(checkpoint: Checkpoint, mix: str) -> Checkpoint:
    """Return the checkpoint with a plan to quantize it. Raises ConfigError if it is quantized already."""
    model = checkpoint.model_config
    if model is None or not checkpoint.verdict.runs:
        return checkpoint
    names = [one.name for one in checkpoint.tensors]
    shapes = {tensor.name: tensor.shape for tensor in model_tensors(replace(model, has_mtp=False), names)}
    beside = {tensor.name: tensor.shape for tensor in model_tensors(model, names) if tensor.name not in shapes}
    plan = plan_quantization(mix, shapes, kept_blocks(checkpoint.tensors, mix), model, beside)
    return replace(checkpoint, plan=plan)


def with_predicting_layer(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the layer that predicts further tokens. Raises ConfigError if there is none."""
    model = checkpoint.model_config
    if model is None or not checkpoint.verdict.runs:
        return checkpoint
    if checkpoint.is_only_described:
        # config.json does not say whether files will have it.
        names = [tensor.name for tensor in model_tensors(replace(model, has_mtp=True))]
        model = with_mtp(model, names)
        return replace(checkpoint, model_config=model, tensors=tuple(described_tensors(model, checkpoint.config)))
    names = [tensor.name for tensor in (*checkpoint.tensors, *checkpoint.ignored)]
    model = with_mtp(model, names)
    wanted = {tensor.name for tensor in model_tensors(model, names)}
    found = (tensor for tensor in checkpoint.ignored if tensor.name in wanted)
    return replace(checkpoint, model_config=model, tensors=(*checkpoint.tensors, *found))


def open_checkpoint(
    model: str, environ: Mapping[str, str], *, revision: str | None = None, hub: str = hubs.DEFAULT_HUB
) -> Checkpoint:
    """Look at a model. Raises ModelLoadError if it is missing or its files are malformed, ConfigError as hubs do."""
    path = hubs.path_of(model)
    if path.is_file() and path.suffix == ".safetensors":
        return _of_directory(model, path.parent)
    found = hubs.local_model(model)
    if found is None:
        wanted = hubs.parse_id(model, revision, hub)
        settings = hubs.hub_settings(hub, environ)
        revision = revision or settings.default_revision
        found = _cached(settings, wanted, revision)
        if found is None:
            return _of_repository(model, hubs.open_repository(settings, wanted.repository, revision), wanted.gguf)
    return _of_gguf(model, open_gguf(found, vision_of(found, None))) if is_gguf(found) else _of_directory(model, found)


def _of_directory(model: str, directory: Path) -> Checkpoint:
    names = sorted(entry.name for entry in directory.iterdir())
    config = directory_config(directory)
    if not any(name.endswith(_WEIGHTS) for name in names):
        return _only_described(model, directory, config, names)
    return _with_headers(model, str(directory), config, checkpoint_tensors(directory, config), names)


def _only_described(model: str, directory: Path, config: Mapping[str, Any], names: Iterable[str]) -> Checkpoint:
    model_config, verdict = read_model(config)
    tensors: tuple[TensorInfo, ...] = ()
    try:
        tensors = () if model_config is None else tuple(described_tensors(model_config, config))
    except PagewickError as error:
        verdict = refusal(error)
    return Checkpoint(
        model, str(directory), config, model_config, verdict, tensors, frozenset(names), is_downloaded=False,
        is_only_described=True,
    )  # fmt: skip


def _with_headers(
    model: str,
    where: str,
    config: Mapping[str, Any],
    tensors: Collection[TensorInfo],
    file_names: Iterable[str],
    *,
    is_downloaded: bool = True,
) -> Checkpoint:
    config = with_stored_dtype(config, tensors)
    model_config, verdict = read_model(config)
    try:
        tensors = logical_tensors(config, tensors).tensors
    except PagewickError as error:
        verdict = refusal(error) if verdict.runs else verdict
    model_config = model_config and model_config.fitted([tensor.name for tensor in tensors])
    patterns = [re.compile(pattern) for pattern in (() if model_config is None else model_config.ignored_tensors)]
    ignored = {tensor.name for tensor in tensors if any(pattern.fullmatch(tensor.name) for pattern in patterns)}
    loaded, others = (
        tuple(tensor for tensor in tensors if (tensor.name in ignored) is is_ignored) for is_ignored in (False, True)
    )
    return Checkpoint(
        model, where, config, model_config, verdict, loaded, frozenset(file_names), is_downloaded=is_downloaded,
        ignored=others,
    )  # fmt: skip


def _of_gguf(model: str, gguf: GgufCheckpoint, *, is_downloaded: bool = True) -> Checkpoint:
    try:
        config = gguf.config
        model_config, verdict = read_model(config)
        if model_config is None:
            verdict = replace(verdict, reason=gguf.reworded(verdict.reason))
        tensors = tuple(gguf_tensors(gguf))
    except ModelLoadError as error:
        config, model_config, verdict = {"architectures": [gguf.kind]}, None, refusal(error)
        tensors = tuple(TensorInfo(t.name, t.format.name, t.shape, t.num_bytes) for t in gguf.tensors)
    return Checkpoint(
        model, gguf.where, config, model_config, verdict, tensors, is_gguf=True, is_downloaded=is_downloaded
    )


def _cached(settings: HubSettings, wanted: hubs.ModelId, revision: str) -> Path | None:
    """Return the complete model in the cache. Raises ModelNotFoundError if it is missing and no hub may be asked."""
    found = settings.find_cached(wanted.repository, revision, wanted.gguf)
    if found is None and settings.offline:
        raise ModelNotFoundError(
            f"HF_HUB_OFFLINE is set, and {wanted} is not in the cache\n  unset it to ask the hub about the model"
        )
    return found


def _of_repository(model: str, repository: RemoteRepository, gguf: str | None) -> Checkpoint:
    names = repository.names
    if (chosen := hubs.choose_gguf(repository, gguf)) is not None:
        return _of_gguf(model, remote_gguf_with_images(repository, chosen), is_downloaded=False)
    files.require_config(names, model)
    config = read_remote_config(repository)
    index = read_remote(repository, files.INDEX_NAME, files.read_index) if files.needs_index(names) else None
    tensors = remote_tensors(names, repository.size, repository.open, index, model)

    def tensors_of(name: str) -> list[TensorInfo]:
        return parse_safetensors_header(repository.open(name), repository.size(name), f"{model}/{name}")

    tensors = with_dense_tensors(tensors, config, remote_module_files(repository), tensors_of)
    return _with_headers(model, f"the hub's {model}", config, tensors, names, is_downloaded=False)
