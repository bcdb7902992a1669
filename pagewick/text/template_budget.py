"""Budget: what one rendering of a chat template may take of time and memory, and how large a value would become.

A template comes with a model or with a request, so it is code from a stranger. Whatever is linear in the size of its
operands is looked at before, and what it makes is counted after: a template without any loop can do much too.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MAX_CHARS = 16 * 2**20  # of one value, and of the whole output
MAX_ITEMS = 2**20  # of a list that the template makes
MAX_STEPS = 1_000_000
MAX_SECONDS = 2.0  # of processor time
MAX_BYTES = 2**29  # of everything that the template makes, kept or not
# Of an item of a list that did not exist before, in bytes: a short text and the place of its address.
ITEM_BYTES = 72
_ITEMS_PER_LOOK = 4096

_PAIRS: type = type({}.items())
_CONTAINERS: tuple[type, ...] = (list, tuple, Mapping, Namespace, type({}.keys()), type({}.values()), _PAIRS)


class Budget:
    """Of one rendering. Its methods raise SecurityError when it is spent."""

    def __init__(self) -> None:
        self._num_steps = MAX_STEPS
        self._num_bytes = MAX_BYTES
        self._deadline = time.thread_time() + MAX_SECONDS

    def step(self) -> None:
        """One step of a loop, or one call of a macro."""
        self._num_steps -= 1
        if self._num_steps < 0:
            raise SecurityError("the template runs too long")
        self.check_time()

    def check_time(self) -> None:
        if time.thread_time() > self._deadline:
            raise SecurityError("the template runs too long")

    def charge(self, num_bytes: int) -> None:
        """So many bytes were made."""
        self._num_bytes -= num_bytes
        if self._num_bytes < 0:
            raise SecurityError(f"the template makes more than {MAX_BYTES} bytes of values")

    def made(self, value: Any, *, has_new_items: bool = False) -> Any:
        """The value, which was just made; refused if it is too long."""
        self.check_time()
        if isinstance(value, str):
            check_size(len(value))
            self.charge(sys.getsizeof(value))
        elif isinstance(value, list | tuple | dict):
            self.charge(sys.getsizeof(value) + (ITEM_BYTES * len(value) if has_new_items else 0))
        return value

    def weigh(self, value: Any) -> int:
        """The number of characters with which a value would be written, roughly; refused above MAX_CHARS.

        A value may hold another many times, and that one others: what is small in memory may be endless as a text.
        """
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, _CONTAINERS):
            return 0
        known: dict[int, int] = {}
        return self._weigh_container(value, known)

    def _weigh_container(self, container: Any, known: dict[int, int]) -> int:
        total = 2
        for number, item in enumerate(_items_of(container)):
            if number % _ITEMS_PER_LOOK == 0:
                self.check_time()
            if isinstance(item, str):
                total += len(item) + 4
            elif not isinstance(item, _CONTAINERS):
                total += 6
            else:
                if (weight := known.get(id(item))) is None:
                    weight = known[id(item)] = self._weigh_container(item, known)
                total += weight
            check_size(total)
        return total

    def listed(self, values: Iterable[Any]) -> list[Any]:
        """What an iterator gives, if it is not too much."""
        found = list(itertools.islice(values, MAX_ITEMS + 1))
        check_items(len(found))
        self.check_time()
        return found


def _items_of(container: Any) -> Iterable[Any]:
    if isinstance(container, Namespace):
        container = container._Namespace__attrs
    are_pairs = isinstance(container, Mapping | _PAIRS)
    items = container.items() if isinstance(container, Mapping) else container
    # The pairs are made on the way, and so have no lasting identity.
    return itertools.chain.from_iterable(items) if are_pairs else items


_budget: ContextVar[Budget] = ContextVar("budget")


@contextmanager
def budget() -> Iterator[None]:
    """Bounds the rendering inside it."""
    token = _budget.set(Budget())
    try:
        yield
    finally:
        _budget.reset(token)


def current() -> Budget:
    """Raises LookupError where nothing is rendered: Jinja then leaves to the rendering what it could compute before."""
    return _budget.get()


def check_size(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise SecurityError(f"a value in the template becomes longer than {MAX_CHARS} characters")


def check_items(num_items: int) -> None:
    if num_items > MAX_ITEMS:
        raise SecurityError(f"a list in the template becomes longer than {MAX_ITEMS} items")
