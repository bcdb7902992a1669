"""A GPU's stand-in that computes late: nothing that is queued runs before something waits for it, or by chance.

Tensors on it say that they are on cuda:0, but their memory is the host's. An operation on them is queued: its result is
there at once and full of garbage until the operation has run. Copies from and to pinned memory are queued, too, and
read or write that memory when they run. Code that reads a result too early, or changes pinned memory before its copy
has run, computes other tokens, and the tests see it.

Operations for which a GPU makes the host wait run the queue up to that place, and are counted. A captured graph is a
list of operations. All graphs share their memory: a replay fills the results of all others with garbage.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from pagewick import config
from pagewick.engine import engine, model_runner, preflight, streams, worker
from pagewick.engine.cache import kv_cache
from pagewick.kernels import TABLE, reference
from pagewick.kernels.dispatch import Backend
from pagewick.weights import upload
from tests.engine.graph.late_kernels import RESULTS, SHAPES
from tests.kernels.conftest import library_off

DEVICE = torch.device("cuda", 0)
MEMORY_BYTES = 2**30
# NaN, and -1.
GARBAGE = 0xFF

aten = torch.ops.aten
# A GPU cannot know the size of these results, or the value that the host asks for, before it has computed them.
_WAITING = {
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.bincount, aten.unique_consecutive,
    aten._unique2, aten.unique_dim,
}  # fmt: skip
_INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
# They take tensors in memory of the host and of the device.
_MIXING = {*_INDEXING, aten._to_copy, aten.copy_}


class LateTensor(torch.Tensor):
    """A tensor on the device. memory: where its numbers are."""

    memory: Tensor

    @staticmethod
    def __new__(cls, memory: Tensor) -> LateTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, memory.size(), strides=memory.stride(), storage_offset=memory.storage_offset(), dtype=memory.dtype,
            device=DEVICE,
        )  # fmt: skip
        made.memory = memory
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the methods for which PyTorch would ask a CUDA that is not there."""
        with torch._C.DisableTorchFunctionSubclass():
            return _METHODS.get(func, func)(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} after the device is gone")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LateTensor({tuple(self.shape)}, {self.dtype})"


def _get(x: Tensor, index: Any) -> Tensor:
    indices = _advanced(index)
    if indices is None:
        assert isinstance(x, LateTensor)
        return LateTensor(x.memory[index])
    return aten.index(x, indices)  # type: ignore[no-any-return]


def _set(x: Tensor, index: Any, value: Any) -> None:
    indices = _advanced(index)
    values = value if isinstance(value, Tensor) else torch.tensor(value, dtype=x.dtype)
    if indices is None:
        aten.copy_(_get(x, index), values)
    else:
        aten.index_put_(x, indices, values)


def _advanced(index: Any) -> list[Tensor | None] | None:
    """Return the tensors that are an index, and None for each whole dimension; None if it only asks for a view."""
    parts = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(part, Tensor | list) for part in parts):
        return None
    tensors = (part if isinstance(part, Tensor | slice) else torch.tensor(part) for part in parts)
    return [None if isinstance(part, slice) and part == slice(None) else part for part in tensors]


def _contiguous(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


_METHODS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.__getitem__: _get,
    torch.Tensor.__setitem__: _set,
    torch.Tensor.__invert__: lambda x: aten.bitwise_not(x),
    torch.Tensor.contiguous: _contiguous,
    torch.Tensor.nonzero: lambda x: aten.nonzero(x),
    torch.Tensor.item: lambda x: aten._local_scalar_dense(x),
    torch.Tensor.__bool__: lambda x: bool(aten._local_scalar_dense(x)),
    torch.Tensor.__int__: lambda x: int(aten._local_scalar_dense(x)),
    torch.Tensor.__float__: lambda x: float(aten._local_scalar_dense(x)),
    torch.Tensor.tolist: lambda x: aten._to_copy(x, device=torch.device("cpu")).tolist(),
    torch.Tensor.copy_: lambda x, source, non_blocking=False: aten.copy_(x, source, non_blocking),
    # Otherwise, PyTorch refuses views of tensors that were made outside of inference mode.
    torch.Tensor.expand: lambda x, *sizes: LateTensor(x.memory.expand(*sizes)),
    torch.Tensor.view: lambda x, *sizes: LateTensor(x.memory.view(*sizes)),
}


