"""What requests over HTTP have to pass."""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from genserve.engine.types import EngineInfo
from genserve.engine.vllm.openai.engine import ALLOWED, MAX_ID_BYTES, CheckedInputs, Door, ServedLLM
from genserve.engine.vllm.requests.refusals import Serving
from tests.unit.engine.vllm.requests.scripted_llm import ScriptedTally

MAX_ACTIVE, MAX_N = 5, 4
INFO = EngineInfo("m", "M", "bfloat16", 64, "cpu", 64, 4, 4, MAX_N, 1, 1, 1, {})


def door(unfinished: Any = (), num_elsewhere: int = 0) -> Door:
    """Of an engine with Model Runner V2."""
    return Door(Serving("v2"), INFO, MAX_ACTIVE, unfinished, ScriptedTally(num_elsewhere))


def built(params: SamplingParams | None = None, request_id: str = "r", lora: Any = None) -> EngineCoreRequest:
    """A request as vLLM makes it."""
    return EngineCoreRequest(request_id, [1, 2], None, params or SamplingParams(), None, 0.0, lora, None, None)


def with_bad_words(num_tokens: int) -> SamplingParams:
    """As vLLM completes parameters: with token ids."""
    params = SamplingParams(bad_words=["x"])
    params._bad_words_token_ids = [[7] * num_tokens]
    return params


@pytest.mark.parametrize(
    ("much", "parameter"),
    [
        (SamplingParams(allowed_token_ids=[3] * 1025), "allowed_token_ids"),
        (SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0)), "logit_bias"),
        (SamplingParams(min_tokens=1, stop_token_ids=[*range(129)]), "stop_token_ids"),
        (SamplingParams(seed=2**63), "seed"),
        (SamplingParams(seed=2**63 - 1, n=2), "seed"),  # of the second sequence
    ],
)
def test_what_would_end_the_engine_is_refused_before_an_answer_begins(much: SamplingParams, parameter: str) -> None:
    """And again when vLLM has completed it. The field is named."""
    for check in (lambda: door().check_early(much, "r"), lambda: door().complete(built(much))):
        with pytest.raises(VLLMValidationError) as caught:
            check()
        assert caught.value.parameter == parameter
        assert str(caught.value).startswith(f"{parameter} must ")


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (built(with_bad_words(1025)), "bad_words must not be longer"),
        (built(lora=LoRARequest("x", 1, "/x")), "an adapter cannot be named over HTTP"),
        (msgspec.structs.replace(built(), cache_salt="s" * 1025), "cache_salt must be at most 1024 characters"),
        (built(request_id="i" * (MAX_ID_BYTES + 1)), "request_id must be at most 1024 bytes"),
        (built(SamplingParams(extra_args={"a": {1: object()}})), "is not serializable"),
    ],
)
def test_what_only_shows_when_vllm_has_made_a_request_is_refused_then(request_: EngineCoreRequest, says: str) -> None:
    """Words that are too many tokens, adapters, ids that no table holds, and what EngineCore could not decode."""
    with pytest.raises(VLLMValidationError, match=says):
        door().complete(request_)


def test_an_ordinary_request_passes_and_is_no_longer_than_the_context() -> None:
    """V2 adds the prompt's length to its numbers in 32 bits."""
    params = SamplingParams(
        allowed_token_ids=[3], logit_bias={3: 1.0}, min_tokens=2**30, max_tokens=2**31 - 1, n=4, seed=7
    )
    door().check_early(params, "i" * MAX_ID_BYTES)
    request = built(params, "i" * MAX_ID_BYTES)
    door().complete(request)
    assert (params.max_tokens, params.min_tokens) == (INFO.max_model_len, INFO.max_model_len)


def test_a_request_that_is_not_for_tokens_passes() -> None:
    """Its id and its adapter are looked at."""
    request = msgspec.structs.replace(built(), sampling_params=None)
    door().complete(request)
    with pytest.raises(VLLMValidationError, match="request_id"):
        door().complete(msgspec.structs.replace(request, request_id="i" * (MAX_ID_BYTES + 1)))


@pytest.mark.parametrize(("num_own", "num_elsewhere", "n"), [(5, 0, 1), (0, 5, 1), (2, 2, 2), (0, 2, 4)])
def test_more_sequences_than_the_limit_of_all_clients_are_refused(num_own: int, num_elsewhere: int, n: int) -> None:
    """With the status that says that they may be sent again."""
    full = door(range(num_own), num_elsewhere)
    with pytest.raises(GracefulHTTPError, match=f"{num_own + num_elsewhere} sequences .* of 5 at most") as caught:
        full.check_room(n)
    assert caught.value.http_status == HTTPStatus.SERVICE_UNAVAILABLE
    full.check_room(MAX_ACTIVE - num_own - num_elsewhere)


@pytest.mark.parametrize("num_elsewhere", [0, MAX_ACTIVE])
def test_more_sequences_than_any_request_may_have_are_never_admitted(num_elsewhere: int) -> None:
    """However full the engine is: the status of what may be sent again would be wrong."""
    with pytest.raises(VLLMValidationError, match=r"n must be at most 4 \(--max-n\), is 5"):
        door((), num_elsewhere).check_room(MAX_N + 1)


async def test_the_end_of_the_last_request_is_reported() -> None:
    """To the other clients, and to a drain that waits for it."""
    unfinished: list[str] = []
    tally = ScriptedTally(0)
    entrance = Door(Serving("v2"), INFO, MAX_ACTIVE, unfinished, tally)
    await entrance.wait_idle()
    unfinished.append("a")
    entrance.count()
    idle = asyncio.create_task(entrance.wait_idle())
    await asyncio.sleep(0)
    assert not idle.done() and tally.told == (1, 1)
    unfinished.clear()
    entrance.count()
    await idle
    assert tally.told == (0, 0)


async def test_each_request_that_vllm_makes_is_checked() -> None:
    """In either way. All else of its processor is there."""

    class Inputs:
        """vLLM's."""

        renderer = "renderer"

        def process_inputs(self, request_id: str) -> str:
            """Makes one."""
            return f"made {request_id}"

        async def process_inputs_async(self, request_id: str) -> str:
            """Makes one in a thread."""
            return f"made {request_id} in a thread"

    checked: list[Any] = []
    inputs: Any = CheckedInputs(Inputs(), checked.append)
    assert (inputs.process_inputs("a"), await inputs.process_inputs_async("b")) == ("made a", "made b in a thread")
    assert checked == ["made a", "made b in a thread"]
    assert inputs.renderer == "renderer"


CONTROLS = ("add_lora", "collective_rpc", "pause_generation", "reset_mm_cache", "sleep", "update_weight_version")


@pytest.mark.parametrize("method", CONTROLS)
async def test_calls_that_control_the_engine_are_refused(method: str) -> None:
    """Before vLLM's client does anything: this one has no engine."""
    call: Callable[..., Any] = getattr(ServedLLM, method)
    with pytest.raises(RuntimeError, match=f"^{method}: only genserve's gRPC services control the engine"):
        await call(SimpleNamespace(), "argument")
    assert method not in ALLOWED
