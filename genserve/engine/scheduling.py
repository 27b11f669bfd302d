"""Stops and starts vLLM's scheduler, and puts the engine to sleep."""

from vllm.v1.engine.async_llm import AsyncLLM

from genserve.engine.base import KvPolicy, PauseMode
from genserve.engine.liveness import Liveness


class Scheduling:
    """Pause, resume, sleep and wake-up of an engine.

    Engines of a mixture of experts under data parallelism run in `lockstep`: they pause together, and vLLM raises when
    one is resumed before that has happened. So their pause is a call to be waited for, also after it was given up. Any
    other engine leaves a pause that was given up at once.
    """

    def __init__(self, llm: AsyncLLM, liveness: Liveness) -> None:
        self._llm = llm
        self._liveness = liveness
        config = llm.vllm_config
        self._lockstep = config.parallel_config.data_parallel_size > 1 and config.model_config.is_moe

    async def pause(self, mode: PauseMode, kv_policy: KvPolicy, timeout_s: float) -> None:
        """Stops scheduling; WAIT returns when no request runs."""
        # internal: AsyncLLM.pause_generation does just this and then sleeps for 20 ms.
        await self._liveness.call(
            self._llm.engine_core.pause_scheduler_async(mode.value, kv_policy is KvPolicy.RECOMPUTE),
            what="pause",
            timeout_s=timeout_s,
            occupies=self._lockstep,
        )

    async def resume(self, timeout_s: float) -> None:
        """Schedules again, within `timeout_s` from when the engine has ended what it was asked before."""
        await self._liveness.settled()
        await self._liveness.call(self._llm.resume_generation(), what="resume", timeout_s=timeout_s)

    async def sleep(self, timeout_s: float) -> None:
        """Gives the device's memory back. The scheduler stands still already: with a mode that waits vLLM would sleep
        whenever the last request ends, however long after the call was given up. Level 2 would drop the weights."""
        await self._liveness.call(
            self._llm.sleep(level=1, mode=PauseMode.KEEP.value), what="sleep", timeout_s=timeout_s
        )

    async def wake_up(self, timeout_s: float) -> None:
        """Takes the memory again, and schedules; within `timeout_s` from when the engine has ended what it was asked
        before."""
        await self._liveness.settled()
        await self._liveness.call(self._llm.wake_up(), what="wake-up", timeout_s=timeout_s)
