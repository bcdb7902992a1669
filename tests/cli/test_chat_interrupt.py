"""Ctrl-C during a response: it is an exception, and remembered where Python drops that exception."""

from __future__ import annotations

import signal

import pytest

from pagewick.cli.chat import remembered_interrupts


class Careless:
    """Is interrupted in its destructor, where exceptions are ignored."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_raises_keyboard_interrupt() -> None:
    before = signal.getsignal(signal.SIGINT)
    with remembered_interrupts() as was_interrupted:
        assert not was_interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert was_interrupted()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_is_remembered_where_python_drops_the_exception() -> None:
    with remembered_interrupts() as was_interrupted:
        careless = Careless()
        del careless
        assert was_interrupted()
