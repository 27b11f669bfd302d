"""vLLM's AsyncLLM behind the Engine protocol.

A few places use internals of vLLM, and are marked "internal": tests/engine/test_internals.py fails if a new vLLM moves
one.
"""

import asyncio
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from pathlib import Path

from vllm.envs import VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, enable_envs_cache
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

from genserve.engine.generation import ChatPrompt, TextPrompt
from genserve.engine.types import (
    KvPolicy,
    ModelMemory,
    PauseCounts,
    PauseMode,
    SleepTag,
)
from genserve.engine.vllm.activity import Processes
from genserve.engine.vllm.clients.interruption import EngineInterruption, OtherClients, Watch, of_vllm
from genserve.engine.vllm.clients.rows import LoadMeter
from genserve.engine.vllm.clients.seat import Seat
from genserve.engine.vllm.heartbeat import Heartbeat, HeartbeatLimits
from genserve.engine.vllm.launch import EngineOptions, Launched, launch
from genserve.engine.vllm.liveness import Liveness, end_of
from genserve.engine.vllm.loras import LiveLoras
from genserve.engine.vllm.requests.intake import Intake
from genserve.engine.vllm.scheduling import Scheduling
from genserve.engine.vllm.start import config as vllm_config
from genserve.engine.vllm.start import first_step
from genserve.engine.vllm.start import progress as steps
from genserve.engine.vllm.start.clients import DAEMON, OPENAI
from genserve.engine.vllm.start.config import AsyncEngineArgs
from genserve.engine.vllm.start.failure import EngineStartError
from genserve.engine.vllm.start.progress import Progress
from genserve.engine.vllm.weights import LiveTransfer, LiveWeights
from genserve.engine.vllm.workers import Workers
from genserve.errors import GenserveError

_ATTACH_TIMEOUT_S = 120.0
_SHUTDOWN_TIMEOUT_S = 10.0


