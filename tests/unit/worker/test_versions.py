"""The threads that prepare and free versions."""

import os
import threading

import pytest

from genserve.worker import versions


@pytest.mark.parametrize(("of_the_worker", "niceness"), [(0, 10), (10, 10), (15, 15)])
def test_a_thread_steps_back_and_is_never_raised(
    monkeypatch: pytest.MonkeyPatch, of_the_worker: int, niceness: int
) -> None:
    """A daemon under `nice` whose user is not root may lower a priority and not raise it."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "getpriority", lambda which, who: of_the_worker)
    monkeypatch.setattr(os, "setpriority", lambda which, who, priority: asked.append((who, priority)))
    versions._step_back(sorted(os.sched_getaffinity(0)))
    assert asked == [(threading.get_native_id(), niceness)]
