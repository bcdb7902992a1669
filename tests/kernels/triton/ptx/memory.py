"""Memory of an emulated GPU: accesses are checked to be in bounds, aligned and free of races."""

from __future__ import annotations

import numpy as np

from tests.kernels.triton.ptx.proxies import Proxies
from tests.kernels.triton.ptx.races import History, described
from tests.kernels.triton.ptx.values import BITS, Array, Faulty

_OPERATIONS = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}


class Memory:
    """Bytes from an address on. unit: bytes of the smallest access; allowed: which bytes may be accessed (None: all).

    Stamps say who accesses memory: see races.py. proxies: notes writes, where products of warpgroups read this memory.
    """

    def __init__(
        self,
        data: Array,
        address: int,
        unit: int,
        *,
        name: str,
        allowed: Array | None = None,
        proxies: Proxies | None = None,
    ) -> None:
        self.data, self.address, self.unit, self.name = data, address, unit, name
        self.allowed = None if allowed is None or bool(allowed.all()) else allowed
        self.history, self.proxies = History(-(-len(data) // unit)), proxies
        self._views = {width: data[: len(data) // width * width].view(BITS[8 * width]) for width in (1, 2, 4, 8)}

    def load(self, addresses: Array, width: int, count: int, stamps: Array) -> Array:
        """Return `count` numbers of `width` bytes from each address."""
        places = self._places(addresses, width, count)
        units, stamps = self._units(places, width, stamps)
        self._raise_if(self.history.read(units, stamps), units, stamps, "read")
        found: Array = self._views[width][places]
        return found

    def store(self, addresses: Array, values: Array, stamps: Array) -> None:
        """Write values [accesses, numbers]. Writing what is there already is no race."""
        width, count = values.dtype.itemsize, values.shape[1]
        places = self._places(addresses, width, count)
        view = self._views[width]
        is_new = (view[places] != values).ravel()
        view[places] = values
        if bool((view[places] != values).any()):
            raise Faulty(f"threads write different values to one place of {self.name}")
        units, stamps = self._units(places, width, stamps)
        races = self._note_write(units, stamps)
        if races is not None:
            self._raise_if(races & np.repeat(is_new, width // self.unit), units, stamps, "write")

    def note_write(self, addresses: Array, num_bytes: int, stamps: Array) -> None:
        """Check a write that may come at any time from now on, and note it."""
        places = self._places(addresses, self.unit, num_bytes // self.unit)
        units, stamps = self._units(places, self.unit, stamps)
        self._raise_if(self._note_write(units, stamps), units, stamps, "write")

    def put(self, addresses: Array, values: Array, stamps: Array) -> None:
        """Write values whose write was noted before: from now on, they are there for their own thread."""
        places = self._places(addresses, values.dtype.itemsize, values.shape[1])
        self._views[values.dtype.itemsize][places] = values
        units, stamps = self._units(places, values.dtype.itemsize, stamps)
        self._raise_if(self._note_write(units, stamps), units, stamps, "write")

    def _note_write(self, units: Array, stamps: Array, *, is_atomic: bool = False) -> Array | None:
        if self.proxies is not None:
            self.proxies.note_write(units)
        return self.history.write(units, stamps, is_atomic=is_atomic)

    def units_of_parts(self, addresses: Array) -> Array:
        """Return the units [readers, units] of parts [readers, parts] of 16 bytes."""
        num_units = 16 // self.unit
        units: Array = (addresses - self.address)[..., None] // self.unit + np.arange(num_units)
        return units.reshape(len(addresses), -1)

    def read_parts(self, addresses: Array, units: Array, stamps: Array) -> Array:
        """Return the bytes [readers, parts, 16] of parts. stamps: of the readers."""
        everyone = np.broadcast_to(stamps, units.shape).ravel()
        self._raise_if(self.history.read(units.ravel(), everyone), units.ravel(), everyone, "read")
        found: Array = self._views[8][(addresses - self.address)[..., None] // 8 + np.arange(2)]
        return found.view(np.uint8)

    def before(self, unit: int) -> str:
        """Say which byte a unit begins with, and who has accessed it last."""
        return f"byte {unit * self.unit} of {self.name}; {self.history.before(unit)}"

    def change(self, operation: str, addresses: Array, operands: Array, stamps: Array) -> Array:
        """Carry out atomic operations one after the other, and return what was there before each."""
        width = operands.dtype.itemsize
        places = self._places(addresses, width, 1)
        units, stamps = self._units(places, width, stamps)
        self._raise_if(self._note_write(units, stamps, is_atomic=True), units, stamps, "change")
        numbers, found = self._views[width].view(operands.dtype), np.zeros(len(places), operands.dtype)
        for number, (place, operand) in enumerate(zip(places[:, 0], operands, strict=True)):
            found[number] = numbers[place]
            numbers[place] = operand if operation == "exch" else _OPERATIONS[operation](numbers[place], operand)
        return found

    def _places(self, addresses: Array, width: int, count: int) -> Array:
        """Return the places [accesses, numbers] in a view, or raise for one that may not be accessed."""
        offsets = addresses.astype(np.int64) - self.address
        is_outside = (offsets < 0) | (offsets + width * count > len(self.data))
        if bool(is_outside.any()):
            raise Faulty(f"an access {int(offsets[is_outside][0])} bytes from the begin of {self.name}")
        if bool((addresses.astype(np.int64) % (width * count)).any()):
            raise Faulty(f"an access to {self.name} that is not aligned to its {width * count} bytes")
        places: Array = offsets[:, None] // width + np.arange(count)
        if self.allowed is not None:
            parts = (places.ravel()[:, None] * width + np.arange(width)).ravel()
            if not bool(self.allowed[parts].all()):
                wrong = int(parts[~self.allowed[parts]][0])
                raise Faulty(f"an access to byte {wrong} of {self.name}, which no argument covers")
        return places

    def _units(self, places: Array, width: int, stamps: Array) -> tuple[Array, Array]:
        times = width // self.unit
        units = places.ravel() if times == 1 else (places.ravel()[:, None] * times + np.arange(times)).ravel()
        return units, np.repeat(stamps, times * places.shape[1])

    def _raise_if(self, races: Array | None, units: Array, stamps: Array, what: str) -> None:
        if races is not None and bool(races.any()):
            first = int(np.flatnonzero(races)[0])
            place, who = int(units[first]) * self.unit, described(int(stamps[first]))
            before = self.history.before(int(units[first]))
            raise Faulty(f"a race at byte {place} of {self.name}: {who} {what}s; {before}")
