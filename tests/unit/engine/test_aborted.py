"""A request that is ended before the engine has it. tests/unit/engine/vllm/requests/test_intake.py has more."""

import asyncio
from functools import partial

import pytest

from genserve.engine.aborted import AbortedStream, Admission
from genserve.engine.generation import FinishReason, GenerationRequest, TextPrompt

REQUEST = GenerationRequest("r", TextPrompt("x"))


async def admitted() -> str:
    """What an engine that has room answers."""
    return "stream"


async def never() -> str:
    """The answer of an engine that admits nothing."""
    await asyncio.Event().wait()
    return "stream"


def reason_of(stream: object) -> FinishReason:
    """Why the only sequence of a stream ended."""
    assert isinstance(stream, AbortedStream)
    update = stream.take()
    assert update is not None and stream.is_finished
    (sequence,) = update.outputs
    assert sequence.finish is not None
    return sequence.finish.reason


async def test_abort_before_the_admission_begins_asks_no_engine() -> None:
    """The task that admits may not have run yet."""
    admission = Admission(REQUEST)
    admitting = asyncio.create_task(admission.run(admitted))
    admission.abort()
    assert reason_of(await admitting) is FinishReason.ABORTED


@pytest.mark.parametrize("which", [[0], [1], [0, 1]])
async def test_admission_within_another_ends_whichever_is_aborted(which: list[int]) -> None:
    """A call admits a request by asking the engine, which admits it: both may be told, in one task."""
    outer, inner = both = Admission(REQUEST), Admission(REQUEST)
    task = asyncio.create_task(outer.run(partial(inner.run, never)))
    await asyncio.sleep(0)
    for index in which:
        both[index].abort()
    assert reason_of(await task) is FinishReason.ABORTED


@pytest.mark.filterwarnings("error")
async def test_admission_that_is_cancelled_before_it_begins_leaves_nothing() -> None:
    """Not even a coroutine that is never awaited."""
    task = asyncio.create_task(Admission(REQUEST).run(admitted))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
