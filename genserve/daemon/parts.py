"""The parts of a daemon above its engine, and the processes that it starts beside the engine: receivers of pushes, and
front ends."""

import asyncio
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from genserve.control.leases import LeaseTable
from genserve.control.pause import PauseController
from genserve.control.sleep import SleepController
from genserve.control.state import ServedWeights, StateBoard
from genserve.engine.vllm.engine import VllmEngine
from genserve.frontends import state as shared_state
from genserve.frontends.frontend import Seat
from genserve.frontends.processes import FrontEnds
from genserve.frontends.questions import FrontendSettings
from genserve.frontends.template import Template
from genserve.ingest.processes import IngestProcesses
from genserve.ingest.relay import IngestSettings
from genserve.memory.words import SharedWords
from genserve.metrics.process import ProcessMetrics
from genserve.observe.notices import say
from genserve.process.signals import Stopped
from genserve.rpc.convert.control import kept_fleet_record
from genserve.rpc.generation import Abort, abort_with
from genserve.rpc.listener import server_options
from genserve.rpc.observed import CallObserver
from genserve.rpc.server import ServerParts
from genserve.security.access_list import AccessList
from genserve.security.caller import Caller
from genserve.settings.config import ServeConfig
from genserve.tracing import CallSpans
from genserve.weights.apply import PushApplier
from genserve.weights.checkpoint.version_zero import OpenedCheckpoint, loaded_index, resident_store
from genserve.weights.kept.start import Kept, start_keeping
from genserve.weights.lora.loader import LoraLoader
from genserve.weights.push_admission import limit_bytes
from genserve.weights.registry import PushRegistry
from genserve.weights.vllm_transfer import TransferUpdates


@dataclass(frozen=True, slots=True)
class Access:
    """The callers that the daemon admits, the credentials of its own calls, and the observers of calls."""

    callers: AccessList | None
    peers: Caller
    observers: Sequence[CallObserver]


def observers_of(metrics: ProcessMetrics | None, *, traced: bool) -> Sequence[CallObserver]:
    """The observers of calls in a daemon or a front end: its metrics, and spans if they are exported (`traced`). From
    now on steps have spans too."""
    observers: list[CallObserver] = [] if metrics is None else [metrics.calls]
    if traced:
        spans = CallSpans()
        spans.trace_steps()
        observers.append(spans)
    return observers


def num_frontends(config: ServeConfig) -> int:
    """How many front ends there will be on this machine."""
    return config.num_frontends(len(os.sched_getaffinity(0)))


async def build_parts(
    config: ServeConfig,
    access: Access,
    engine: VllmEngine,
    board: StateBoard,
    leases: LeaseTable,
    opened: OpenedCheckpoint | None,
    kept: Kept | None,
    load_format: str,
    template: Template | None,
    metrics: ProcessMetrics | None,
    stopped: Stopped,
    stack: AsyncExitStack,
) -> ServerParts:
    """Builds everything above the engine. `opened` is the checkpoint, if its files are available."""
    pauses = PauseController(engine, leases, board)
    checkpoint = await loaded_index(opened, engine)
    max_staging_bytes = limit_bytes(config.max_staging_bytes, checkpoint, engine.info.max_lora_rank)
    resident = resident_store(opened, load_format.lower(), say, enabled=not config.no_resident_weights)
    base_digest = "" if opened is None else await asyncio.to_thread(opened.files.samples_digest)
    board.tell_served(lambda: ServedWeights(resident.push_id, resident.content_digest, base_digest))
    applier = PushApplier(engine, pauses, board, resident)
    loras = LoraLoader(engine, board, pauses, checkpoint)
    pushes = PushRegistry(checkpoint, engine, applier, loras, board, resident, max_staging_bytes)
    sleeps = SleepController(engine, pauses, board, applier)
    transfers = TransferUpdates(engine, pauses, board, pushes, applier, resident)
    keeper = await start_keeping(kept, opened, checkpoint, engine, resident, applier)
    if keeper is not None:
        if (record := keeper.record) is not None and record.fleet_epoch:
            board.membership.record = kept_fleet_record(record, base_digest)
        keeper.follow(board)
    directory = "" if metrics is None else metrics.directory
    abort = abort_with(engine, board)
    frontends = await _start_frontends(engine.seats(), board, abort, template, directory, stack)
    if frontends is not None:
        engine.add_clients(frontends)
    return ServerParts(
        config,
        engine,
        board,
        pauses,
        sleeps,
        pushes,
        resident,
        transfers,
        loras,
        checkpoint,
        max_staging_bytes,
        stopped.stop,
        await _start_ingest(config, stack, asks=access.callers is not None),
        frontends=frontends,
        callers=access.callers,
        peers=access.peers,
        observers=access.observers,
        keeper=keeper,
    )


async def _start_ingest(config: ServeConfig, stack: AsyncExitStack, *, asks: bool) -> IngestProcesses | None:
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


async def _start_frontends(
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
