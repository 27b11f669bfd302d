"""The time limit of a test, where its first alarm does not end it. A plugin."""

import signal
from collections.abc import Generator
from typing import Any, Final

import pytest

from tests.support import patience

_AGAIN_S: Final = 30.0 * patience.SCALE
_SETTINGS: Final = pytest.StashKey[Any]()
_HAS_ENDED: Final = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, Any, Any]:
    """Lets the alarm strike again: an event loop takes it for the error of the task that it interrupts, and runs on."""
    item.stash[_SETTINGS], item.stash[_HAS_ENDED] = settings, False
    done = yield
    if signal.getitimer(signal.ITIMER_REAL)[0] > 0:  # otherwise a thread gives the alarm
        signal.setitimer(signal.ITIMER_REAL, settings.timeout, _AGAIN_S)
    return done


@pytest.hookimpl(wrapper=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> Generator[None, Any, Any]:
    """The limit ends with its test, or at a failure."""
    item.stash[_HAS_ENDED] = True
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """Sets the limit anew after a failure: its fixtures may hang on what the test hung on."""
    settings = item.stash.get(_SETTINGS, None)
    if settings is not None and not settings.func_only and item.stash[_HAS_ENDED]:
        item.ihook.pytest_timeout_set_timer(item=item, settings=settings)
    return (yield)
