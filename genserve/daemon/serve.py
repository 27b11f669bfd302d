"""The composition root of the daemon. `parts` builds what is above the engine; only these two name concrete classes.

Start: the server first, which tells how far the start is; then the engine, in a thread (no process may be forked from
this one any more); then control, weights and all services; then health says SERVING. Stop: health says NOT_SERVING, new
requests are refused, running ones finish, the server stops, the engine stops. One AsyncExitStack: the order of entry is
the order of the start, the order of exit that of the stop.
"""

import argparse
import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import uvloop

from genserve.aio import cancel_all
from genserve.control.conditions import DaemonCondition, EngineCondition
from genserve.control.drain import Drain
from genserve.control.leases import LeaseTable
from genserve.control.service_manager import ServiceManager
from genserve.control.state import StateBoard
from genserve.daemon import frontend
from genserve.daemon.openai_process import Launch
from genserve.daemon.parts import Access, build_parts, num_frontends, observers_of
from genserve.daemon.start_display import show_start
from genserve.demo_model import DemoModelError, demo_model_path
from genserve.engine.vllm import launch
from genserve.engine.vllm.engine import VllmEngine
from genserve.engine.vllm.openai import flags as openai_flags
from genserve.engine.vllm.start import config as vllm_config
from genserve.engine.vllm.start import failure, other_hosts
from genserve.engine.vllm.start.config import AsyncEngineArgs
from genserve.errors import GenserveError
from genserve.frontends.processes import OpenAIServer
from genserve.frontends.template import Template, fork_template
from genserve.memory.allocator import freeze_objects, keep_freed_memory
from genserve.metrics.daemon import DaemonSeries
from genserve.metrics.process import ProcessMetrics, access_of, daemon_metrics
from genserve.net import require_free
from genserve.observe.log_lines import write_log_lines
from genserve.observe.notices import say, say_starting
from genserve.process import leftovers
from genserve.process.last_threads import exit_within
from genserve.process.signals import Stopped, stopped_by_signal, unless_stopped
from genserve.rpc.server import DaemonServer, ServerParts
from genserve.security.access_list import AccessSource, open_access_list, take_environment
from genserve.security.caller import Caller
from genserve.security.certificates import check_files, say_who_may_connect
from genserve.settings.config import ServeConfig
from genserve.weights.checkpoint.version_zero import (
    local_directory,
    open_checkpoint,
    opened_as_loaded,
)
from genserve.weights.kept.start import find_kept

