"""One call to many replicas at once, and the record of the fleet, which all of them get."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from genserve.errors import DrainingError, GenserveError
from genserve.fleet.fleet import Fleet
from genserve.fleet.upstream import ASK_S, Upstream
from genserve.v1 import control_pb2

T = TypeVar("T")


def replica_error(upstream: Upstream, error: GenserveError, more: str = "", **metadata: str) -> GenserveError:
    """The error of a replica, which is named, for a client that has called all; with `more` of it."""
    return type(error)(
        f"replica {upstream.address}: {error.message}{more}",
        violations=error.violations,
        retry_after_s=error.retry_after_s,
        metadata={**error.metadata, **metadata},
    )


async def everywhere(
    replicas: Iterable[Upstream], ask: Callable[[Upstream], Awaitable[T]]
) -> dict[Upstream, T | GenserveError]:
    """The answer of each replica, or its error."""

    async def answer(upstream: Upstream) -> T | GenserveError:
        try:
            return await ask(upstream)
        except GenserveError as error:
            return error.with_traceback(None)

    asked = list(replicas)
    return dict(zip(asked, await asyncio.gather(*map(answer, asked)), strict=True))


def not_asked(fleet: Fleet, asked: dict[Upstream, int]) -> list[Upstream]:
    """Replicas that answer and were not asked since they were lost last; from now on they count as asked. What is asked
    of all also holds for replicas that join before all have answered, so these are to be asked as well."""
    more = [each for each in fleet.answering if asked.get(each) != each.member.num_losses]
    asked |= {each: each.member.num_losses for each in more}
    return more


async def of_all(
    fleet: Fleet, ask: Callable[[Upstream], Awaitable[T]], undo: Callable[[Upstream], Awaitable[None]] | None = None
) -> list[T]:
    """The answers of all replicas that answer, and of those that join meanwhile. If one fails, `undo` is called for
    those that did not, and its error raised, which names it. One that shuts down, or is removed meanwhile, does not
    count: the next run at its address becomes what the fleet is."""

    async def answer(upstream: Upstream) -> T:
        answered = await ask(upstream)
        if answered is not None and upstream.member.engine is not None:
            # Its next report comes later. One that comes while others are still asked is newer than this.
            upstream.member.engine = answered.state  # type: ignore[attr-defined]
        return answered

    asked: dict[Upstream, int] = {}
    outcomes: dict[Upstream, T | GenserveError] = {}
    failures: list[tuple[Upstream, GenserveError]] = []
    while not failures and (more := not_asked(fleet, asked)):
        outcomes |= await everywhere(more, answer)
        outcomes = {up: outcome for up, outcome in outcomes.items() if not leaves(up, outcome)}
        failures = [(up, outcome) for up, outcome in outcomes.items() if isinstance(outcome, GenserveError)]
    if not outcomes:
        raise fleet.none_ready()
    if failures:
        done = [up for up, outcome in outcomes.items() if not isinstance(outcome, GenserveError)]
        if undo is not None:
            await asyncio.shield(everywhere(done, undo))
        upstream, error = failures[0]
        raise replica_error(upstream, error)
    return [outcome for outcome in outcomes.values() if not isinstance(outcome, GenserveError)]


def leaves(upstream: Upstream, outcome: object) -> bool:
    """Whether a replica has failed because it leaves the fleet."""
    return isinstance(outcome, DrainingError) or (isinstance(outcome, GenserveError) and upstream.member.is_gone)


def lacks_record(fleet: Fleet, upstream: Upstream) -> bool:
    """Whether a replica that serves the version of the fleet is to get the record of the fleet. The others are
    told when they serve it: so a record says what its replica was brought to."""
    member, committed = upstream.member, fleet.committed
    if committed is None or member.version is None or not member.version.is_same(committed):
        return False
    if member.record is None or member.record.epoch < fleet.desired.epoch:
        return True
    # What a daemon has read from its disk says of an epoch which version that was, and no more.
    return (member.is_forgetful or not member.is_written) and member.record != fleet.record()


async def write_record(fleet: Fleet) -> None:
    """Writes the record of the fleet to every replica that lacks it. One that does not answer gets it later."""
    await everywhere(
        [each for each in fleet.answering if lacks_record(fleet, each)], lambda each: write_on(fleet, each)
    )


async def write_on(fleet: Fleet, upstream: Upstream) -> None:
    """Writes the record of the fleet to a replica. Raises its error."""
    record = fleet.record()
    if record is not None:
        request = control_pb2.SetFleetStateRequest(fleet=record)
        await upstream.ask(upstream.control.SetFleetState, request, ASK_S)
        upstream.member.keeps(record)