class LateEvent:
    def __init__(self, device: LateDevice, place: int) -> None:
        self._device, self._place = device, place

    @property
    def num_queued_behind(self) -> int:
        """How many operations the device has to do after this place."""
        return self._device.num_queued - self._place

    def synchronize(self) -> None:
        """As torch.cuda.Event.synchronize."""
        self._device.check_allowed("Event.synchronize")
        self._device.counts["event"] += self._device.num_done < self._place
        self._device.run(self._place)


class LateGraph:
    def __init__(self, device: LateDevice, operations: list[Callable[[], None]], results: list[Tensor]) -> None:
        self._device, self._operations, self._results = device, operations, results
        self.num_replays = 0

    def replay(self) -> None:
        """Queue the operations."""
        self.num_replays += 1
        self._device.enqueue(self._run)

    def _run(self) -> None:
        for graph in self._device.graphs:
            for result in graph._results:
                garble(result)
        for operation in self._operations:
            operation()


class LateDevice(TorchDispatchMode):
    """The device and its only queue, which is also the DeviceStream. While it is on, "cuda" means this device.

    chance: of running some of the queue after something has joined it. counts: how often the host had to wait, by the
    operation; "event": for an event. graphs: those that were captured.
    """

    def __init__(self, random: Random, chance: float) -> None:
        super().__init__()
        # PyTorch would look for a GPU if this were another kind of mode.
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE
        self._random, self._chance = random, chance
        self._queue: deque[Callable[[], None]] = deque()
        self._pinned: dict[int, Tensor] = {}
        self._capturing: list[Callable[[], None]] | None = None
        self._refuses_waits = False
        self.num_queued = self.num_done = 0
        self.counts: Counter[str] = Counter()
        self.graphs: list[LateGraph] = []

    # The queue.

    def enqueue(self, operation: Callable[[], None]) -> None:
        if self._capturing is not None:
            self._capturing.append(operation)
            return
        self._queue.append(operation)
        self.num_queued += 1
        if self._random.random() < self._chance:
            self.run(self.num_done + self._random.randint(1, len(self._queue)))

    def run(self, place: int) -> None:
        """Run the queue up to a place."""
        with torch._C._DisableTorchDispatch(), torch.inference_mode():
            while self.num_done < place:
                self._queue.popleft()()
                self.num_done += 1

    def check_allowed(self, what: str) -> None:
        if self._capturing is not None or self._refuses_waits:
            raise RuntimeError(f"{what} waits for the device, which is not permitted here")

    def wait(self, what: str) -> None:
        """Run everything, because the host waits."""
        self.check_allowed(what)
        self.counts[what] += 1
        self.run(self.num_queued)

    # DeviceStream.

    def record_event(self) -> LateEvent:
        return LateEvent(self, self.num_queued)

    @contextmanager
    def refuse_waits(self) -> Iterator[None]:
        self._refuses_waits = True
        try:
            yield
        finally:
            self._refuses_waits = False

    def capture(self, function: Callable[[], Sequence[Tensor]]) -> tuple[Sequence[Tensor], LateGraph]:
        operations = self._capturing = []
        try:
            results = function()
        except RuntimeError:
            # PyTorch fails to end a capture in which something has failed, and this hides the reason.
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
        finally:
            self._capturing = None
        reals = [result.memory for result in results if isinstance(result, LateTensor)]
        assert len(reals) == len(results)
        self.graphs.append(LateGraph(self, operations, reals))
        return results, self.graphs[-1]

    # PyTorch's operations.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        flat, _ = tree_flatten((args, kwargs))
        is_late = any(isinstance(value, LateTensor) for value in flat)
        if not is_late and not any(value == DEVICE for value in flat if isinstance(value, torch.device)):
            return self._on_host(func, args, kwargs)
        packet = func.overloadpacket
        if packet not in _MIXING:
            _check_places(str(packet), flat)
        if packet is aten._to_copy:
            return self._to_copy(args[0], **kwargs)
        if packet is aten.copy_:
            return self._copy(*args, **kwargs)
        if func._schema.name != "aten::lift_fresh" and _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        real_args, real_kwargs = tree_map(_real, (args, kwargs))
        if packet in _INDEXING:
            self._check_indices(str(packet), args)
        if packet in _WAITING or (packet is aten.index and _has_mask(args[1])):
            self.wait(str(packet))
            return tree_map(_late, func(*real_args, **real_kwargs))
        returns = [each.alias_info for each in func._schema.returns]
        if any(alias is not None and not alias.is_write for alias in returns):
            return tree_map(_late, func(*real_args, **real_kwargs))
        if func._schema.is_mutable:
            self.enqueue(lambda: func(*real_args, **real_kwargs))
            return _written(func, args, kwargs)
        outputs = func(*tree_map(_meta, real_args), **tree_map(_meta, real_kwargs))
        made = tree_map(_garbage, outputs)
        if not packet.__name__.startswith(("empty", "new_empty")):
            self.enqueue(lambda: _store(made, func(*real_args, **real_kwargs)))
        return tree_map(_late, made)

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        is_pinned = kwargs.pop("pin_memory", None)
        result = func(*args, **kwargs)
        if is_pinned:
            garble(result)
            # Kept, so that no other memory gets its address.
            self._pinned[result.untyped_storage().data_ptr()] = result
        return result

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _to_copy(self, source: Tensor, *, non_blocking: bool = False, **kwargs: Any) -> Tensor:
        device = kwargs.pop("device", None)
        kwargs.pop("pin_memory", None)
        if not isinstance(source, LateTensor):
            return self._from_host(source, kwargs, non_blocking)
        if device is not None and device.type == "cpu":
            self.wait("copy to the host")
            return aten._to_copy(source.memory, **kwargs)  # type: ignore[no-any-return]
        made = _garbage(aten._to_copy(_meta(source.memory), **kwargs))
        self.enqueue(lambda: _store(made, source.memory))
        return LateTensor(made)

    def _from_host(self, source: Tensor, kwargs: dict[str, Any], non_blocking: bool) -> Tensor:
        if not (non_blocking and self._is_pinned(source)):
            self.wait("copy from ordinary memory")
            return LateTensor(aten._to_copy(source, **kwargs).clone())
        made = torch.empty_like(source, dtype=kwargs.get("dtype") or source.dtype)
        garble(made)
        self.enqueue(lambda: _store(made, source))
        return LateTensor(made)

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        ordinary = [one for one in (target, source) if not isinstance(one, LateTensor) and not self._is_pinned(one)]
        if ordinary or (not non_blocking and not (isinstance(target, LateTensor) and isinstance(source, LateTensor))):
            self.wait("copy to or from ordinary memory")
            ordinary_source = source.clone() if not isinstance(source, LateTensor) else source.memory
            _real(target).copy_(ordinary_source)
            return target
        real_target, real_source = _real(target), _real(source)
        self.enqueue(lambda: _store(real_target, real_source))
        return target

    def _check_indices(self, name: str, args: Any) -> None:
        """Indices and values in ordinary memory are copied first; masks become indices, whose number is unknown."""
        values = [index for index in args[1] if index is not None] + list(args[2:3])
        if any(not isinstance(value, LateTensor) for value in values) or _has_mask(args[1]):
            self.wait(f"{name} with a mask or with tensors of the host")


