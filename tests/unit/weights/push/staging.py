"""The staging area of a push."""

from genserve.memory.arena import Arena
from genserve.weights.push.staging import Staging
from tests.unit.weights.conftest import MANIFEST


def new_staging() -> Staging:
    return Staging("p1", MANIFEST, Arena.allocate(MANIFEST.total_bytes))
