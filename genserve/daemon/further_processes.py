"""The processes that the daemon starts beside its engine: those that receive pushes, and front ends."""

import os
from collections.abc import Sequence
from contextlib import AsyncExitStack

from genserve.control.state import StateBoard
from genserve.frontends import state as shared_state
from genserve.frontends.frontend import Seat
from genserve.frontends.processes import FrontEnds
from genserve.frontends.settings import FrontendSettings
from genserve.frontends.template import Template
from genserve.ingest.processes import IngestProcesses
from genserve.ingest.relay import IngestSettings
from genserve.memory.words import SharedWords
from genserve.rpc.generation import Abort
from genserve.rpc.listener import server_options
from genserve.settings.config import ServeConfig


def num_frontends(config: ServeConfig) -> int:
    """How many front ends there will be on this machine."""
    return config.num_frontends(len(os.sched_getaffinity(0)))


async def start_ingest(config: ServeConfig, stack: AsyncExitStack, *, asks: bool) -> IngestProcesses | None:
    """The processes that receive pushes, if there are any. They end after the server, whose answers they pass on.
    `asks`: whether they have to ask who may push."""
    count = config.num_ingest_processes(len(os.sched_getaffinity(0)))
    if count == 0:
        return None
    settings = IngestSettings(config.host.strip("[]"), 0, "", server_options(config), config.certificate, asks=asks)
    ingest = IngestProcesses(count, settings)
    stack.push_async_callback(ingest.stop)
    await ingest.start()
    return ingest


async def start_frontends(
    seats: Sequence[Seat],
    board: StateBoard,
    abort: Abort,
    template: Template | None,
    metrics_directory: str,
    stack: AsyncExitStack,
) -> FrontEnds | None:
    """The processes that serve requests beside the daemon, one for each of the `seats`, if any. They end after
    the server, and before the engine. `abort` ends requests of all of them."""
    if not seats or template is None:
        return None
    words = SharedWords.create(shared_state.NUM_WORDS, "state")
    stack.callback(words.close)
    shared_state.StateWriter(board, words)

    async def abort_as_bytes(request_ids: Sequence[str] | None) -> bytes:
        return (await abort(request_ids)).SerializeToString()

    settings = FrontendSettings(os.getpid(), 0, words.fd, (), 0, metrics_directory)
    frontends = FrontEnds(template, seats, settings, board, abort_as_bytes)
    stack.push_async_callback(frontends.stop)
    await frontends.start()
    return frontends
