"""Two data-parallel engines of a mixture of experts without models: vLLM's own loop, pause and resume, in threads.

Only what vLLM does not decide there is made up: requests, which are a number of steps, and the all-reduce between the
engines, which fails where gloo would hang or mix up two different calls.
"""

import asyncio
import itertools
import threading
from contextlib import nullcontext, suppress
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import ParallelConfig
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import DPEngineCoreProc, EngineShutdownState

MEETING_TIMEOUT_S = 10.0
SYNC_INTERVAL = 4


class Group:
    """In the place of the engines' process group."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=MEETING_TIMEOUT_S)
        self._lock = threading.Lock()
        self._brought: list[torch.Tensor] = []

    def size(self) -> int:
        """Engines."""
        return self._barrier.parties

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> None:
        """Raises RuntimeError when the other engine does something else."""
        with self._lock:
            self._brought.append(tensor.clone())
        self._barrier.wait()
        brought = list(self._brought)
        if self._barrier.wait() == 0:
            self._brought.clear()
        self._barrier.wait()
        if len({each.numel() for each in brought}) > 1:
            raise RuntimeError("the engines are in different calls")
        stacked = torch.stack(brought)
        is_sum = op == torch.distributed.ReduceOp.SUM
        tensor.copy_(stacked.sum(0) if is_sum else stacked.amax(0))

    def abort(self) -> None:
        """Nobody waits any more."""
        self._barrier.abort()


class Requests:
    """In the place of the scheduler. `num_steps`: those that the request still takes."""

    def __init__(self) -> None:
        self.pause_state = PauseState.UNPAUSED
        self.num_steps = 0

    def set_pause_state(self, state: PauseState) -> None:
        """As the scheduler's."""
        self.pause_state = state

    def has_unfinished_requests(self) -> bool:
        """As the scheduler's: what is frozen does not count."""
        return self.pause_state != PauseState.PAUSED_ALL and self.num_steps > 0

    has_requests = has_unfinished_requests

    def finish_requests(self, *_: Any) -> list[Any]:
        """As the scheduler's."""
        self.num_steps = 0
        return []


class Core(DPEngineCoreProc):
    """One of the engines."""

    def __init__(self, index: int, group: Group) -> None:  # not vLLM's, which loads a model
        self.engine_index = self.dp_rank = index
        self.dp_group = group
        self.dp_sync_interval = SYNC_INTERVAL
        self.vllm_config = SimpleNamespace(parallel_config=ParallelConfig())
        self.input_queue, self.output_queue, self.aborts_queue = Queue(), Queue(), Queue()
        self.scheduler = Requests()
        self.model_executor = SimpleNamespace(is_sleeping=False, collective_rpc=lambda _: None)
        self.pending_pause = self.ignore_start_dp_wave = self.engines_running = False
        self.current_wave = self.step_counter = 0
        self.has_coordinator = True
        self.publish_dp_lb_stats = self.enable_fault_tolerance = False
        self.eep_scaling_state = self.batch_queue = None
        self.process_input_queue_block = True
        self.shutdown_state = EngineShutdownState.RUNNING
        self._idle_state_callbacks = []
        self.num_done = 0
        self.failure: BaseException | None = None
        self._ends = False

    def run(self) -> None:
        """Until `end`."""
        try:
            with suppress(SystemExit):
                self.run_busy_loop()
        except BaseException as error:
            self.failure = error
        finally:
            self.output_queue.put(None)

    def end(self) -> None:
        """Soon."""
        self._ends = True
        self.input_queue.put((EngineCoreRequestType.WAKEUP, None))

    def is_running(self) -> bool:
        """Whether it goes on."""
        return not self._ends

    _handle_shutdown = is_running

    def take(self, num_steps: int) -> None:
        """A request, in the place of the one that there is."""
        self.scheduler.num_steps = num_steps

    def _process_engine_step(self) -> bool:
        if not self.scheduler.has_unfinished_requests():
            return False
        self.scheduler.num_steps -= 1
        self.num_done += 1
        return True

    def execute_dummy_batch(self) -> None:
        """Nothing."""

    def capture_iteration_details(self, *_: Any) -> Any:
        """None."""
        return nullcontext()

    def _reset_caches(self, *_: Any) -> None:
        pass

    def _send_abort_outputs(self, aborted: Any) -> None:
        pass


