"""Stops and starts vLLM's scheduler, and puts the engine to sleep."""

from vllm.v1.engine.async_llm import AsyncLLM

from genserve.engine.base import KvPolicy, PauseMode
from genserve.engine.liveness import Liveness
from genserve.errors import GenserveError


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
        self._multimodal = config.model_config.is_multimodal_model

    async def pause(self, mode: PauseMode, kv_policy: KvPolicy, timeout_s: float) -> None:
        """Stops scheduling; WAIT returns when no request runs."""
        await self._liveness.call(
            self._pause(mode, kv_policy is KvPolicy.RECOMPUTE),
            what="pause",
            timeout_s=timeout_s,
            occupies=self._lockstep,
        )

    async def _pause(self, mode: PauseMode, clear_cache: bool) -> None:
        # internal: AsyncLLM.pause_generation does just this and then sleeps for 20 ms.
        if clear_cache and self._multimodal:
            # EngineCore forgets its processed images, and would be sent the bare names of those that are known here.
            await self._llm.renderer.clear_mm_cache_async()
        await self._llm.engine_core.pause_scheduler_async(mode.value, clear_cache)

    async def reset_caches(self, timeout_s: float) -> None:
        """Drops what a pause with RECOMPUTE drops, in an engine that is paused already."""
        await self._liveness.call(self._reset_caches(), what="reset of the caches", timeout_s=timeout_s)

    async def _reset_caches(self) -> None:
        # internal: as EngineCore._reset_caches. AsyncLLM.reset_prefix_cache tells of the first engine alone.
        reset_running_requests = reset_connector = True
        dropped = await self._llm.engine_core.call_utility_all_async(
            "reset_prefix_cache", reset_running_requests, reset_connector
        )
        if not all(dropped):
            raise GenserveError("the keys and values in a connector could not be dropped")
        if self._multimodal:
            # AsyncLLM.reset_mm_cache would wait for its warm-up on the event loop.
            await self._llm.renderer.clear_mm_cache_async()
            await self._llm.engine_core.reset_mm_cache_async()
            await self._llm.engine_core.reset_encoder_cache_async()

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
