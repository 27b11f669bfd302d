"""Who may call what, over real connections: roles, tokens and rates."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from genserve.client import AsyncClient
from genserve.control.membership import CALL_S
from genserve.errors import PermissionDeniedError, RateLimitedError, UnauthenticatedError
from genserve.security import files
from genserve.security.roles import METHODS, ROLE_NAMES, Role
from genserve.v1 import control_pb2, generation_pb2, types_pb2, weights_pb2
from genserve.v1.control_pb2_grpc import ControlServiceStub
from genserve.wire.literals import ROUTER_ID_KEY
from tests.rpc.guarded import Guarded, guarded
from tests.rpc.served import weights
from tests.support.answers import answer_of
from tests.support.credentials import one_each
from tests.support.patience import STEP_S
from tests.support.scripted_daemon import reason_of

SERVICES = {
    service.full_name: service
    for file in (generation_pb2, weights_pb2, control_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Guarded]:
    async with guarded(tmp_path) as running:
        yield running


async def code_of(channel: grpc.aio.Channel, method: str, token: str | None) -> str:
    """The status of a call with an empty request, and of a refusal its reason."""
    _, service, name = method.split("/")
    declared = SERVICES[service].methods_by_name[name]
    request = GetMessageClass(declared.input_type)()
    kind = f"{'stream' if declared.client_streaming else 'unary'}_{'stream' if declared.server_streaming else 'unary'}"
    make: Any = getattr(channel, kind)
    call_of = make(
        method, GetMessageClass(declared.input_type).SerializeToString, GetMessageClass(declared.output_type).FromString
    )
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    call = call_of(iter([request]) if declared.client_streaming else request, metadata=metadata, timeout=30)
    try:
        if declared.server_streaming:
            await answer_of(call, call.read())
            call.cancel()
        else:
            await answer_of(call)
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            return reason_of(error)
        return error.code().name
    return "OK"


@pytest.mark.parametrize("role", ROLE_NAMES)
async def test_each_role_may_call_what_the_table_says_and_nothing_else(served: Guarded, role: str) -> None:
    """Every method of every service."""
    methods = [method for method in METHODS if method.split("/")[1] in SERVICES]
    denied = set()
    async with asyncio.timeout(STEP_S):
        for method in methods:
            outcome = await code_of(served.daemon.channel, method, served.callers.tokens[role])
            assert outcome != "UNAUTHENTICATED"
            if outcome == "PERMISSION_DENIED":
                denied.add(method)
    assert denied == {method for method in methods if Role(role) not in METHODS[method]}


@pytest.mark.parametrize("token", [None, "wrong", "x" * 5000])
async def test_without_a_valid_token_nothing_of_ours_can_be_called(served: Guarded, token: str | None) -> None:
    for method in METHODS:
        if method.split("/")[1] in SERVICES:
            assert await code_of(served.daemon.channel, method, token) == "UNAUTHENTICATED"


async def test_refusal_names_the_caller_and_the_roles_it_needs(served: Guarded) -> None:
    async with served.client("generate") as client:
        with pytest.raises(PermissionDeniedError, match="trainer or operator") as raised:
            await client.pause(ttl_s=60.0)
    assert raised.value.metadata["caller"] == "generate"
    assert served.callers.tokens["generate"] not in repr(raised.value)


async def test_digests_need_the_role_trainer_or_operator(served: Guarded) -> None:
    """Every live byte is read for them; the weights' version and manifest are for all. The refusal says so."""
    for role in ROLE_NAMES:
        async with served.client(role) as client:
            assert (await client.get_weights()).weight_version == 0
            if role != "generate":
                assert (await client.get_weights(include_digests=True)).digests
                continue
            with pytest.raises(PermissionDeniedError, match="include_digests needs the role trainer or operator"):
                await client.get_weights(include_digests=True)
            assert served.daemon.engine.calls == []


async def test_only_an_operator_looks_after_a_daemon_as_a_router_does(served: Guarded) -> None:
    """Others could keep its router out. They may watch it."""
    for role in ROLE_NAMES:
        metadata = (("authorization", f"Bearer {served.callers.tokens[role]}"),)
        stub = ControlServiceStub(served.daemon.channel)
        for router in (None, types_pb2.Router(router_id=role, address="host:1")):
            watch = stub.WatchStatus(control_pb2.WatchStatusRequest(router=router), metadata=metadata, timeout=STEP_S)
            if router is None or role == "operator":
                assert (await watch.read()).state.router_address == ("" if router is None else "host:1")
            else:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await watch.read()
                assert reason_of(caught.value) == "PERMISSION_DENIED"
            watch.cancel()