class Cores:
    """In the place of AsyncLLM and its client: sends calls to both engines, and waits for both answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._group = Group(2)
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, op, group: group.all_reduce(tensor, op))
        # vLLM 0.33 makes a sum out of messages between two.
        monkeypatch.setattr(
            "vllm.config.parallel.cpu_all_reduce_",
            lambda tensor, group, timeout: group.all_reduce(tensor, torch.distributed.ReduceOp.SUM),
            raising=False,
        )
        self.cores = [Core(index, self._group) for index in range(2)]
        self.engine_core = self
        model = SimpleNamespace(is_moe=True, is_multimodal_model=False)
        parallel = SimpleNamespace(data_parallel_size=2)
        self.vllm_config = SimpleNamespace(model_config=model, parallel_config=parallel)
        self._wave, self._runs, self._asked = 0, False, False
        self._ids = itertools.count()
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._loop = asyncio.get_running_loop()
        self._threads = [threading.Thread(target=core.run) for core in self.cores]
        self._threads += [threading.Thread(target=self._listen, args=(core,)) for core in self.cores]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends both. Raises what an engine died of."""
        self._group.abort()
        for core in self.cores:
            core.end()
        for thread in self._threads:
            thread.join()

    @property
    def failures(self) -> list[BaseException]:
        """What engines have died of."""
        return [core.failure for core in self.cores if core.failure is not None]

    def request(self, index: int, num_steps: int) -> None:
        """One of the engines is to make so many steps; the other one keeps it company."""
        self._send(self.cores[index], "take", num_steps)
        self._asked = True
        if not self._runs:
            self._start()

    def finish(self) -> None:
        """All requests end."""
        for core in self.cores:
            self._send(core, "take", 0)

    def _start(self) -> None:
        for core in self.cores:
            core.input_queue.put((EngineCoreRequestType.START_DP_WAVE, (self._wave, -1)))

    def _note(self, started: int | None, completed: int | None) -> None:
        """As vLLM's coordinator, which is told by the first engine when they start and stop."""
        if started is not None:
            self._wave, self._runs = started, True
        if completed is not None:
            self._wave, self._runs = completed + 1, False
            if self._asked:  # perhaps too late for that wave
                self._asked = False
                self._start()

    async def until_steps(self, index: int) -> None:
        """Returns when an engine has made a step more."""
        before = self.cores[index].num_done
        async with asyncio.timeout(MEETING_TIMEOUT_S):
            while self.cores[index].num_done == before:
                await asyncio.sleep(0.001)

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        """As the client's."""
        await self.call("pause_scheduler", mode, clear_cache)

    async def resume_generation(self) -> None:
        """As AsyncLLM's."""
        await self.call("resume_scheduler")

    async def call(self, method: str, *args: Any) -> None:
        """As the client's call_utility_async. Raises RuntimeError."""
        await asyncio.gather(*(self._send(core, method, *args) for core in self.cores))

    def _send(self, core: Core, method: str, *args: Any) -> "asyncio.Future[None]":
        call_id = next(self._ids)
        answer = self._answers[call_id] = self._loop.create_future()
        core.input_queue.put((EngineCoreRequestType.UTILITY, (0, call_id, method, args)))
        return answer

    def _listen(self, core: Core) -> None:
        while (output := core.output_queue.get()) is not None:
            told = output[1]
            if (told.start_wave, told.wave_complete) != (None, None):
                self._loop.call_soon_threadsafe(self._note, told.start_wave, told.wave_complete)
            if (answer := told.utility_output) is not None:
                self._loop.call_soon_threadsafe(self._answer, answer.call_id, answer.failure_message)
        if core.failure is not None:
            self._loop.call_soon_threadsafe(self._fail, core.failure)

    def _fail(self, failure: BaseException) -> None:
        for call_id in list(self._answers):
            self._answer(call_id, f"an engine died: {failure!r}")

    def _answer(self, call_id: int, failure: str | None) -> None:
        future = self._answers.pop(call_id)
        if future.done():
            return
        if failure is None:
            future.set_result(None)
        else:
            future.set_exception(RuntimeError(failure))