class VllmEngine:
    """AsyncLLM, its requests and its workers. Made by `start`."""

    def __init__(self, launched: Launched) -> None:
        started, args, rows, options = launched.started, launched.args, launched.rows, launched.options
        llm = started.llm
        config = llm.vllm_config
        parallel = config.parallel_config
        self._llm = llm
        self._places = started.places
        self.info = vllm_config.info(config, options.limits.max_n)
        """What it serves."""
        self._clients = options.clients
        self._limits = options.limits
        self._with_series = options.with_series
        self._logs_stats = launched.logs_stats
        self._rows = rows
        self._report = launched.report
        self.server_args = args
        """For another process of vLLM's in front of this engine."""
        self._unfinished = llm.output_processor.request_states
        """internal: vLLM's states of the daemon's own unfinished sequences."""
        self._meter = LoadMeter(rows.row(DAEMON), rows.rows(but=DAEMON), self._unfinished)
        self._heartbeat: Heartbeat | None = None
        # internal: ends the streams as vLLM does when its engine has died.
        self._liveness = Liveness(
            lambda: llm.output_processor.propagate_error(VllmEngineDeadError()), launched.report.explained
        )
        workers = Workers(llm.engine_core, self._liveness, parallel.world_size * parallel.data_parallel_size)
        self._workers = workers
        self._scheduling = Scheduling(llm, self._liveness)
        self.weights = LiveWeights(llm, self._liveness, workers, launched.address, options.peers)
        self._tasks: tuple[str, ...] = ()  # what the engine says that it can do
        self.warnings = launched.warnings
        """One line for each setting that has a cost when weights are pushed."""
        self.transfer = LiveTransfer(self.weights)
        self.loras = LiveLoras(workers, self.info.max_loras)
        self._row = rows.row(DAEMON)
        tally = rows.tally(DAEMON)
        self._intake = Intake(
            llm, self._liveness, self.info, options.limits, self.loras, tally, lambda: self.weights.version
        )
        self._elsewhere: list[OtherClients] = []
        # What its parts do as the protocol of engines has it:
        self.submit = self._intake.submit
        self.wait_dead, self.settled = self._liveness.wait_dead, self._liveness.settled
        self.settling = self._liveness.settling
        self.load, self.served_tokens = self._meter.load, self._meter.served_tokens
        self.resume, self.reset_caches = self._scheduling.resume, self._scheduling.reset_caches

    @classmethod
    async def start(
        cls, args: AsyncEngineArgs, options: EngineOptions, tell: Callable[[str], None] = lambda _: None
    ) -> "VllmEngine":
        """Starts the engine processes and makes every worker ready for pushes. The event loop goes on meanwhile. `tell`
        gets what the start does, for people."""
        progress = Progress(tell)
        with progress.listening():
            progress.reach(steps.CONFIGURATION)
            launched = await asyncio.to_thread(launch, args, options, progress)
        progress.reach(steps.ATTACHING)
        llm = launched.started.llm
        engine = cls(launched)
        try:
            # internal: vLLM calls this itself where it is made on an event loop. The task ends when EngineCore dies.
            llm._run_output_handler()
            manager = llm.engine_core.resources.engine_manager
            llm.output_handler.add_done_callback(lambda _: engine._liveness.declare_dead(end_of(manager)))
            engine._tasks = await engine._liveness.call(
                llm.get_supported_tasks(), what="question for its tasks", timeout_s=_ATTACH_TIMEOUT_S
            )
            how = await engine.weights.attach(_ATTACH_TIMEOUT_S, takes_adapters=engine.info.max_loras > 0)
            engine.info = replace(
                engine.info,
                weight_update=how.weight_update,
                weight_update_reason=how.reason,
                reserved_device_bytes=how.reserved_device_bytes,
                pinned_host_bytes=how.pinned_host_bytes,
                model_runner=how.model_runner,
                model_memory=ModelMemory(**{f"{kind}_bytes": size for kind, size in how.model_memory.items()}),
            )
            # vLLM asks the environment about something for every token, in this process only.
            enable_envs_cache()
            progress.reach(steps.STEP)
            await engine._take_a_step()
            progress.reach(steps.SERVING)
        except BaseException as error:
            await engine.stop()
            if isinstance(error, GenserveError):
                raise EngineStartError(error.message) from error
            raise
        return engine

    async def _take_a_step(self) -> None:
        """As the first request of anybody would. Nothing of it is counted or traced."""
        if "generate" not in self._tasks:
            return
        taking = first_step.take(self.submit, len(self._llm.engine_core.core_engines), self.info.max_model_len)
        with first_step.uncounted(self._llm):
            await self._liveness.wait(taking, what="the first step", timeout_s=VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)
        self._row.clear()

    async def watch(self, heartbeat_timeout_s: float, tell: Callable[[bool], None]) -> None:
        """Returns when the engine has died, or was given up because it answers no heartbeat; 0 = without a heartbeat.
        Calls `tell` with whether it answers, when this changes."""
        if heartbeat_timeout_s:
            limits = HeartbeatLimits(heartbeat_timeout_s, VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)
            # internal: the engine's processes. Those of Ray may be on other hosts, and tell nothing.
            pids = [p.pid for p in getattr(self._llm.engine_core.resources.engine_manager, "processes", [])]
            processes = Processes(pids, self._meter.steps) if pids else None
            self._heartbeat = Heartbeat(self._liveness, self._workers.ping, processes, limits, tell)
            await self._heartbeat.run()
        await self._liveness.wait_dead()

    async def stop(self) -> None:
        """Ends the engine processes. What still waits for them ends as if the engine had died; one that is dead
        already is not asked to end."""
        timeout_s = 0.0 if self._liveness.dead else _SHUTDOWN_TIMEOUT_S
        self.weights.close()
        self.loras.close()
        self._intake.close()
        self._liveness.declare_dead("the daemon has ended it")
        await asyncio.to_thread(self._llm.shutdown, timeout_s)
        for place in self._places:
            place.close()
        self._rows.close()
        self._report.close()

    @property
    def cause_of_death(self) -> str:
        """Why it is dead, for people; "" while it lives."""
        return self._liveness.cause_of_death

    def seats(self) -> list[Seat]:
        """The places of front ends. Call once."""
        return [self._seat(index, with_series=self._with_series) for index in self._clients.frontends]

    def openai_seat(self) -> Seat:
        """The place of the OpenAI server, which shows its series itself, if it is one of the clients. Call once."""
        return self._seat(OPENAI, with_series=self._logs_stats)

    def _seat(self, index: int, *, with_series: bool) -> Seat:
        llm, liveness, rows = self._llm, self._liveness, self._rows
        what = self._tasks, self.info, self._limits
        return Seat(self._places[index], llm, liveness, rows, self.loras, *what, with_series=with_series)

    @property
    def checkpoint_directory(self) -> Path | None:
        """Where the checkpoint's files lie, if they lie on this host."""
        return vllm_config.checkpoint_directory(self._llm.vllm_config)

    @property
    def heartbeat_age_s(self) -> float | None:
        """Seconds since it last answered; None without a heartbeat."""
        return None if self._heartbeat is None else self._heartbeat.age_s

    def add_clients(self, clients: OtherClients) -> None:
        """The processes at some of the other places are there."""
        self._elsewhere.append(clients)

    async def wait_idle(self) -> None:
        """Returns when no request is left, here and in the others."""
        await asyncio.gather(self._intake.wait_idle(), *(each.wait_idle() for each in self._elsewhere))

    async def abort(self, request_ids: Sequence[str] | None) -> tuple[list[str], list[str]]:
        """Ends requests with reason ABORTED, of any client. A client may use an id that another one uses too."""
        aborted, unknown = self._intake.abort(request_ids)
        elsewhere = {request_id for each in self._elsewhere for request_id in await each.abort(request_ids)}
        aborted += sorted(elsewhere.difference(aborted))
        return aborted, [each for each in unknown if each not in elsewhere]

    async def tokenize(self, prompt: TextPrompt | ChatPrompt, add_special_tokens: bool) -> list[int]:
        """Token ids of a prompt."""
        return await self._intake.prompts.encode(prompt, add_special_tokens=add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of token ids."""
        return await self._intake.prompts.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def pause(self, mode: PauseMode, kv_policy: KvPolicy, timeout_s: float) -> PauseCounts:
        """Stops scheduling."""
        if mode is not PauseMode.ABORT:
            await self._scheduling.pause(mode, kv_policy, timeout_s)
            if mode is PauseMode.WAIT:
                # The engine let all of them end. A front end may not have read the last outputs yet.
                return PauseCounts(kept=0, aborted=0)
            num_elsewhere = sum(each.num_requests for each in self._elsewhere)
            return PauseCounts(kept=self._row.num_requests + num_elsewhere, aborted=0)
        try:
            aborted = sum([await each.pausing() for each in self._elsewhere]) + self._intake.pausing()
            await self._scheduling.pause(mode, kv_policy, timeout_s)
        finally:
            self._intake.paused()
            for each in self._elsewhere:
                await each.paused()
        return PauseCounts(kept=0, aborted=aborted)

    def interrupted(self) -> EngineInterruption:
        """What the present pause interrupts."""
        own = self._row.interruptions.begin(Watch(self._unfinished, of_vllm))
        return EngineInterruption(own, self._elsewhere, self._liveness)

    async def sleep(self, level: int, tags: Set[SleepTag], timeout_s: float) -> None:
        """Gives memory back."""
        if SleepTag.WEIGHTS in tags:
            await self.weights.before_sleep(level, timeout_s)
        await self._scheduling.sleep(level, tags, timeout_s)

    async def wake_up(self, tags: Set[SleepTag], timeout_s: float, *, paused: bool = False) -> None:
        """Takes memory again, and perhaps schedules."""
        await self._scheduling.wake_up(tags, timeout_s, paused=paused)
        if SleepTag.WEIGHTS in tags:
            await self.weights.after_wake_up(timeout_s)

    async def reset_prefix_cache(self, reset_running_requests: bool, timeout_s: float) -> bool:
        """Drops the prefix cache."""
        return await self._liveness.call(
            self._llm.reset_prefix_cache(reset_running_requests=reset_running_requests),
            what="reset of the prefix cache",
            timeout_s=timeout_s,
        )
