"""What engine.vllm.openai uses of vLLM that is not public; as test_internals for the rest of the adapter."""

import inspect
import re

import pytest
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.launchers.api_server import routers
from vllm.entrypoints.serve.exception_handling import error_response
from vllm.entrypoints.serve.lora import api_router as lora_router
from vllm.v1.engine import async_llm
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor

from genserve.engine.vllm.openai.engine import ALLOWED
from genserve.engine.vllm.openai.flags import NAMES, moved


@pytest.mark.parametrize("name", NAMES)
def test_what_has_moved_is_in_one_of_the_places_that_are_known(name: str) -> None:
    """engine.vllm.openai.flags has them."""
    assert callable(moved(name))


def test_every_request_is_still_made_by_the_input_processor_of_its_client() -> None:
    """engine.vllm.openai.engine checks what that makes. The one that vLLM's client makes itself is aborted at once."""
    source = inspect.getsource(async_llm)
    made = re.findall(r"self\.input_processor\.(\w+)\(", source)
    assert set(made) == {
        *("apply_watermarking", "assign_request_id", "process_inputs", "process_inputs_async", "resolve_watermarking")
    }
    assert len(re.findall(r"\bEngineCoreRequest\(", source)) == 1
    assert "abort_immediately=True" in inspect.getsource(AsyncLLM.notify_kv_transfer_request_rejected)
    assert "self.process_inputs" in inspect.getsource(InputProcessor.__init__)


def test_vllm_still_checks_admission_before_an_answer_and_for_each_request() -> None:
    """engine.vllm.openai.engine refuses there what exceeds the limit of all clients, with the status of its error."""
    assert "self.engine_client.check_admission(n)" in inspect.getsource(GenerateBaseServing._preflight)
    for adds in (AsyncLLM.add_request, AsyncLLM._add_request):
        source = inspect.getsource(adds)
        assert source.index("self.check_admission(") < source.index("self.output_processor.add_request(")
    assert "exc.http_status" in inspect.getsource(error_response)


def test_what_a_server_may_ask_of_its_client_is_still_there() -> None:
    """engine.vllm.openai.engine refuses all else, what a newer vLLM adds too."""
    calls = {name for name, each in vars(AsyncLLM).items() if inspect.iscoroutinefunction(each)}
    assert calls >= ALLOWED
    assert {"pause_generation", "resume_generation", "sleep", "wake_up", "collective_rpc", "add_lora"} <= calls
    for streams in (AsyncLLM.generate, AsyncLLM.encode):
        assert inspect.isasyncgenfunction(streams)
    assert list(inspect.signature(AsyncLLM.generate).parameters)[:4] == [
        *("self", "prompt", "sampling_params", "request_id")
    ]


def test_a_sequence_that_is_aborted_still_answers_with_what_it_has() -> None:
    """engine.vllm.openai.engine ends requests so, as those are ended that a pause aborts."""
    assert "finish_reason=FinishReason.ABORT" in inspect.getsource(OutputProcessor.abort_requests)


def test_routes_that_control_the_engine_still_need_these_variables() -> None:
    """engine.vllm.openai.environment drops them."""
    assert "if envs.VLLM_SERVER_DEV_MODE:" in inspect.getsource(routers.register_api_routers)
    assert "if not envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:" in inspect.getsource(lora_router.attach_router)
