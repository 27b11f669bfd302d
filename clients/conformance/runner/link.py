"""The way from a driver to the open daemon, and what is done to it there."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from clients.conformance.runner.cancelled import CancelledCalls
from clients.conformance.runner.corrupted import CorruptChunk
from clients.conformance.runner.cut import CutLink
from clients.conformance.runner.mutations import MUTATIONS
from clients.conformance.runner.relay import Change, Relay


class Watched(Protocol):
    """What must have happened on the way when the driver has ended."""

    def differences(self) -> list[str]:
        """What did not happen, or not as it should."""


@asynccontextmanager
async def link_to(
    daemon: str, asked: Mapping[str, int], mutation: str | None, push_bytes: int
) -> AsyncIterator[tuple[str, list[Watched]]]:
    """The address for the driver. `asked`: the link of a scenario, whose push has `push_bytes`; `mutation`: the mistake
    that the daemon seems to make."""
    async with AsyncExitStack() as stack:
        if mutation is not None:
            daemon = (await stack.enter_async_context(Relay(daemon, MUTATIONS[mutation]))).address
        match dict(asked):
            case {"corrupt_chunk": number}:
                chunk = CorruptChunk(number)
                relay = await stack.enter_async_context(Relay(daemon, chunk.change()))
                yield relay.address, [chunk]
            case {"cancelled_calls": num_cancelled}:
                calls = CancelledCalls(num_cancelled)
                relay = await stack.enter_async_context(Relay(daemon, Change(), calls.ended))
                yield relay.address, [calls]
            case {"cut_at_bytes": num_bytes}:
                cut = await stack.enter_async_context(CutLink(daemon, num_bytes, push_bytes))
                yield cut.address, [cut]
            case _:
                yield daemon, []
