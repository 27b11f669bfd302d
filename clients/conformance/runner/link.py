"""The way from a driver to the open daemon, and what is done to it there."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from clients.conformance.runner.cancelled import CancelledCalls
from clients.conformance.runner.corrupted import CorruptChunk
from clients.conformance.runner.cut import CutLink
from clients.conformance.runner.deadline import Deadline
from clients.conformance.runner.mutations import MUTATIONS
from clients.conformance.runner.newer import Newer
from clients.conformance.runner.push_meanwhile import PushMeanwhile
from clients.conformance.runner.refused import RefusedCalls
from clients.conformance.runner.relay import Relay


class LinkEvent(Protocol):
    """What must have happened on the way when the driver has ended."""

    def differences(self) -> list[str]:
        """What did not happen, or not as it should."""


class RelayedEvent(LinkEvent, Protocol):
    """One for which calls are relayed."""

    def relay(self, target: str) -> Relay:
        """Makes it happen, or sees it."""


@asynccontextmanager
async def link_to(
    daemon: str,
    asked: Mapping[str, int],
    mutation: str | None,
    push_bytes: int,
    push: Callable[[], Awaitable[None]],
    forget: Callable[[], Awaitable[None]],
) -> AsyncIterator[tuple[str, list[LinkEvent]]]:
    """The address for the driver. `asked`: the link of a scenario, whose push has `push_bytes`; `mutation`: the mistake
    that the daemon seems to make; `push`: pushes checkpoint b; `forget`: discards the scenario's push."""
    async with AsyncExitStack() as stack:
        event: RelayedEvent
        if mutation is not None:
            daemon = (await stack.enter_async_context(Relay(daemon, MUTATIONS[mutation]))).address
        match dict(asked):
            case {"cut_at_bytes": num_bytes}:
                forgets = forget if asked.get("forget") else None
                cut = CutLink(daemon, num_bytes, push_bytes, asked.get("refuse_ms", 0), forgets)
                await stack.enter_async_context(cut)
                yield cut.address, [cut]
                return
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
                event = await stack.enter_async_context(PushMeanwhile(num_tokens, push))
            case _:
                yield daemon, []
                return
        relay = await stack.enter_async_context(event.relay(daemon))
        yield relay.address, [event]