async def test_calls_that_are_refused_keep_no_router(served: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router whose token is not listed any more gives way to the next one."""
    now_s = 0.0
    monkeypatch.setattr(membership := served.daemon.board.membership, "clock", lambda: now_s)
    operator, former = ((("authorization", f"Bearer {token}"),) for token in (served.callers.tokens["operator"], "x"))
    stub, status = ControlServiceStub(served.daemon.channel), control_pb2.GetStatusRequest()
    request = control_pb2.WatchStatusRequest(router=types_pb2.Router(router_id="r", address="host:1"))
    watch = stub.WatchStatus(request, metadata=operator, timeout=STEP_S)
    await watch.read()
    now_s = CALL_S - 1
    with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
        await stub.GetStatus(status, metadata=(*former, (ROUTER_ID_KEY, "r")), timeout=STEP_S)
    now_s = CALL_S
    assert membership.router_address == ""
    await stub.GetStatus(status, metadata=(*operator, (ROUTER_ID_KEY, "r")), timeout=STEP_S)
    assert membership.router_address == "host:1"
    watch.cancel()


async def test_a_push_of_a_rollout_worker_is_refused_before_its_bytes(served: Guarded) -> None:
    """Each time: gRPC's own error of a write that comes too late must not take the place of ours."""
    async with served.client("generate") as client:
        for version in range(20):
            with pytest.raises(PermissionDeniedError):
                await client.push_weights(weights(1), version=version + 1)
    assert served.daemon.board.state().weight_version == 0


async def test_a_trainer_pushes_and_a_worker_generates(served: Guarded) -> None:
    async with served.client("trainer") as trainer, served.client("operator") as operator:
        assert (await trainer.push_weights(weights(1), version=1)).applied.active_version == 1
        lease = await operator.pause(ttl_s=60.0)
        await operator.resume(lease.lease.lease_id)
        with pytest.raises(PermissionDeniedError):
            await operator.push_weights(weights(2), version=2)


async def test_a_call_without_a_token_says_what_is_missing(served: Guarded) -> None:
    async with AsyncClient(served.daemon.address) as client:
        with pytest.raises(UnauthenticatedError, match="authorization: Bearer TOKEN") as caught:
            await client.status()
    for argument in ("token_file=", "token=", "--token-file"):  # of the client in Python, and of commands
        assert argument in str(caught.value)


@pytest.mark.parametrize(
    "values", [["Basic abc"], ["Bearer {0}", "Bearer {0}"], ["{0}"], [""]], ids=["scheme", "twice", "bare", "empty"]
)
async def test_the_header_is_read_strictly(served: Guarded, values: list[str]) -> None:
    token = served.callers.tokens["trainer"]
    metadata = tuple(("authorization", value.format(token)) for value in values)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await served.daemon.control.GetStatus(control_pb2.GetStatusRequest(), metadata=metadata)
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert token not in str(raised.value.details())


async def test_caller_removed_from_the_list_can_make_no_new_calls(
    served: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that runs goes on: it was admitted."""
    monkeypatch.setattr(files, "LOOK_EVERY_S", 0.0)
    async with served.client("generate") as client:
        watching = client.watch_status(interval_s=0.1)
        await anext(watching)
        after = one_each(tmp_path)  # new tokens for everybody
        async with asyncio.timeout(STEP_S):
            while True:
                try:
                    await client.status()
                except UnauthenticatedError:
                    break
                await asyncio.sleep(0.05)
        async with AsyncClient(served.daemon.address, token=after.tokens["operator"]) as operator:
            await operator.pause(ttl_s=60.0)
        assert (await anext(watching)).state.pauses
        await watching.aclose()


@pytest.mark.parametrize(("opened", "is_open"), [("health,reflection", True), ("none", False)])
async def test_health_and_reflection_are_open_if_the_flag_says_so(tmp_path: Path, opened: str, is_open: bool) -> None:
    async with guarded(tmp_path, open_services=opened) as served:
        health = health_pb2_grpc.HealthStub(served.daemon.channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="*")
        for metadata in ((), (("authorization", f"Bearer {served.callers.tokens['operator']}"),)):
            is_allowed = is_open or metadata != ()
            reflection = reflection_pb2_grpc.ServerReflectionStub(served.daemon.channel)
            # Who is refused may be so before a message is written, of which gRPC has an error of its own.
            answers = reflection.ServerReflectionInfo(iter([asked]) if is_allowed else None, metadata=metadata)
            if is_allowed:
                await health.Check(health_pb2.HealthCheckRequest(), metadata=metadata)
                assert (await answers.read()).list_services_response.service
            else:
                for refused in (health.Check(health_pb2.HealthCheckRequest(), metadata=metadata), answers.read()):
                    with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                        await refused


async def test_the_calls_of_a_role_are_bounded(tmp_path: Path) -> None:
    async with (
        guarded(tmp_path, max_request_rates="generate=5") as served,
        served.client("generate") as worker,
        served.client("operator") as operator,
    ):
        outcomes = await asyncio.gather(*(worker.status() for _ in range(50)), return_exceptions=True)
        refused = [each for each in outcomes if isinstance(each, RateLimitedError)]
        assert len(refused) >= 5  # a busy machine may take seconds for all of them
        assert all(each.retry_after_s is not None and each.retry_after_s > 0 for each in refused)
        await asyncio.gather(*(operator.status() for _ in range(50)))
