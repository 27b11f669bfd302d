"""Where one request goes next, when replicas have failed for it."""

from dataclasses import dataclass
from random import Random

import pytest

from genserve.errors import DrainingError, GenserveError, NoReplicaError, QueueFullError
from genserve.forward import attempts
from genserve.forward.attempts import Attempts
from genserve.forward.destinations import Destinations
from genserve.routing.chain import Chain
from genserve.routing.policies import RoundRobin
from genserve.routing.replica import Replica, Request
from tests.unit.routing.fleets import VERSION, fleet


@dataclass(frozen=True)
class There:
    """A replica to which nothing is sent."""

    address: str
    instance_id: str


class Two(Destinations[There]):  # type: ignore[type-var]
    """Two replicas."""

    wait_ready_s = 0.3
    committed_version = VERSION

    def __init__(self) -> None:
        super().__init__(Chain([RoundRobin(Random(1))]))

    def replicas(self) -> list[Replica]:
        return fleet(0, 0)

    def upstream_at(self, address: str) -> There:
        ((instance_id),) = (each.instance_id for each in fleet(0, 0) if each.address == address)
        return There(address, instance_id)

    def _sent(self, upstream: There, num_sequences: int) -> Replica:
        return next(each for each in fleet(0, 0) if each.address == upstream.address)

    def _ended(self, upstream: There, num_sequences: int) -> None:
        pass


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "PAUSE_S", 0.01)


async def fails(tried: Attempts[There], error: GenserveError, seen: set[str]) -> None:
    """A request that fails everywhere by this error. Raises what it ends with."""
    while True:
        upstream = await tried.next()
        seen.add(upstream.address)
        tried.failed(error, upstream)


async def test_replicas_that_all_shut_down_are_waited_for_and_then_there_is_none() -> None:
    """The error says when to ask again."""
    seen: set[str] = set()
    with pytest.raises(NoReplicaError) as raised:
        await fails(Attempts(Two(), Request()), DrainingError("shuts down"), seen)
    assert len(seen) == 2
    assert raised.value.retry_after_s == 1.0


async def test_when_all_are_full_the_last_one_says_so() -> None:
    """At once: they are there."""
    seen: set[str] = set()
    with pytest.raises(QueueFullError) as raised:
        await fails(Attempts(Two(), Request()), QueueFullError("full", retry_after_s=7.0), seen)
    assert len(seen) == 2
    assert raised.value.retry_after_s == 7.0
