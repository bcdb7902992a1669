"""Launches a kernel again as Triton has compiled it, without what Triton does before each launch.

Triton binds and classifies every argument, makes a text of all classes, and compares all constants of the module with
those of the compilation: 10 to 45 microseconds, in which a small kernel is done. Here a launch with arguments of the
same kinds finds the compiled kernel by a key.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

import torch

from pagewick.log import get_logger

_logger = get_logger(__name__)
# Kernels that are kept by their keys; all others are launched by Triton. A model has one or two for each variant.
_MAX_KEPT: Final = 256
# Triton compiles a form for addresses that are multiples of 16.
_ALIGNMENT_BITS: Final = 15
_INT32_BITS: Final = 31
# On AMD's GPUs, it compiles another form, with addresses of 32 bits, for memory that is not larger than this.
_SHORT_BYTES: Final = 2**31 - 1
# A launch that takes longer has compiled the kernel; one that Triton has in its cache is loaded within milliseconds.
_COMPILED_S: Final = 0.5


class Launcher:
    """Launches one variant of a kernel: signature, constexprs and options as a Variant has them."""

    def __init__(
        self, kernel: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        self._kernel, self._constexprs, self._options = kernel, dict(constexprs), dict(options)
        # A kernel that is interpreted has no such parameters.
        params = getattr(kernel, "params", ())
        free = {param.name for param in params if param.do_not_specialize}
        self._names = tuple(param.name for param in params)
        self._pointers = tuple(name for name, kind in signature.items() if kind.startswith("*"))
        self._floats = tuple(name for name, kind in signature.items() if kind.startswith("fp"))
        whole = signature.keys() - {*self._pointers, *self._floats}
        self._specialized, self._free = tuple(whole - free), tuple(whole & free)
        self._kept: dict[tuple[object, ...], Any] = {}
        self._driver = import_module("triton.runtime").driver
        self._asks_for_bytes = torch.version.hip is not None

    def launch(self, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
        """Run the kernel. grid: the number of programs in one to three dimensions; arguments: all but constants."""
        if not self._names:
            self.launch_by_triton(grid, arguments)
            return
        key = self._key(arguments)
        compiled = self._kept.get(key)
        if compiled is not None:
            values = {**self._constexprs, **arguments}
            # A compiled kernel takes all arguments of its definition, constants included, in order.
            compiled[(*grid, 1, 1)[:3]](*[values[name] for name in self._names])
            return
        started = time.monotonic()
        compiled = self.launch_by_triton(grid, arguments)
        if time.monotonic() - started > _COMPILED_S:
            _note_compiler()
        if len(self._kept) < _MAX_KEPT:
            self._kept[key] = compiled

    def launch_by_triton(self, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> Any:
        """Run the kernel, and return it as Triton has compiled it for these arguments."""
        return self._kernel[grid](**arguments, **self._constexprs, **self._options)

    def _key(self, arguments: Mapping[str, Any]) -> tuple[object, ...]:
        """Return what decides which form Triton compiles: more than that, never less.

        Triton asks of an address whether it is a multiple of 16, on AMD's GPUs also whether its memory is larger than
        _SHORT_BYTES, and of a whole number whether it fits 32 bits, is 1, or a multiple of 16, unless the kernel says
        do_not_specialize. Other whole numbers are the same for all launches of a model.
        """
        pointers = [arguments[name] for name in self._pointers]
        measured = pointers if self._asks_for_bytes else ()
        return (
            self._driver.active.get_current_device(),
            *[pointer.data_ptr() & _ALIGNMENT_BITS for pointer in pointers],
            *[pointer.dtype for pointer in pointers],
            *[pointer.untyped_storage().nbytes() > _SHORT_BYTES for pointer in measured],
            *[arguments[name] for name in self._specialized],
            *[arguments[name] >> _INT32_BITS for name in self._free],
            *[type(arguments[name]) for name in self._floats],
        )


@functools.cache
def _note_compiler() -> None:
    """Log, once, why the first requests take long."""
    _logger.info(
        "Triton compiles kernels when they are first needed; the first requests wait for it, once for each GPU"
    )
