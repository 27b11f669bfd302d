"""The composition root: the one place that names concrete classes.

Start: engine first (its processes must exist before any gRPC object), then control and weights, then the server, then
health says SERVING. Stop: health says NOT_SERVING, new requests are refused, running ones finish, the server stops, the
engine stops. One AsyncExitStack: the order of entry is the order of the start, the order of exit that of the stop.
"""

import asyncio
import gc
import os
import socket
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack

import uvloop

from genserve.allocator import keep_freed_memory
from genserve.config import ServeConfig
from genserve.control.leases import LeaseTable
from genserve.control.pause import PauseController
from genserve.control.state import Phase, StateBoard
from genserve.engine import leftovers, vllm_config
from genserve.engine.demo_model import DemoModelError, demo_model_path
from genserve.engine.vllm import EngineOptions, VllmEngine
from genserve.engine.vllm_config import AsyncEngineArgs
from genserve.rpc.ingest.process import IngestSettings
from genserve.rpc.ingest.processes import IngestProcesses
from genserve.rpc.server import SERVER_OPTIONS, ServerParts, start_server
from genserve.signals import children_ignore_interrupts, stop_on_signals
from genserve.weights import lora_files
from genserve.weights.checkpoint import CheckpointError, CheckpointIndex
from genserve.weights.lora import LoraLoader
from genserve.weights.registry import PushRegistry
from genserve.weights.resident import CheckpointBytes, ResidentStore, ResidentVersion
from genserve.weights.transfer import TransferUpdates
from genserve.weights.update import WeightUpdater

DESCRIPTION = (
    "Serve a model over gRPC: stream generation, take weights, pause and resume. "
    "--help=genserve shows the daemon's own flags, --help=all every flag, --help=max-model-len those of a name."
)
EXIT_FAILED = 1
_STAGING_MARGIN_BYTES = 256 << 20
_CLOSE_GRACE_S = 2.0
# Objects made since the last collection. Python's 700 are less than what one step of the engine makes, and frees.
_GC_THRESHOLD = 20_000
_LAST_ANSWERS_S = 0.2


def main(argv: Sequence[str]) -> int:
    """Parses the flags and serves until a signal or a failure; the exit status."""
    parser = vllm_config.parser("genserve serve", DESCRIPTION)
    ServeConfig.add_flags(parser)
    flags = parser.parse_args(argv)
    try:
        config = ServeConfig.from_flags(vars(flags))
    except ValueError as error:
        parser.error(str(error))
    keep_freed_memory()
    try:
        if flags.model is None:
            flags.model = str(demo_model_path())
        args = vllm_config.engine_args(flags)
        return uvloop.run(serve(config, args))
    except (DemoModelError, OSError, ValueError, RuntimeError) as error:
        _say(str(error))
        return EXIT_FAILED


