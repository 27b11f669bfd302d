"""Stops and starts vLLM's scheduler, and puts the engine to sleep."""

import asyncio
from collections.abc import Coroutine, Set
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

from genserve.engine.types import MEMORY_TAGS, KvPolicy, PauseMode, SleepTag
from genserve.engine.vllm.liveness import Liveness
from genserve.errors import EngineDeadError, GenserveError

_TURNS_TO_SEND = 4
"""Turns of the event loop until vLLM's client has sent a call to every engine: it makes a task for each."""


class Scheduling:
    """Pause, resume, sleep and wake-up of an engine.

    Engines of a mixture of experts under data parallelism run in `lockstep`: they pause together, and vLLM raises an
    error if one is resumed before this has happened. So callers wait for their pause even after it was given up. The
    next pause waits too, because vLLM keeps a flag and no count of pending pauses: an engine that has taken two pauses
    for one waits for the others for ever. Any other engine leaves a pause that was given up at once.
    """

    def __init__(self, llm: AsyncLLM, liveness: Liveness) -> None:
        self._llm = llm
        self._liveness = liveness
        config = llm.vllm_config
        self._lockstep = config.parallel_config.data_parallel_size > 1 and config.model_config.is_moe
        self._multimodal = config.model_config.is_multimodal_model

    async def pause(self, mode: PauseMode, kv_policy: KvPolicy, timeout_s: float) -> None:
        """Stops scheduling. WAIT returns when no request runs. In lockstep, within `timeout_s` from when the engine has
        finished its earlier calls."""
        if self._lockstep:
            await self._liveness.settled()
        await self._liveness.call(
            self._pause(mode, kv_policy is KvPolicy.RECOMPUTE),
            what="pause",
            timeout_s=timeout_s,
            occupies=self._lockstep,
        )

    async def _pause(self, mode: PauseMode, clear_cache: bool) -> None:
        # internal: as vLLM's sleep, which keeps what comes meanwhile in the queue. AsyncLLM.pause_generation sleeps for
        # 20 ms more, and from vLLM 0.33 on it also refuses new requests until the engine is resumed, unless mode is
        # "keep".
        if clear_cache and self._multimodal:
            # EngineCore forgets its processed images, and would get only the names of those that are known here.
            await self._llm.renderer.clear_mm_cache_async()
        await self._llm.engine_core.pause_scheduler_async(mode.value, clear_cache)

    async def reset_caches(self, timeout_s: float) -> None:
        """Drops what a pause with RECOMPUTE drops, in a paused engine."""
        await self._liveness.call(self._reset_caches(), what="reset of the caches", timeout_s=timeout_s)

    async def _reset_caches(self) -> None:
        # internal: as EngineCore._reset_caches. AsyncLLM.reset_prefix_cache reports the first engine only.
        reset_running_requests = reset_connector = True
        dropped = await self._llm.engine_core.call_utility_all_async(
            "reset_prefix_cache", reset_running_requests, reset_connector
        )
        if not all(dropped):
            raise GenserveError("the connector could not drop its keys and values")
        if self._multimodal:
            # AsyncLLM.reset_mm_cache would wait for its warm-up on the event loop.
            await self._llm.renderer.clear_mm_cache_async()
            await self._llm.engine_core.reset_mm_cache_async()
            await self._llm.engine_core.reset_encoder_cache_async()

    async def resume(self, timeout_s: float) -> None:
        """Schedules again, within `timeout_s` from when the engine has finished its earlier calls."""
        await self._liveness.settled()
        await self._liveness.call(self._llm.resume_generation(), what="resume", timeout_s=timeout_s)

    async def sleep(self, level: int, tags: Set[SleepTag], timeout_s: float) -> None:
        """Releases memory: the weights with the KV cache as vLLM's sleep does, or the KV cache alone as its
        release_kv_cache_memory does.

        The scheduler is already stopped: with a mode that waits, vLLM would sleep whenever the last request ends,
        however long after the call was given up.
        """
        if SleepTag.WEIGHTS in tags:
            await self._liveness.call(self._fall_asleep(level), what="sleep", timeout_s=timeout_s)
        elif SleepTag.KV_CACHE in tags:
            await self._liveness.call(self._give_kv_cache_back(), what="sleep", timeout_s=timeout_s)

    async def _fall_asleep(self, level: int) -> None:
        try:
            await self._llm.sleep(level=level, mode=PauseMode.KEEP.value)
        except VllmEngineDeadError:
            raise  # Liveness knows why
        except Exception as error:
            # vLLM's executor then takes no rank for asleep, whichever is, and would wake up none.
            self._liveness.declare_dead(f"a worker failed in sleep: {error}")
            raise EngineDeadError(f"a worker failed in sleep, and the daemon gives up the engine: {error}") from error

    async def _give_kv_cache_back(self) -> None:
        # vLLM resets its caches for this on a GPU. On the CPU it refuses, because it has no memory to release.
        if current_platform.is_cpu():
            await self._llm.reset_prefix_cache(reset_running_requests=True)
        else:
            await _explained(self._llm.release_kv_cache_memory(), "the KV cache could not be released")

    async def wake_up(self, tags: Set[SleepTag], timeout_s: float, *, paused: bool = False) -> None:
        """Allocates memory again, and with SCHEDULING schedules, unless it must stay `paused`; within `timeout_s` from
        when the engine has finished its earlier calls."""
        await self._liveness.settled()
        if paused and tags == {SleepTag.SCHEDULING}:
            return  # no memory is asleep: the engine is already stopped
        # vLLM does nothing, and only logs it, if one of the tags is awake. So vLLM decides itself what the last
        # part is.
        names = sorted(tag.value for tag in tags & MEMORY_TAGS) or [SleepTag.SCHEDULING.value]
        is_last = SleepTag.SCHEDULING in tags and bool(tags & MEMORY_TAGS)
        waking = _explained(self._llm.wake_up(None if is_last else names), "the sleeping parts could not be woken up")
        if paused and SleepTag.SCHEDULING in tags:
            waking = self._paused_after(waking)
        await self._liveness.call(waking, what="wake-up", timeout_s=timeout_s)

    async def _paused_after(self, waking: Coroutine[Any, Any, None]) -> None:
        """vLLM schedules as soon as the last part is awake. EngineCore handles all waiting calls before it takes a
        step, so a pause that is sent right after the wake-up leaves no step between the two. vLLM decides which of them
        is sent first: so there is another pause when it is awake."""
        woken = asyncio.ensure_future(waking)
        if not self._lockstep:
            for _ in range(_TURNS_TO_SEND):
                await asyncio.sleep(0)
            await asyncio.gather(woken, self._pause(PauseMode.KEEP, clear_cache=False), return_exceptions=True)
        await woken
        await self._pause(PauseMode.KEEP, clear_cache=False)


async def _explained(call: Coroutine[Any, Any, Any], failure: str) -> None:
    """Makes a call for which vLLM may raise any exception: memory that another process still holds is a common one."""
    try:
        await call
    except VllmEngineDeadError:
        raise  # Liveness knows why
    except Exception as error:
        raise GenserveError(f"{failure}: {error}") from error
