"""Which requests an engine works on: those that it admits, until they end or are given up."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.engine import FinishReason as VllmFinishReason
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

from genserve.engine.generation import (
    FinishReason,
    GenerationRequest,
    Output,
    Sampling,
    TextPrompt,
    TokenPrompt,
)
from genserve.engine.types import EngineInfo
from genserve.engine.vllm.liveness import Liveness
from genserve.engine.vllm.requests.intake import Intake, IntakeLimits
from genserve.engine.vllm.requests.stream import VllmStream
from genserve.errors import EngineDeadError, InvalidFieldError, PromptTooLongError, QueueFullError, RequestIdInUseError
from tests.support.patience import turns
from tests.support.refusals import refuses
from tests.support.scripted_engine import Gate
from tests.unit.engine.vllm.requests.scripted_llm import (
    Builder,
    Loras,
    ProcessingLlm,
    ScriptedLlm,
    ScriptedTally,
)

MAX_ACTIVE, MAX_MODEL_LEN = 4, 8
INFO = EngineInfo("m", "M", "bfloat16", 8, "cpu", MAX_MODEL_LEN, 4, 4, MAX_ACTIVE, 1, 1, 1, {})
CAUSE = "EngineCore was ended by SIGKILL"


@pytest.fixture
def llm() -> ScriptedLlm:
    return ScriptedLlm()


@pytest.fixture
def liveness() -> Liveness:
    return Liveness()


@pytest.fixture
def tally() -> ScriptedTally:
    return ScriptedTally()


@pytest.fixture
def requests(llm: ScriptedLlm, liveness: Liveness, tally: ScriptedTally) -> Intake:
    return intake(llm, liveness, tally)


def intake(llm: ScriptedLlm, liveness: Liveness, tally: ScriptedTally, weight_version: int = 0) -> Intake:
    """That of an engine that serves this version."""
    parts: Any = (llm, liveness, INFO, IntakeLimits(MAX_ACTIVE, MAX_ACTIVE), Loras())
    made = Intake(*parts, tally, lambda: weight_version)
    made.builder = Builder()  # type: ignore[assignment]
    return made


def request(request_id: str = "r", n: int | None = None, num_tokens: int = 2) -> GenerationRequest:
    """One for `n` sequences."""
    return GenerationRequest(request_id, TokenPrompt([1] * num_tokens), Sampling(n=n))


def is_idle(requests: Intake) -> bool:
    """Whether nobody would wait for one."""
    waiting = requests.wait_idle()
    try:
        waiting.send(None)
    except StopIteration:
        return True
    waiting.close()
    return False


async def test_a_submission_that_is_cancelled_is_aborted_in_vllm(requests: Intake, llm: ScriptedLlm) -> None:
    """vLLM may have it by then, and would compute tokens for nobody; a second cancellation does not stop the abort.
    Afterwards the id is free."""
    llm.taking, llm.ending = Gate(), Gate()
    submitting = asyncio.create_task(requests.submit(request()))
    await llm.taking.reached.wait()
    assert not is_idle(requests)
    submitting.cancel()
    await llm.ending.reached.wait()
    submitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    ending, llm.taking, llm.ending = llm.ending, None, None
    ending.open.set()
    await asyncio.sleep(0)
    assert llm.aborted == [("r", False)]
    assert is_idle(requests)
    await requests.submit(request())


async def test_a_submission_that_vllm_refuses_is_aborted_there(requests: Intake, llm: ScriptedLlm) -> None:
    """It may fail with some of the sequences of a request already there."""
    llm.refusal = ValueError("no such thing")
    with refuses(InvalidFieldError, field="request", says="no such thing"):
        await requests.submit(request(n=3))
    assert llm.aborted == [("r", False)]
    assert is_idle(requests)
    llm.refusal = None
    await requests.submit(request(n=MAX_ACTIVE))


async def test_an_id_outside_the_vocabulary_is_refused_by_its_field(requests: Intake, llm: ScriptedLlm) -> None:
    """vLLM would refuse it, too, and not name the field."""
    with refuses(InvalidFieldError, field="token_ids", says="8 is outside the vocabulary of 8 tokens"):
        await requests.submit(GenerationRequest("r", TokenPrompt([1, 8]), Sampling()))
    assert is_idle(requests)
    await requests.submit(GenerationRequest("r", TokenPrompt([1, 7]), Sampling()))


async def test_an_engine_that_has_died_is_not_asked_to_abort(
    requests: Intake, llm: ScriptedLlm, liveness: Liveness
) -> None:
    """No answer would come."""
    llm.taking = Gate()
    submitting = asyncio.create_task(requests.submit(request()))
    await llm.taking.reached.wait()
    llm.refusal = VllmEngineDeadError()
    liveness.declare_dead(CAUSE)
    llm.taking.open.set()
    with refuses(EngineDeadError, says=CAUSE):
        await submitting
    assert llm.aborted == []


async def test_request_to_an_engine_that_has_died_is_refused_with_the_cause(
    requests: Intake, liveness: Liveness
) -> None:
    """Whatever version it asks for, and though vLLM may not know it yet."""
    liveness.declare_dead(CAUSE)
    with refuses(EngineDeadError, says=CAUSE):
        await requests.submit(replace(request(), min_weight_version=1))


async def test_admission_that_vllm_refuses_as_dead_waits_for_the_cause(
    requests: Intake, llm: ScriptedLlm, liveness: Liveness
) -> None:
    """vLLM refuses calls a moment before the cause is known."""
    llm.refusal = VllmEngineDeadError()
    submitting = asyncio.create_task(requests.submit(request()))
    await turns()
    liveness.declare_dead(CAUSE)
    with refuses(EngineDeadError, says=CAUSE):
        await submitting


async def test_stream_of_an_engine_that_has_died_ends_with_the_cause(tally: ScriptedTally) -> None:
    """vLLM ends streams a moment before the cause is known."""
    llm = ProcessingLlm()
    liveness = Liveness(lambda: llm.output_processor.propagate_error(VllmEngineDeadError()))
    ended: list[bool] = []
    stream = await intake(llm, liveness, tally).submit(replace(request(), output=Output(text=False)))
    stream.call_when_ready(lambda: ended.append(True))
    llm.output_processor.propagate_error(VllmEngineDeadError())
    assert ended == []
    assert stream.take() is None
    liveness.declare_dead(CAUSE)
    assert ended == [True]
    with refuses(EngineDeadError, says=CAUSE):
        stream.take()


async def test_a_stream_that_is_closed_ends_the_request_by_vllm_s_own_id(requests: Intake, llm: ScriptedLlm) -> None:
    """A later request may have the same id by then."""
    stream = await requests.submit(request())
    assert not is_idle(requests)
    await stream.close()
    await stream.close()
    assert llm.aborted == [("r-internal", True)]
    assert is_idle(requests)


async def test_sequences_are_admitted_up_to_a_limit(requests: Intake) -> None:
    """Those of a request count from before vLLM has it until its stream ends. A client may come again."""
    first = await requests.submit(request("a", n=3))
    with refuses(QueueFullError) as refused:
        await requests.submit(request("b", n=2))
    assert refused.value.retry_after_s == 1.0
    await requests.submit(request("c"))
    with pytest.raises(QueueFullError):
        await requests.submit(request("d"))
    await first.close()
    await requests.submit(request("b", n=3))


async def test_an_id_is_taken_from_the_beginning_of_its_admission(requests: Intake, llm: ScriptedLlm) -> None:
    """vLLM would mix the outputs of two requests up."""
    llm.taking = Gate()
    submitting = asyncio.create_task(requests.submit(request()))
    await llm.taking.reached.wait()
    with pytest.raises(RequestIdInUseError):
        await requests.submit(request())
    llm.taking.open.set()
    stream = await submitting
    with pytest.raises(RequestIdInUseError):
        await requests.submit(request())
    await stream.close()
    await requests.submit(request())


async def test_a_prompt_leaves_room_for_one_token(requests: Intake) -> None:
    """Otherwise it is refused, and nothing of it is left."""
    with pytest.raises(PromptTooLongError):
        await requests.submit(request(num_tokens=MAX_MODEL_LEN))
    assert is_idle(requests)
    await requests.submit(request(num_tokens=MAX_MODEL_LEN - 1))


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"sampling": Sampling(n=5)}, "sampling.n"),
        ({"cache_salt": "x" * 1025}, "cache.salt"),
    ],
)
async def test_what_cannot_be_is_refused_before_the_prompt_is_read(
    requests: Intake, fields: dict[str, Any], path: str
) -> None:
    """And what just can be is not."""
    with refuses(InvalidFieldError, field=path):
        await requests.submit(replace(request(num_tokens=MAX_MODEL_LEN), **fields))
    await requests.submit(replace(request(n=4), cache_salt="x" * 1024))


async def test_an_abort_tells_what_ran_and_what_did_not(requests: Intake, llm: ScriptedLlm) -> None:
    """All of them without ids."""
    await requests.submit(request("a"))
    await requests.submit(request("b"))
    assert requests.abort(["a", "x"]) == (["a"], ["x"])
    assert requests.abort(None) == (["a", "b"], [])
    await asyncio.sleep(0)
    assert llm.aborted == [("a-internal", True), ("b-internal", True)]


def held_up(step: str, requests: Intake, llm: ScriptedLlm) -> Gate:
    """Nothing gets past this step until the gate is opened."""
    gate = Gate()
    if step == "vLLM":
        llm.taking = gate
        return gate

    async def waits(*args: object) -> object:
        gate.reached.set()
        await gate.open.wait()
        raise AssertionError("it was not ended")

    if step == "tokenizer":
        requests.prompts.encode = waits  # type: ignore[method-assign, assignment]
    elif step == "constraint":
        requests.builder.engine_request = waits  # type: ignore[method-assign, assignment]
    else:
        requests.adapters.use = waits  # type: ignore[method-assign, assignment]
    return gate


@pytest.mark.parametrize("by_id", [True, False], ids=["by id", "all"])
@pytest.mark.parametrize("step", ["tokenizer", "adapter", "constraint", "vLLM"])
async def test_an_abort_ends_what_is_being_admitted(requests: Intake, llm: ScriptedLlm, step: str, by_id: bool) -> None:
    """From the moment its id is taken, however long the admission takes: it ends as ABORTED, without a token, and its
    id is free. Who waits for the admission is not cancelled."""
    gate = held_up(step, requests, llm)
    cancellations: list[int] = []

    async def submit() -> Any:
        prompt = TextPrompt("a") if step == "tokenizer" else TokenPrompt([1, 2])
        stream = await requests.submit(replace(request(n=3), prompt=prompt, lora_name="adapter"))
        cancellations.append(asyncio.current_task().cancelling())  # type: ignore[union-attr]
        await asyncio.sleep(0)
        return stream

    submitting = asyncio.create_task(submit())
    await gate.reached.wait()
    ids = ["r"] if by_id else None
    assert requests.abort(ids) == (["r"], [])
    assert requests.abort(ids) == (["r"], []), "it is still being ended"
    stream = await submitting
    assert cancellations == [0]
    assert requests.abort(["r"]) == ([], ["r"]) and is_idle(requests)
    assert llm.aborted == ([("r", False)] if step == "vLLM" else [])

    noted: list[bool] = []
    stream.call_when_ready(lambda: noted.append(True))
    assert noted == [True] and not stream.is_finished
    update = stream.take()
    assert stream.is_finished and stream.take() is None
    assert update.prompt is not None and update.prompt.num_tokens == (0 if step == "tokenizer" else 2)
    assert [delta.index for delta in update.outputs] == [0, 1, 2]
    assert {delta.finish.reason for delta in update.outputs if delta.finish} == {FinishReason.ABORTED}
    assert update.usage is not None and update.usage.num_output_tokens == 0
    await stream.close()


async def test_a_client_that_goes_while_its_request_is_aborted_is_cancelled(requests: Intake, llm: ScriptedLlm) -> None:
    """Both at once: the cancellation is not lost."""
    llm.taking = Gate()
    submitting = asyncio.create_task(requests.submit(request()))
    await llm.taking.reached.wait()
    requests.abort(["r"])
    submitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    assert is_idle(requests)


async def test_sequences_of_other_clients_count_for_the_limit(requests: Intake, tally: ScriptedTally) -> None:
    """The limit is that of the engine. The others are told of each admission and each end."""
    tally.num_elsewhere = MAX_ACTIVE - 2
    stream = await requests.submit(request("two", n=2))
    assert tally.told == (2, 1)
    with refuses(QueueFullError):
        await requests.submit(request("three"))
    await stream.close()
    assert tally.told == (0, 0)


async def test_tokens_count_versions_behind_when_their_sequence_ends(tally: ScriptedTally) -> None:
    """A sequence that saw two versions has tokens of both."""
    llm = ProcessingLlm()
    requests = intake(llm, Liveness(), tally, weight_version=5)
    stream = await requests.submit(replace(request(), output=Output(text=False)))
    llm.step("r", 10, 3)
    llm.step("r", 4, 5, VllmFinishReason.LENGTH)
    assert stream.take() is not None
    assert tally.served_tokens == [(2, 10), (0, 4)]


async def test_a_request_that_is_admitted_during_a_pause_ends_as_paused(tally: ScriptedTally) -> None:
    """The engine aborts it too, if it came before the pause."""
    llm = ProcessingLlm()
    requests = intake(llm, Liveness(), tally)

    async def submit(request_id: str) -> VllmStream:
        return await requests.submit(replace(request(request_id), output=Output(text=False)))

    before = await submit("before")
    assert requests.pausing() == 1
    during = await submit("during")
    requests.paused()
    after = await submit("after")
    reasons: list[FinishReason] = []
    for stream in (before, during, after):
        llm.step(stream.request_id, 1, 0, VllmFinishReason.ABORT)
        update = stream.take()
        assert update is not None and update.outputs[0].finish is not None
        reasons.append(update.outputs[0].finish.reason)
    assert reasons == [FinishReason.PAUSED, FinishReason.PAUSED, FinishReason.ABORTED]


async def test_a_pause_leaves_an_aborted_request_its_reason(tally: ScriptedTally) -> None:
    """Whoever aborted it reads that it was aborted. The pause does not count it."""
    llm = ProcessingLlm()
    requests = intake(llm, Liveness(), tally)
    stream = await requests.submit(replace(request(), output=Output(text=False)))
    stream.abort()
    assert requests.pausing() == 0
    llm.step("r", 1, 0, VllmFinishReason.ABORT)
    update = stream.take()
    assert update is not None and update.outputs[0].finish is not None
    assert update.outputs[0].finish.reason is FinishReason.ABORTED
    await stream.close()


async def test_a_pause_does_not_count_what_has_ended_and_nobody_has_read(tally: ScriptedTally) -> None:
    """It did not end that."""
    llm = ProcessingLlm()
    requests = intake(llm, Liveness(), tally)
    stream = await requests.submit(replace(request(), output=Output(text=False)))
    llm.step("r", 1, 0, VllmFinishReason.LENGTH)
    assert requests.pausing() == 0
    update = stream.take()
    assert update is not None and update.outputs[0].finish is not None
    assert update.outputs[0].finish.reason is FinishReason.LENGTH