async def serve(config: ServeConfig, args: AsyncEngineArgs) -> int:
    """Serves until a signal (0) or a failure (1)."""
    _require_free(config.host, config.port)
    async with AsyncExitStack() as stack:
        lora_files.sweep()
        if swept := leftovers.sweep():
            _say(f"removed shared memory of killed engines: {', '.join(swept)}")
        _say(f"starting the engine for {args.model}")
        started_at = time.monotonic()
        with children_ignore_interrupts():
            engine = await VllmEngine.start(args, EngineOptions(config.max_active_requests, config.weight_update))
        stopped = asyncio.Event()

        def stop(signal_name: str) -> None:
            _say(f"{signal_name}: draining, {config.drain_timeout_s:g} s at most; once more exits now")
            stopped.set()

        stack.enter_context(stop_on_signals(stop))
        stack.push_async_callback(engine.stop)

        leases = LeaseTable()
        board = StateBoard(engine, lambda: leases.active, instance_id=uuid.uuid4().hex)
        pauses = PauseController(engine, leases, board)
        checkpoint = _checkpoint(engine)
        max_staging_bytes = _max_staging_bytes(config, checkpoint)
        resident = _resident(config, checkpoint)
        updater = WeightUpdater(engine, pauses, board, resident)
        loras = LoraLoader(engine, board, checkpoint)
        pushes = PushRegistry(checkpoint, engine, updater, loras, board, resident, max_staging_bytes)
        transfers = TransferUpdates(engine, pauses, board, pushes, updater, resident)
        stack.push_async_callback(pushes.close)
        ingest = await _ingest(config, stack)
        server = await start_server(
            ServerParts(
                config, engine, board, pauses, pushes, resident, transfers, loras, checkpoint, max_staging_bytes, ingest
            )
        )
        stack.push_async_callback(server.stop, _CLOSE_GRACE_S)

        background = [
            asyncio.create_task(pauses.run(), name="pause leases"),
            asyncio.create_task(pushes.run(), name="push staging"),
            asyncio.create_task(transfers.run(), name="weight updates"),
            asyncio.create_task(engine.wait_dead(), name="engine"),
        ]
        if ingest is not None:
            background.append(asyncio.create_task(ingest.run(), name="receiving processes"))
        stack.push_async_callback(_cancel, background)
        # What start-up has left lives for ever: collections need not walk it while streams wait.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD)
        board.enter(None)
        if config.weight_update == "auto" and engine.info.weight_update != "beside":
            _say("there is no memory for a second model: new weights are loaded in place, in a longer pause")
        _say(f"ready after {time.monotonic() - started_at:.0f} s")
        print(f"genserve: serving {args.model} on {server.address}", flush=True)
        failure = await _first_of(stopped, background)
        if failure is not None:
            board.enter(Phase.DEAD)
            _say(failure)
            # Calls that the failure has ended get their answers first: a server that is being stopped may keep them
            # back until its grace is over.
            await asyncio.sleep(_LAST_ANSWERS_S)
            return EXIT_FAILED
        board.enter(Phase.DRAINING)
        if not await transfers.close(config.drain_timeout_s):
            _say("a weight update hangs, and cannot be undone")
            return EXIT_FAILED
        # Requests frozen by a pause could not finish.
        await pauses.resume("", force=True)
        await _drain(engine, config.drain_timeout_s)
        return 0


async def _ingest(config: ServeConfig, stack: AsyncExitStack) -> IngestProcesses | None:
    """The processes that receive pushes, if there are to be any; they end after the server, whose answers they pass."""
    count = config.num_ingest_processes(len(os.sched_getaffinity(0)))
    if count == 0:
        return None
    settings = IngestSettings(config.host.strip("[]"), 0, "", config.max_message_bytes, SERVER_OPTIONS)
    ingest = IngestProcesses(count, settings, _say)
    stack.push_async_callback(ingest.stop)
    await ingest.start()
    return ingest


async def _drain(engine: VllmEngine, timeout_s: float) -> None:
    """Lets running requests finish; ends those that take longer."""
    try:
        async with asyncio.timeout(timeout_s):
            await engine.wait_idle()
    except TimeoutError:
        aborted, _ = await engine.abort(None)
        _say(f"ended {len(aborted)} requests that did not finish in time")


async def _first_of(stopped: asyncio.Event, background: Sequence["asyncio.Task[None]"]) -> str | None:
    """Waits for the signal (None) or for a background task to end, which none should: what to say then."""
    waiting = asyncio.create_task(stopped.wait())
    done, _ = await asyncio.wait([waiting, *background], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    for task in background:
        if task in done:
            if task.get_name() == "engine":
                return "the engine has died"
            return f"{task.get_name()} ended: {task.exception()!r}"
    return None


async def _cancel(tasks: Sequence["asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _require_free(host: str, port: int) -> None:
    """Raises OSError for an address that cannot be listened on: better now than when the engine has started."""
    if port <= 0:
        return
    family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def _checkpoint(engine: VllmEngine) -> CheckpointIndex | None:
    directory = engine.checkpoint_directory
    if directory is None:
        _say("the checkpoint's files are not on this machine: the names of pushed tensors cannot be checked early")
        return None
    try:
        return CheckpointIndex.read(directory)
    except CheckpointError as error:
        _say(f"{error}: the names of pushed tensors cannot be checked early")
        return None


def _resident(config: ServeConfig, checkpoint: CheckpointIndex | None) -> ResidentStore:
    first = None
    if checkpoint is not None:
        first = ResidentVersion(0, checkpoint.as_manifest(), CheckpointBytes(checkpoint))
    return ResidentStore(first, enabled=not config.no_resident_weights)


def _max_staging_bytes(config: ServeConfig, checkpoint: CheckpointIndex | None) -> int:
    if config.max_staging_bytes or checkpoint is None:
        return config.max_staging_bytes or 64 << 30
    return 2 * checkpoint.total_bytes + _STAGING_MARGIN_BYTES


def _say(line: str) -> None:
    print(f"genserve: {line}", file=sys.stderr, flush=True)