EXIT_FAILED, EXIT_REFUSED = 1, 2  # refused: flags or a model that no start accepts
_CLOSE_GRACE_S = 2.0
_LAST_ANSWERS_S = 0.2
_THREADS_GRACE_S = 10.0

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Parses the flags and serves until a signal or a failure; the exit status."""
    config, flags = launch.parse(argv)
    keep_freed_memory()
    write_log_lines(config.log_format)
    try:
        launch.check_refused(config, flags)
        if flags.model is None:
            flags.model = str(demo_model_path())
        args = vllm_config.engine_args(flags)
        callers = AccessSource(config.auth_file, take_environment())  # no process of the engine is to inherit them
        if config.headless:
            return other_hosts.run_workers(args, config)
        # Before anything starts a thread, here or in a library.
        template = fork_template(partial(frontend.run, config, callers)) if num_frontends(config) else None
        return uvloop.run(ending(serve(config, args, template, flags, callers)))
    except (DemoModelError, OSError, ValueError, RuntimeError) as error:
        say(str(error))
        return EXIT_REFUSED if isinstance(error, failure.EngineConfigError) else EXIT_FAILED


def check(argv: Sequence[str]) -> Sequence[str]:
    """As a start checks these flags before it starts a process. Returns warnings. Raises SystemExit, ValueError and
    RuntimeError."""
    return launch.check(argv)


async def ending(serving: Coroutine[Any, Any, int]) -> int:
    """Runs it, and has this process end soon after it."""
    try:
        status = await serving
    except failure.EngineConfigError:
        raise  # nothing was started
    except Exception as error:
        exit_within(_THREADS_GRACE_S, EXIT_FAILED, str(error))
        raise
    exit_within(_THREADS_GRACE_S, status)
    return status


async def serve(
    config: ServeConfig,
    args: AsyncEngineArgs,
    template: Template | None,
    flags: argparse.Namespace,
    callers: AccessSource,
) -> int:
    """Serves until a signal: the exit status. Front ends are forked from `template`; `args` are made of `flags`;
    `callers`: where those are listed who may call. Raises RuntimeError for a failure, when all processes have ended:
    what is said of it then stays the last line."""
    async with AsyncExitStack() as stack:
        if template is not None:
            stack.callback(template.close)
        require_free(config.host, config.port, config.uds)
        listed = open_access_list(callers)
        if config.certificate is not None:
            check_files(config.certificate)
            say_who_may_connect(config.certificate)
        peers = Caller(config.peers)
        require_free(config.host, config.metrics_port, flag="--metrics-port")
        metrics = stack.enter_context(daemon_metrics(config.metrics_port, num_frontends(config)))
        observers = observers_of(metrics, traced=args.otlp_traces_endpoint is not None)
        began_s = time.monotonic()
        if (http := openai_flags.prepare(config, flags)) is not None:
            stack.callback(http.listener.close)
            config = http.config
        leases = LeaseTable()
        board = StateBoard(None, lambda: leases.active, uuid.uuid4().hex, DaemonCondition.STARTING)
        if (manager := ServiceManager.from_environment()) is not None:
            telling = asyncio.create_task(manager.run(board), name="service manager")
            stack.push_async_callback(cancel_all, [telling])
        server = await DaemonServer.open(config, board, listed, observers)
        stack.push_async_callback(server.stop, _CLOSE_GRACE_S)
        stack.push_async_callback(_end, board)
        stopped = stack.enter_context(stopped_by_signal())
        _sweep()
        directory = local_directory(args.model)
        opened = None if directory is None else open_checkpoint(directory, say)
        kept = find_kept(config.keep_committed, opened, say)
        say_starting(args.model, server.address)
        showing = asyncio.create_task(show_start(board), name="showing the start")
        stack.push_async_callback(cancel_all, [showing])
        engine = await unless_stopped(_start_engine(config, args, board, with_series=metrics is not None), stopped)
        stack.push_async_callback(engine.stop)
        board.attach(engine)
        opened = opened_as_loaded(opened, directory, engine.checkpoint_directory, say)
        access = Access(listed, peers, observers)
        parts = await build_parts(
            config, access, engine, board, leases, opened, kept, args.load_format, template, metrics, stopped, stack
        )
        await server.serve(parts)
        stack.push_async_callback(server.stop, _CLOSE_GRACE_S)  # before what its calls need
        daemon = _Daemon(engine, parts, server.address, metrics)
        if metrics is not None:
            read, port = DaemonSeries(engine, parts).read, config.metrics_port
            daemon.metrics_url = await metrics.serve(config.host, port, read, stack, access_of(config, listed))
        del opened  # the files are closed when version 0 is not resident any more
        if http is not None:
            starter = Launch(http.pickled_flags(engine.server_args), engine.info.max_n, http.listener)
            daemon.http = OpenAIServer(starter, http.listener, http.scheme, engine.openai_seat(), board)
            engine.add_clients(daemon.http)
            stack.push_async_callback(daemon.http.stop)
            await daemon.http.start(stopped)
        daemon.start(stack)
        freeze_objects()
        daemon.announce(args.model, began_s)
        failure = await daemon.run_until_stopped(stopped)
        return await daemon.drain(stopped) if failure is None else await daemon.fail(failure)


async def _start_engine(
    config: ServeConfig, args: AsyncEngineArgs, board: StateBoard, *, with_series: bool
) -> VllmEngine:
    options = launch.engine_options(config, num_frontends(config), with_series=with_series)
    return await VllmEngine.start(args, options, lambda step: board.tell_step(step, time.time()))


async def _end(board: StateBoard) -> None:
    """Watchers get the last state, and their calls end. A start that fails leaves no engine."""
    if board.daemon_condition is DaemonCondition.STARTING:
        board.enter(EngineCondition.DEAD)
        await asyncio.sleep(_LAST_ANSWERS_S)


@dataclass(slots=True)
class _Daemon:
    """The parts above the engine. `address` is where it serves."""

    engine: VllmEngine
    parts: ServerParts
    address: str
    metrics: ProcessMetrics | None
    metrics_url: str = ""
    http: OpenAIServer | None = None
    background: list["asyncio.Task[None]"] = field(default_factory=list)

    def start(self, stack: AsyncExitStack) -> None:
        """Starts the tasks that keep it going; `stack` ends them."""
        parts, timeout_s = self.parts, self.parts.config.heartbeat_timeout_s
        tasks = {
            "engine": self.engine.watch(timeout_s, parts.board.tell_answers),
            "pause leases": parts.pauses.run(),
            "push staging": parts.pushes.live.run(),
            "weight updates": parts.transfers.run(),
        }
        if parts.checkpoint is not None:
            tasks["memory for pushes"] = parts.resident.keep_reserved(
                parts.checkpoint.total_bytes, lambda: parts.pushes.room_bytes
            )
        if parts.ingest is not None:
            tasks["receiving processes"] = parts.ingest.run()
        if parts.frontends is not None:
            tasks["front ends"] = parts.frontends.run()
        if parts.keeper is not None:
            tasks["keeping versions"] = parts.keeper.run()
        if self.http is not None:
            tasks["OpenAI server"] = self.http.run()
        if self.metrics is not None:
            tasks["measuring the event loop"] = self.metrics.run()
        self.background = [asyncio.create_task(task, name=name) for name, task in tasks.items()]
        stack.push_async_callback(cancel_all, self.background)

    def announce(self, model: str, began_s: float) -> None:
        """Health says SERVING, and so does standard output. `began_s`: when the start began, on the monotonic clock."""
        self.parts.board.become(DaemonCondition.SERVING)
        say(f"weight update: {self.engine.info.weight_update} ({self.engine.info.weight_update_reason})")
        for warning in self.engine.warnings:
            say(f"warning: {warning}")
        if self.http is not None:
            say(f"openai: {self.http}")
        if self.metrics_url:
            say(f"metrics: {self.metrics_url}")
        say(f"ready after {time.monotonic() - began_s:.0f} s")
        print(f"genserve: serving {model} on {self.address}", flush=True)

    async def run_until_stopped(self, stopped: asyncio.Event) -> str | None:
        """Waits for the signal (None) or for a background task to end: what to say then."""
        waiting = asyncio.create_task(stopped.wait())
        await asyncio.wait([waiting, *self.background], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        return self._failure()

    async def drain(self, stopped: Stopped) -> int:
        """Lets running work end, within the drain timeout. Returns the exit status."""
        parts, flag_s = self.parts, self.parts.config.drain_timeout_s
        say(f"{stopped.cause}: draining, {stopped.limit_s(flag_s):g} s at most; a second signal exits at once")
        drain = Drain(self.engine, parts.board, parts.pauses, parts.transfers, parts.pushes, self.http, parts.keeper)
        try:
            drained = await drain.run(stopped, flag_s)
        except GenserveError as error:
            await self.fail(self._failure() or error.message)
        if (failure := self._failure()) is not None:
            await self.fail(failure)
        for line in drained.cut:
            say(line)
        parts.board.end()
        return 0 if drained.in_order else EXIT_FAILED

    async def fail(self, failure: str) -> NoReturn:
        """Notifies clients of the failure, and raises RuntimeError with it."""
        self.parts.board.enter(EngineCondition.DEAD)
        if self.http is not None:
            self.http.kill()
        log.error("%s", failure)
        # Calls that the failure has ended get their answers first: a server that stops may delay them by its grace.
        await asyncio.sleep(_LAST_ANSWERS_S)
        if self.parts.keeper is not None:  # the engine is lost, and what it served is still here
            await self.parts.keeper.close_within(self.parts.config.drain_timeout_s)
        raise RuntimeError(failure)

    def _failure(self) -> str | None:
        """The message for an engine that has died, or for a background task that has ended; None if all run."""
        if cause := self.engine.cause_of_death:  # tasks end because of it, with errors that may not name it
            return f"the engine has died: {cause}"
        ended = next((task for task in self.background if task.done()), None)
        return None if ended is None else f"{ended.get_name()} ended: {ended.exception()!r}"


def _sweep() -> None:
    """Removes what killed daemons left behind."""
    leftovers.sweep()
    if swept := leftovers.sweep_shared_memory():
        say(f"removed shared memory of killed engines: {', '.join(swept)}")
