"""What clients of an engine, and their start, use of vLLM that is not public; as test_internals for all else."""

import inspect
import re

from vllm.v1.engine import core
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import MPClient
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.engine.utils import bind_engine_zmq_listeners, launch_core_engines

from tests.support.signatures import parameters


def test_an_engine_is_still_started_for_several_clients_by_these_names() -> None:
    """engine.vllm.start.clients does what `vllm serve` does, and then owns the processes as the only client does."""
    assert {"vllm_config", "num_api_servers"} <= parameters(bind_engine_zmq_listeners)
    assert {"vllm_config", "executor_class", "log_stats", "addresses"} == parameters(launch_core_engines)
    assert {"client_addresses", "client_count", "client_index"} <= parameters(AsyncLLM.from_vllm_config)
    source = inspect.getsource(MPClient.__init__)
    for name in ("input_address", "output_address", "input_listener", "output_listener", "stats_update_address"):
        assert f'"{name}"' in source
    assert "self.resources.engine_manager = engine_launch.engine_manager" in source
    assert "self.resources.coordinator = engine_launch.coordinator" in source
    assert "self.start_engine_core_monitor()" in source


def test_late_client_still_needs_a_message_that_the_engine_is_ready() -> None:
    """engine.vllm.clients.join says so with an empty message of each engine's identity, which changes no setting, and
    stands before vLLM's client of EngineCore to note the ids that this gets. It knows what the engine would answer,
    because an answer to its predecessor must not come; clients.seat ends those of a client that has died."""
    source = inspect.getsource(MPClient.__init__)
    assert "self.input_socket = self.resources.input_socket = make_zmq_socket(" in source
    assert 'rank.to_bytes(2, "little") for rank in self.engine_ranks_managed' in source
    assert "identity, payload = sync_input_socket.recv_multipart()" in source
    assert "if payload\n            else None" in inspect.getsource(MPClient._apply_ready_response)
    assert "await self.engine_core.add_request_async(" in inspect.getsource(AsyncLLM._add_request)
    assert "await self.engine_core.add_request_async(" in inspect.getsource(AsyncLLM.add_request)
    # What AsyncLLM set on its client would stay on the wrapper.
    assert re.search(r"self\.engine_core\.\w+ = ", inspect.getsource(AsyncLLM)) is None
    assert 'if not hasattr(self, "_supported_tasks"):' in inspect.getsource(AsyncLLM.get_supported_tasks)
    assert parameters(core.EngineCore.abort_requests) == {"self", "request_ids"}
    assert "req_state = self.request_states.get(req_id)" in inspect.getsource(OutputProcessor.process_outputs)
    # The ids are short enough for memory.id_table: a number, and eight characters.
    assert 'f"{request.external_req_id}-{random_uuid():.8}"' in inspect.getsource(InputProcessor.assign_request_id)
    assert 'f"{index}_{self.request_id}"' in inspect.getsource(ParentRequest.get_child_info)