class CopiesAtOnce:
    """The CopyStream by which weights are loaded."""

    def __init__(self, device: torch.device) -> None:
        pass

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def mark(self) -> CopiesAtOnce:
        return self

    def wait_for_current(self) -> None:
        pass

    wait_on_host = wait_on_device = wait_for_current


def garble(tensor: Tensor) -> None:
    """Fill memory with what nobody may read."""
    if tensor.numel():
        torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8).fill_(GARBAGE)


def _garbage(meta: Tensor) -> Tensor:
    made = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)
    garble(made)
    return made


def _store(targets: Any, sources: Any) -> None:
    flat_targets, flat_sources = tree_flatten(targets)[0], tree_flatten(sources)[0]
    for target, source in zip(flat_targets, flat_sources, strict=True):
        target.copy_(source)


def _real(value: Any) -> Any:
    if isinstance(value, LateTensor):
        return value.memory
    return torch.device("cpu") if value == DEVICE and isinstance(value, torch.device) else value


def _late(value: Any) -> Any:
    return LateTensor(value) if isinstance(value, Tensor) else value


def _meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _check_places(name: str, arguments: Sequence[Any]) -> None:
    """Raise AssertionError for a tensor in memory of the host, unless it is a single number."""
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    if any(isinstance(each, LateTensor) for each in tensors):
        shapes = [tuple(each.shape) for each in tensors if not isinstance(each, LateTensor) and each.dim()]
        assert not shapes, f"{name} of tensors on the device and of others, in memory of the host: {shapes}"


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _is_composite(func: Any) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation that writes to its arguments."""
    names = [each for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    places = {each.name: place for place, each in enumerate(func._schema.arguments)}
    written = [kwargs[each.name] if each.name in kwargs else args[places[each.name]] for each in names]
    return written[0] if len(func._schema.returns) == 1 else tuple(written)


def _real_deeply(value: Any) -> Any:
    """Replace late tensors inside dataclasses, too."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {each.name: _real_deeply(getattr(value, each.name)) for each in dataclasses.fields(value)}
        return dataclasses.replace(value, **changed)
    if isinstance(value, tuple | list):
        parts = [_real_deeply(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return _real(value)


def _kernel(device: LateDevice, name: str) -> Callable[..., Any]:
    """Return an operation that is queued as a whole."""
    definition, names = getattr(reference, name), list(inspect.signature(getattr(reference, name)).parameters)

    def operation(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        real_args, real_kwargs = _real_deeply(args), {key: _real_deeply(value) for key, value in kwargs.items()}
        if (out := given.get("out")) is not None:
            device.enqueue(lambda: _nothing(definition(*real_args, **real_kwargs)))
            return out
        shapes = SHAPES[name](*args, **kwargs)
        made = [_garbage(torch.empty(shape, dtype=dtype, device="meta")) for shape, dtype in shapes]
        device.enqueue(lambda: _store(made, _results(definition(*real_args, **real_kwargs))))
        late = [LateTensor(each) for each in made]
        if name in RESULTS:
            return RESULTS[name](*late)
        return None if not late else late[0] if len(late) == 1 else tuple(late)

    return operation


def _nothing(result: object) -> None:
    """Drop what an operation returns."""


def _results(found: Any) -> Any:
    """Return the tensors among what an operation returns."""
    return found if isinstance(found, Tensor) else [each for each in found or () if each is not None]


@contextmanager
def late_device(seed: int = 0, chance: float = 0.0, without: Collection[str] = ()) -> Iterator[LateDevice]:
    """Engines that start in this block run on the device; the native library is off, as it would be for a GPU.

    without: operations that have no kernel.
    """
    device = LateDevice(Random(seed), chance)
    operations = {name: _kernel(device, name) for name in SHAPES.keys() - without}
    kernels = Backend("late", operations, lambda name, kind, dtype: kind == "cuda")
    with library_off(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(TABLE, "backends", (kernels, *TABLE.backends))
        patch.setattr(streams, "CudaStream", lambda given: device)
        patch.setattr(kv_cache, "available_memory", lambda device="cpu": MEMORY_BYTES)
        patch.setattr(kv_cache, "total_memory", lambda device="cpu": MEMORY_BYTES)
        patch.setattr(upload, "CudaCopyStream", CopiesAtOnce)
        patch.setitem(config.DEFAULT_SWAP_SPACE, "cuda", 0)
        patch.setattr(preflight, "available_memory", lambda device="cpu": MEMORY_BYTES)
        patch.setattr(engine, "select_device", lambda device: None)
        for module in (model_runner, worker):
            patch.setattr(module, "choose_device", lambda requested: requested)
            patch.setattr(module, "torch_device", lambda kind, local_rank: DEVICE)
        TABLE.choose_again()
        # As for PyTorch's own tensors that only pretend: tensors are made on the host first.
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            with device:
                yield device
        finally:
            torch._C._set_only_lift_cpu_tensors(False)
    TABLE.choose_again()
