"""The staging area of a push, and a stream into one."""

from genserve.memory.arena import Arena
from genserve.weights.push.live_push import LivePush
from genserve.weights.push.staging import Staging
from genserve.weights.push.stream import LiveStream
from tests.unit.weights.conftest import MANIFEST


def new_staging() -> Staging:
    return Staging("p1", MANIFEST, Arena.allocate(MANIFEST.total_bytes))


def stream_to(push: LivePush) -> LiveStream:
    """A stream of the present attempt that is cut off at once, and brings bytes nevertheless."""
    stream = LiveStream(push, push.attempt, lambda ended: None, lambda ended, error: None)
    stream.detach()
    return stream
