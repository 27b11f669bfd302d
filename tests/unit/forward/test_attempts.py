"""Where one request goes next, when replicas have failed for it."""

from dataclasses import dataclass
from random import Random

import pytest

from genserve.errors import (
    DrainingError,
    EngineDeadError,
    GenserveError,
    NoReplicaError,
    QueueFullError,
    ReplicaLostError,
    UnavailableError,
)
from genserve.forward import attempts
from genserve.forward.attempts import MAX_LOST, Attempts
from genserve.forward.destinations import Destinations
from genserve.routing.chain import Chain
from genserve.routing.policies import RoundRobin
from genserve.routing.replica import Replica, Request
from tests.support.clocks import advanced_clock
from tests.unit.routing.fleets import VERSION, fleet


@dataclass(frozen=True)
class There:
    """A replica to which nothing is sent."""

    address: str
    instance_id: str


class Some(Destinations[There]):  # type: ignore[type-var]
    """So many replicas, of which nobody knows whether they live, but for those in `living` and `dead`."""

    wait_ready_s = 0.3
    committed_version = VERSION

    def __init__(self, count: int = 2) -> None:
        super().__init__(Chain([RoundRobin(Random(1))]))
        self._replicas = fleet(*[0] * count)
        self.living: set[str] = set()
        self.dead: set[str] = set()

    def replicas(self) -> list[Replica]:
        return self._replicas

    def lives(self, instance_id: str, address: str) -> bool | None:
        return instance_id in self.living if instance_id in self.living | self.dead else None

    def upstream_at(self, address: str) -> There:
        return There(address, self._at(address).instance_id)

    def _at(self, address: str) -> Replica:
        return next(each for each in self._replicas if each.address == address)

    def _sent(self, upstream: There, num_sequences: int) -> Replica:
        return self._at(upstream.address)

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
        await fails(Attempts(Some(), Request()), DrainingError("shuts down"), seen)
    assert len(seen) == 2
    assert raised.value.retry_after_s == 1.0


async def test_when_all_are_full_the_last_one_says_so() -> None:
    """At once: they are there."""
    seen: set[str] = set()
    with pytest.raises(QueueFullError) as raised:
        await fails(Attempts(Some(), Request()), QueueFullError("full", retry_after_s=7.0), seen)
    assert len(seen) == 2
    assert raised.value.retry_after_s == 7.0


async def loses_some(tried: Attempts[There], error: GenserveError) -> list[There]:
    """A request with which so many replicas are lost that it may be why."""
    lost = []
    for _ in range(MAX_LOST):
        lost.append(await tried.next())
        tried.failed(error, lost[-1])
    return lost


async def test_one_that_may_be_why_replicas_die_waits_for_one_of_them() -> None:
    """A connection broke, then, and no more."""
    some = Some(MAX_LOST + 1)
    tried = Attempts(some, Request())
    lost = await loses_some(tried, UnavailableError("cut"))
    assert tried.choose() is None
    some.living.add(lost[1].instance_id)
    assert (await tried.next()).instance_id not in {each.instance_id for each in lost}


async def test_it_waits_no_longer_than_for_any_replica() -> None:
    """The error names those that did not come back."""
    tried = Attempts(Some(MAX_LOST + 1), Request())
    lost = await loses_some(tried, UnavailableError("cut"))
    with pytest.raises(ReplicaLostError, match="may have died of it: ") as raised:
        await tried.next()
    assert all(each.address in raised.value.message for each in lost)


async def test_it_waits_though_another_one_is_full() -> None:
    """Who is told QUEUE_FULL sends it again, as if nothing had happened. One that is back may take it."""
    some = Some(MAX_LOST + 1)
    tried = Attempts(some, Request())
    tried.failed(QueueFullError("full"), await tried.next())
    lost = await loses_some(tried, UnavailableError("cut"))
    assert tried.choose() is None
    some.living.add(lost[0].instance_id)
    await tried.next()


async def test_it_ends_when_they_are_known_to_have_died() -> None:
    """Others have told so meanwhile."""
    some = Some(MAX_LOST + 1)
    tried = Attempts(some, Request())
    some.dead = {each.instance_id for each in await loses_some(tried, UnavailableError("cut"))}
    with pytest.raises(ReplicaLostError, match="died with this request"):
        await tried.next()


@pytest.mark.parametrize("has_begun", [False, True])
async def test_engines_that_say_that_they_have_died_are_believed(*, has_begun: bool) -> None:
    """At once, though their daemons may still answer."""
    some = Some(MAX_LOST + 1)
    some.living = {each.instance_id for each in some.replicas()}
    tried = Attempts(some, Request())
    for _ in range(MAX_LOST - 1):
        tried.failed(EngineDeadError("dead"), await tried.next())
    last, dead = await tried.next(), EngineDeadError("dead")
    with pytest.raises(ReplicaLostError, match="died with this request"):
        tried.begin_again(dead, last, 1, VERSION) if has_begun else tried.failed(dead, last)


async def test_a_request_that_has_run_for_long_waits_as_long_as_a_new_one() -> None:
    """Its only replica is away for a moment."""
    with advanced_clock() as clock:
        tried = Attempts(Some(1), Request())
        upstream = await tried.next()
        await clock.advance(3600.0)
        tried.failed(UnavailableError("cut"), upstream)
        assert await tried.next() == upstream
