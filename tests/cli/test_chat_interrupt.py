"""Ctrl-C during an answer: an exception, and remembered where Python drops that."""

from __future__ import annotations

import signal

import pytest

from pagewick.cli.chat import remembered_interrupts


class Careless:
    """Is interrupted in its destructor, where exceptions are ignored."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_it_is_an_exception_as_ever() -> None:
    before = signal.getsignal(signal.SIGINT)
    with remembered_interrupts() as was_interrupted:
        assert not was_interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert was_interrupted()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_it_is_not_forgotten_where_python_drops_it() -> None:
    with remembered_interrupts() as was_interrupted:
        careless = Careless()
        del careless
        assert was_interrupted()
