"""The time limit of a test, where its first alarm is not heard. A plugin."""

import signal
from collections.abc import Generator
from typing import Any, Final

import pytest

from tests.support import patience

_AGAIN_S: Final = 30.0 * patience.SCALE


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(settings: Any) -> Generator[None, Any, Any]:
    """Lets the alarm strike again: an event loop takes it for the error of the task that it interrupts, and runs on."""
    done = yield
    if signal.getitimer(signal.ITIMER_REAL)[0]:  # otherwise a thread gives the alarm
        signal.setitimer(signal.ITIMER_REAL, settings.timeout, _AGAIN_S)
    return done
