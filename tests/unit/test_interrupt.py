"""The first signal interrupts, at a safe point; later ones do not disturb the clean-up."""

import os
import signal

import pytest

from lanekit import interrupt
from lanekit.errors import Interrupted


@pytest.mark.parametrize("number", interrupt.SIGNALS)
def test_a_signal_becomes_interrupted_and_names_itself(number: signal.Signals) -> None:
    with pytest.raises(Interrupted, match=f"stopped by {number.name}"), interrupt.raising():
        os.kill(os.getpid(), number)


def test_a_held_interruption_waits_for_the_end_of_the_block() -> None:
    done = []
    with pytest.raises(Interrupted), interrupt.raising():  # noqa: PT012
        with interrupt.held():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("recorded")
        done.append("never")
    assert done == ["recorded"]


def test_a_second_signal_does_not_disturb_the_clean_up() -> None:
    cleaned = []
    with pytest.raises(Interrupted, match="SIGINT"), interrupt.raising():  # noqa: PT012
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            cleaned.append(True)
    assert cleaned


def test_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with interrupt.raising():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
