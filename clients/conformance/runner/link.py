"""The way from a driver to the open daemon, and what is done to it there."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from clients.conformance.runner.cancelled import CancelledCalls
from clients.conformance.runner.corrupted import CorruptChunk
from clients.conformance.runner.cut import CutLink
from clients.conformance.runner.deadline import Deadline
from clients.conformance.runner.ended_pull import EndedPull
from clients.conformance.runner.mutations import MUTATIONS
from clients.conformance.runner.newer import Newer
from clients.conformance.runner.push_meanwhile import PushMeanwhile
from clients.conformance.runner.push_streams import PushStreams
from clients.conformance.runner.refused import RefusedCalls
from clients.conformance.runner.relay import Relay
from clients.conformance.runner.taken_over import TakenOver
from tests.support.fault_proxy import Way


class LinkEvent(Protocol):
    """What must have happened on the way when the driver has ended."""

    def differences(self) -> list[str]:
        """What did not happen, or not as it should."""


class RelayedEvent(LinkEvent, Protocol):
    """One for which calls are relayed."""

    def relay(self, target: str) -> Relay:
        """Makes it happen, or sees it."""


@dataclass(frozen=True, slots=True)
class Meanwhile:
    """What a link may do to the daemon. `serve` serves checkpoint b as the version that is so much higher than the
    served one; `forget` discards the scenario's push, of which `received` tells how many bytes have come."""

    serve: Callable[[int], Awaitable[None]]
    forget: Callable[[], Awaitable[None]]
    received: Callable[[], Awaitable[int]]


@asynccontextmanager
async def link_to(
    daemon: str, asked: Mapping[str, int], mutation: str | None, whole_bytes: int, meanwhile: Meanwhile
) -> AsyncIterator[tuple[str, list[LinkEvent]]]:
    """The address for the driver. `asked`: the link of a scenario, whose push or pull has `whole_bytes`; `mutation`:
    the mistake that the daemon seems to make."""
    async with AsyncExitStack() as stack:
        event: RelayedEvent
        target = daemon
        if mutation is not None:
            daemon = (await stack.enter_async_context(Relay(daemon, MUTATIONS[mutation]))).address
        match dict(asked):
            case {"cut_at_bytes": num_bytes} | {"cut_pull_at_bytes": num_bytes}:
                way = Way.TO_SERVER if "cut_at_bytes" in asked else Way.TO_CLIENT
                between = meanwhile.forget if asked.get("forget") else None
                if "serve" in asked:
                    between = partial(meanwhile.serve, asked["serve"])
                refuse_ms = asked.get("refuse_ms", 0)
                received = meanwhile.received if way is Way.TO_SERVER else None
                cut = CutLink(
                    daemon, way, num_bytes, whole_bytes, refuse_ms=refuse_ms, meanwhile=between, received=received
                )
                await stack.enter_async_context(cut)
                yield cut.address, [cut]
                return
            case {"ended_pull_chunks": num_chunks}:
                event = EndedPull(num_chunks)
            case {"taken_over_at_bytes": num_bytes}:
                event = TakenOver(target, num_bytes)
            case {"taken_over_at_end": _}:
                event = TakenOver(target, None)
            case {"push_streams": num_streams}:
                event = PushStreams(num_streams)
            case {"corrupt_chunk": number}:
                event = CorruptChunk(number, "push")
            case {"corrupt_pulled_chunk": number}:
                event = CorruptChunk(number, "pull")
            case {"cancelled_calls": num_calls}:
                event = CancelledCalls(num_calls)
            case {"deadline_ms": timeout_ms}:
                event = Deadline(timeout_ms)
            case {"refused_calls": num_calls}:
                event = RefusedCalls(num_calls)
            case {"unknown_enums": _}:
                event = Newer()
            case {"padded_bytes": num_bytes}:
                event = Newer(padded_bytes=num_bytes)
            case {"push_at_tokens": num_tokens}:
                event = await stack.enter_async_context(PushMeanwhile(num_tokens, partial(meanwhile.serve, 1)))
            case _:
                yield daemon, []
                return
        relay = await stack.enter_async_context(event.relay(daemon))
        yield relay.address, [event]
