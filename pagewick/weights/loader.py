"""Stream a checkpoint's tensors into a model. Knows no concrete model, no format and no quantization.

A module that owns weights lists the checkpoint tensors that it needs (`expected_weights`) and stores each of them
(`load_weight`), cut and fused as it likes. The loader routes tensors to modules by the names of the model's modules.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from pagewick.errors import ModelLoadError
from pagewick.quantization.weight import Pieces
from pagewick.weights.progress import Progress
from pagewick.weights.same_tensors import check_zeros
from pagewick.weights.source import TensorSource
from pagewick.weights.tensor_check import check_names, spare_biases
from pagewick.weights.upload import Upload


@runtime_checkable
class OwnsWeights(Protocol):
    """A module with weights of its own. It may have `finish_loading()`, which is called after all are loaded.

    It may list further tensors with `optional_weights()`, which it gets if the checkpoint has them; the model's
    `ignored_weights` match their names. It may also have `load_in_pieces(name, tensor, part, pieces)`, which is called
    instead of `load_weight`, and which reads the tensor as `pieces` says: rows that it will not read again need not
    stay in memory until it has read all.
    """

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        """Return (part, leaf) of every checkpoint tensor that the module must get.

        For the module `model.layers.0.self_attn.qkv_proj`, (None, "weight") is the tensor
        `model.layers.0.self_attn.qkv_proj.weight`; ("q_proj", "weight") is a fused module's part, whose name
        replaces the module's: `model.layers.0.self_attn.q_proj.weight`.
        """
        ...

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        """Copy the part that this rank needs of a whole checkpoint tensor; `name` is the leaf.

        Raises ModelLoadError with both shapes if it does not fit; the loader adds the tensor's full name.
        """
        ...


# Norms, biases and the like. To look at every number of large tensors would take as long as reading them.
_SMALL = 2**16


class Route(NamedTuple):
    """Where a tensor of a checkpoint is loaded: the module, and the part and the leaf that the module lists."""

    module: OwnsWeights
    part: str | None
    leaf: str


def load_weights(
    model: nn.Module,
    source: TensorSource,
    *,
    ignore: Sequence[str] = (),
    progress: Progress | None = None,
    upload: Upload | None = None,
) -> list[tuple[str, float]]:
    """Load every weight of `model` from `source`, then call `finish_loading()` where a module has it.

    upload: brings pieces to the model's device; None: the modules copy them there.
    Returns the seconds that "weights" (reading and placing them) and "repack" (`finish_loading`) took.

    `model` may list modules that another process holds as `absent`: their tensors must be there, and are not read.
    A tensor that no module expects is an error, unless its name fully matches a regular expression in
    `ignore` or in the model's `ignored_weights` (tensors that no model needs, such as rotary inv_freq), or it is a bias
    of zeros. A model whose files use other names has `name_in_file`, which translates its own names to theirs. Names
    are compared before anything is read. Raises ModelLoadError for missing or unexpected tensors, for wrong shapes or
    dtypes, and for small tensors with a NaN or plus infinity; large ones with them are found out by a request's logits.
    """
    started = time.monotonic()
    routes = build_routes(model)
    check_names(routes.keys(), source.names(), [*ignore, *getattr(model, "ignored_weights", ())])
    check_zeros(source, spare_biases(routes.keys(), source.names()))
    routes = {**build_routes(model, "optional_weights"), **routes}
    progress, pieces = progress or Progress(), pieces_of(source, upload)
    elsewhere = {id(part) for module in getattr(model, "absent", ()) for part in module.modules()}
    names = [name for name in source.names() if name in routes and id(routes[name].module) not in elsewhere]
    progress.start("loading weights", sum(_num_bytes(source, name) for name in names))
    try:
        for name in names:
            tensor, route = source.get(name), routes[name]
            try:
                _check_numbers(tensor, takes_infinity=getattr(route.module, "takes_infinity", False))
                if callable(load := getattr(route.module, "load_in_pieces", None)):
                    load(route.leaf, tensor, route.part, pieces)
                else:
                    route.module.load_weight(route.leaf, tensor, route.part)
            except ModelLoadError as error:
                raise ModelLoadError(f"cannot load {name}: {error}") from error
            source.release(tensor)
            progress.advance(_num_bytes(source, name))
    finally:
        progress.stop()
    loaded = time.monotonic()
    for module in model.modules():
        if id(module) in elsewhere:
            continue
        if callable(finish := getattr(module, "finish_loading", None)):
            finish()
    return [("weights", loaded - started), ("repack", time.monotonic() - loaded)]


def pieces_of(source: TensorSource, upload: Upload | None) -> Pieces:
    """Return how a source's tensors are read, for a device to which `upload` brings them."""
    if upload is None:
        return Pieces(release=source.release)
    return Pieces(upload.num_bytes, upload.take, source.release)


def build_routes(model: nn.Module, listing: str = "expected_weights") -> Mapping[str, Route]:
    """Map the name of each checkpoint tensor that this method of a module lists to the module."""
    name_in_file: Callable[[str], str] = getattr(model, "name_in_file", str)
    routes: dict[str, Route] = {}
    for path, module in model.named_modules():
        if not isinstance(module, OwnsWeights) or not hasattr(module, listing):
            continue
        for part, leaf in getattr(module, listing)():
            owner = path if part is None else ".".join([*path.split(".")[:-1], part])
            name = name_in_file(f"{owner}.{leaf}" if owner else leaf)
            assert name not in routes, f"two modules expect {name}"
            routes[name] = Route(module, part, leaf)
    return routes


def _check_numbers(tensor: Tensor, *, takes_infinity: bool) -> None:
    """Raise ModelLoadError for a small tensor with a number that makes every result a NaN.

    Minus infinity may be meant: an expert with such a bias is never chosen. takes_infinity: so may infinity.
    """
    if tensor.numel() > _SMALL or not tensor.is_floating_point() or tensor.element_size() == 1:
        return
    if bool(tensor.isnan().any() or (not takes_infinity and tensor.isposinf().any())):
        raise ModelLoadError(
            "it holds a NaN or infinity, with which the model would compute nothing else\n"
            "  download the model again; if it was trained or converted here, use an earlier checkpoint"
        )


def _num_bytes(source: TensorSource, name: str) -> int:
    return prod(source.shape(name)) * source.dtype(name).itemsize
