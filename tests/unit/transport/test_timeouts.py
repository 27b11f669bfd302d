"""The service config: it is complete, clients of every language have the same one, and ours does what it says."""

import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import pytest

from genserve.client import AsyncClient
from genserve.client.direct.replica import DirectUpstream, KnownReplica
from genserve.errors import UnavailableError
from genserve.transport.connection import Connection
from genserve.v1 import control_pb2, fleet_pb2, generation_pb2, weights_pb2
from tests.unit.client.call_table import call_async, public_calls

ROOT: Final = Path(__file__).parents[3]
CONFIG: Final = ROOT / "protos" / "genserve" / "v1" / "service_config.json"
DEFAULT_TIMEOUTS: Final = CONFIG.with_name("default_timeouts.json")
SERVICES: Final = {
    service.full_name: {method.name for method in service.methods}
    for file in (generation_pb2, weights_pb2, control_pb2, fleet_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
}
REPEATED: Final = {
    *("GenerationService/Generate", "GenerationService/Tokenize", "GenerationService/Detokenize"),
    *("WeightService/GetPush", "WeightService/GetWeights", "FleetService/ListReplicas"),
    *("ControlService/GetStatus", "ControlService/GetServerInfo"),
    *("ControlService/ListLoras", "ControlService/RenewPause"),
}
"""What changes nothing, or changes the same again; and Generate, which has not begun when it is refused."""
RESUMED: Final = {"push_weights", "push_lora"}
"""A push that breaks asks what is missing and sends it, whatever gRPC does."""


class RefusingDaemon(grpc.GenericRpcHandler):
    """Refuses the first call of each method as UNAVAILABLE, and answers the others with an empty message."""

    def __init__(self) -> None:
        self.num_calls: Counter[str] = Counter()

    def service(self, handler_call_details: Any) -> Any:
        """As gRPC asks for it."""
        method = handler_call_details.method.removeprefix("/genserve.v1.")

        async def answer(requests: Any, context: Any) -> AsyncIterator[bytes]:
            self.num_calls[method] += 1
            if self.num_calls[method] == 1:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
            yield b""

        return grpc.stream_stream_rpc_method_handler(answer)


@asynccontextmanager
async def refusing_daemon() -> AsyncIterator[tuple[RefusingDaemon, str]]:
    """One on an address of its own: gRPC retries less where much was refused."""
    daemon, server = RefusingDaemon(), grpc.aio.server()
    server.add_generic_rpc_handlers((daemon,))
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield daemon, target
    finally:
        await server.stop(grace=None)


def test_every_method_has_a_default_deadline_and_no_other_is_named() -> None:
    """A method that is renamed is renamed in both files."""
    timeouts_s = json.loads(DEFAULT_TIMEOUTS.read_text())
    methods = {f"{service}/{method}" for service, names in SERVICES.items() for method in names}
    assert set(SERVICES) < timeouts_s.keys() <= methods | set(SERVICES)
    assert all(timeout_s is None or timeout_s > 0 for timeout_s in timeouts_s.values())
    repeated = [
        f"{name['service']}/{name['method']}" for name in json.loads(CONFIG.read_text())["methodConfig"][0]["name"]
    ]
    assert len(set(repeated)) == len(repeated)
    assert set(repeated) < methods


@pytest.mark.parametrize("name", sorted(public_calls(AsyncClient) - {"close", "wait_ready"} - RESUMED))
async def test_unavailable_calls_are_retried_if_that_does_no_harm(name: str) -> None:
    """It is one more attempt, which the caller does not notice."""
    async with refusing_daemon() as (daemon, target), AsyncClient(target, token="t") as client:
        ended = (await call_async(client, name, 20.0)).ended
    expected = {method: 2 if method in REPEATED else 1 for method in daemon.num_calls}
    assert expected
    assert dict(daemon.num_calls) == expected
    is_repeated = any(count == 2 for count in daemon.num_calls.values())
    assert (ended == "UnavailableError") == (not is_repeated), ended


async def test_a_client_that_calls_replicas_itself_is_told_of_a_refusal_at_once() -> None:
    """So that it goes to the next one."""
    async with refusing_daemon() as (daemon, target):
        connection = Connection(target)
        upstream = DirectUpstream(connection, KnownReplica(target, ""))
        with pytest.raises(UnavailableError):
            await upstream.tokenize(generation_pb2.TokenizeRequest(text="x"), 20.0)
        assert daemon.num_calls == {"GenerationService/Tokenize": 1}
        await connection.close()


def test_the_service_config_is_right_as_it_is() -> None:
    """gRPC takes a deadline there for the most that a call may ask for, so none is there."""
    assert set(json.loads(CONFIG.read_text())) == {"methodConfig", "retryThrottling"}
    assert all(set(config) == {"name", "retryPolicy"} for config in json.loads(CONFIG.read_text())["methodConfig"])


def test_the_package_for_typescript_has_the_same_config() -> None:
    """As clients/typescript/scripts/generate writes it: the file, and in the code its retries and the deadlines."""
    typescript = ROOT / "clients" / "typescript"
    assert (typescript / "service_config.json").read_text() == CONFIG.read_text()
    code = (typescript / "src" / "wire" / "service_config.ts").read_text()
    (given,) = re.findall(r'^  (".*");$', code, re.MULTILINE)
    assert json.loads(json.loads(given)) == json.loads(CONFIG.read_text())
    expected_ms = {
        call: "Infinity" if seconds is None else str(1000 * seconds)
        for call, seconds in json.loads(DEFAULT_TIMEOUTS.read_text()).items()
    }
    assert dict(re.findall(r'^  "(.*)": (\w+),$', code, re.MULTILINE)) == expected_ms
