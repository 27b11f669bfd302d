"""The request that every engine answers before anybody may ask; with streams by script."""

import inspect

import pytest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor

from genserve.engine.generation import GenerationRequest, TokenPrompt
from genserve.engine.vllm.start import first_step
from genserve.errors import EngineDeadError
from tests.unit.engine.vllm.start.first_streams import FirstStream


async def requests(num_engines: int, max_model_len: int, **fails: Exception) -> list[GenerationRequest]:
    """What is asked of so many engines. Requests of engine N fail by `fails["engineN"]`."""
    asked = []

    async def submit(request: GenerationRequest) -> FirstStream:
        asked.append(request)
        return FirstStream(request.request_id, fails.get(f"engine{request.data_parallel_rank}"))

    await first_step.take(submit, num_engines, max_model_len)
    return asked


@pytest.mark.parametrize("num_engines", [1, 3])
async def test_every_engine_is_asked(num_engines: int) -> None:
    """One of them may be on a host that lacks a kernel."""
    asked = await requests(num_engines, 2048)
    assert [each.data_parallel_rank for each in asked] == list(range(num_engines))
    assert len({each.request_id for each in asked}) == len({each.cache_salt for each in asked}) == num_engines


async def test_one_engine_is_asked_at_a_time() -> None:
    """--max-active-requests may be 1."""
    streams: list[FirstStream] = []

    async def submit(request: GenerationRequest) -> FirstStream:
        assert all(each.is_finished for each in streams)
        streams.append(FirstStream(request.request_id, None))
        return streams[-1]

    await first_step.take(submit, 3, 2048)
    assert len(streams) == 3


async def test_a_prompt_and_a_token_after_it_are_computed() -> None:
    """By different kernels. The model's end-of-sequence token must not end it earlier."""
    (asked,) = await requests(1, 2048)
    assert isinstance(asked.prompt, TokenPrompt)
    assert len(asked.prompt.ids) > 1
    assert (asked.stop.max_tokens, asked.stop.ignore_eos) == (2, True)


async def test_it_fits_into_the_smallest_context() -> None:
    """A prompt needs room for one token of output."""
    (asked,) = await requests(1, 2)
    assert isinstance(asked.prompt, TokenPrompt)
    assert list(asked.prompt.ids) == [0]


async def test_one_engine_that_cannot_is_an_error() -> None:
    """As it says, and not as one of a group."""
    with pytest.raises(EngineDeadError, match="no kernel"):
        await requests(2, 2048, engine1=EngineDeadError("no kernel"))


def test_vllm_still_asks_at_each_output_whether_it_is_counted_or_traced() -> None:
    """VllmEngine turns both off for this step."""
    handler = inspect.getsource(AsyncLLM._run_output_handler)
    assert "self._logger_ref = [self.logger_manager]" in handler
    assert "if logger_ref[0]:" in handler
    assert "if self.tracing_enabled:" in inspect.getsource(OutputProcessor.process_outputs)
