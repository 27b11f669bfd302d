"""vLLM's own weight transfer through the client, and the client of vLLM's that is made of it."""

import asyncio
import base64
import json
import pickle
import subprocess
import sys
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2

from genserve.client import AsyncClient
from genserve.errors import InvalidFieldError, PushRolledBackError, UpdateNotFoundError
from genserve.integrations.vllm_sync import GenserveWeightSyncClient
from genserve.v1 import weights_pb2
from tests.support.refusals import refuses
from tests.support.scripted_services import ScriptedDaemon, refuse

INFO = {"names": ["w"], "shapes": [[2, 3]], "dtype_names": ["bfloat16"]}


async def test_the_four_calls_carry_what_they_are_given(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """As JSON, with a deadline above the time that the daemon may take: it undoes what fails before it answers."""
    assert await client.init_weight_transfer({"master_port": 29500}, timeout_s=7.0) == "nccl"
    assert daemon.remaining_s is not None and 60 < daemon.remaining_s < 67.5
    started = await client.start_weight_update(pause_mode="abort", kv_policy="reuse", ttl_s=2.0)
    assert (started.update_id, started.requests_kept) == ("u1", 3)
    await client.update_weights([INFO, {}], update_id="u1")
    finished = await client.finish_weight_update(update_id="u1", version=5, force=True)
    assert (finished.applied.active_version, finished.state.weight_version) == (5, 5)
    init, start, update, finish = daemon.transfers
    assert json.loads(init.init_info) == {"master_port": 29500}  # type: ignore[attr-defined]
    assert init.timeout.seconds == 7  # type: ignore[attr-defined]
    assert (start.pause_mode, start.kv_policy, start.ttl.seconds) == (3, 1, 2)  # type: ignore[attr-defined]
    assert json.loads(update.update_info) == [INFO, {}]  # type: ignore[attr-defined]
    assert (finish.update_id, finish.weight_version, finish.force) == ("u1", 5, True)  # type: ignore[attr-defined]


async def test_a_bare_update_says_how_long_its_steps_may_take_and_no_more(
    daemon: ScriptedDaemon, client: AsyncClient
) -> None:
    """A minute to begin, and until the next call; five for what vLLM does."""
    await client.init_weight_transfer({})
    await client.start_weight_update()
    await client.update_weights({})
    await client.finish_weight_update()
    one, five = Duration(seconds=60), Duration(seconds=300)
    assert daemon.transfers == [
        weights_pb2.InitWeightTransferRequest(init_info="{}", timeout=five),
        weights_pb2.StartWeightUpdateRequest(ttl=one, timeout=one),
        weights_pb2.UpdateWeightsRequest(update_info="{}", timeout=five),
        weights_pb2.FinishWeightUpdateRequest(timeout=five),
    ]
    assert not daemon.transfers[-1].HasField("weight_version")  # 0 is a version


async def test_vllms_client_goes_through_one_update(daemon: ScriptedDaemon) -> None:
    """It keeps the id between its calls, leaves the version to the daemon, or names it as vLLM does: as text."""

    def trainer() -> None:
        with GenserveWeightSyncClient(daemon.target, ttl_s=9.0) as client:
            client.init_weight_transfer_engine({})
            for version in (None, "12"):
                client.start_weight_update()
                client.update_weights(INFO)
                client.finish_weight_update(version)
            with refuses(InvalidFieldError, says="'latest'"):
                client.finish_weight_update("latest")

    await asyncio.to_thread(trainer)
    _, start, update, unnamed, *_, named = daemon.transfers
    assert start.ttl.seconds == 9  # type: ignore[attr-defined]
    assert update.update_id == unnamed.update_id == named.update_id == "u1"  # type: ignore[attr-defined]
    assert not unnamed.HasField("weight_version")
    assert named.weight_version == 12  # type: ignore[attr-defined]


async def test_ipc_handles_are_pickled_as_vllms_http_client_does(daemon: ScriptedDaemon) -> None:
    """They are tuples of bytes; vLLM's worker unpickles them where it is allowed to."""
    handles: list[Any] = [{"GPU-1": (b"handle", 7, (2, 3))}]

    def trainer() -> None:
        with GenserveWeightSyncClient(daemon.target) as client:
            client.update_weights({**INFO, "ipc_handles": handles})
            client.update_weights([{**INFO, "ipc_handles": handles}, {**INFO, "ipc_handles": None}])

    await asyncio.to_thread(trainer)
    one = json.loads(daemon.transfers[0].update_info)  # type: ignore[attr-defined]
    first, second = json.loads(daemon.transfers[1].update_info)  # type: ignore[attr-defined]
    assert one == first
    assert pickle.loads(base64.b64decode(one.pop("ipc_handles_pickled"))) == handles
    assert one == INFO
    assert second == {**INFO, "ipc_handles": None}


@pytest.mark.parametrize("error", [PushRolledBackError, UpdateNotFoundError])
async def test_errors_are_the_daemons(daemon: ScriptedDaemon, client: AsyncClient, error: type[Exception]) -> None:
    """By their reason."""
    reason = error.reason  # type: ignore[attr-defined]
    daemon.fail = lambda context: refuse(context, code_pb2.ABORTED, reason, "no")
    with pytest.raises(error):
        await client.update_weights(INFO)


def test_vllms_client_is_one_without_vllm() -> None:
    """The protocol is structural: importing it loads neither torch nor vLLM."""
    program = (
        "import sys, genserve.integrations.vllm_sync; print(sorted({'torch', 'vllm', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
