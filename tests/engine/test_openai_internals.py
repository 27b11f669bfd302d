"""What engine.vllm.openai uses of vLLM that is not public; as test_internals for the rest of the adapter."""

import inspect

import pytest
from vllm.entrypoints.launchers.api_server import entry, routers
from vllm.entrypoints.serve.lora import api_router as lora_router
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import MPClient

from genserve.engine.vllm.openai import messages, relay
from genserve.engine.vllm.openai.moved import NAMES, moved


@pytest.mark.parametrize("name", NAMES)
def test_what_has_moved_is_in_one_of_the_places_that_are_known(name: str) -> None:
    """engine.vllm.openai.moved has them."""
    assert callable(moved(name))


def test_messages_still_begin_with_the_fields_that_the_relay_reads() -> None:
    """engine.vllm.openai.messages decodes the beginnings of vLLM's messages, which are arrays."""
    for ours, theirs in (
        (messages.Request, EngineCoreRequest),
        (messages.Output, EngineCoreOutput),
        (messages.Outputs, EngineCoreOutputs),
    ):
        names = ours.__struct_fields__
        assert theirs.__struct_config__.array_like
        assert theirs.__struct_fields__[: len(names)] == names
    assert "client_idx, call_id, method, args = request" in inspect.getsource(EngineCoreProc.process_input_sockets)
    assert 'to_bytes(2, "little")' in inspect.getsource(MPClient.__init__)


def test_the_calls_that_the_relay_answers_are_still_made() -> None:
    """A server that starts asks for the first, and resets a cache of the engine with the second."""
    source = inspect.getsource(entry.build_async_engine_client_from_engine_args)
    assert "reset_mm_cache()" in source
    assert "get_supported_tasks()" in inspect.getsource(entry.build_and_serve)
    for method in relay._HARMLESS | relay._NOT_NEEDED:
        assert hasattr(EngineCoreProc, method), method


def test_routes_that_control_the_engine_still_need_these_variables() -> None:
    """engine.vllm.openai.environment drops them."""
    assert "if envs.VLLM_SERVER_DEV_MODE:" in inspect.getsource(routers.register_api_routers)
    assert "if not envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:" in inspect.getsource(lora_router.attach_router)
