"""How many streams may watch one thing."""

from contextlib import ExitStack

from genserve.errors import QueueFullError
from genserve.rpc.watchers import Watchers
from tests.support.refusals import refuses


def test_1024_streams_may_watch_one_thing() -> None:
    """Each wakes up at every change: there is an end, and whoever meets it may come again in a second."""
    with ExitStack() as joined:
        watchers = Watchers("health")
        for _ in range(1024):
            joined.enter_context(watchers.joined())
        with refuses(QueueFullError, says="health") as full:
            joined.enter_context(watchers.joined())
    assert full.value.retry_after_s == 1.0
