"""A push of an adapter is a push as any other: several streams, an identity, a time at which it may be applied."""

import asyncio
import json
from typing import Any

import grpc
import pytest

from genserve.cli import main
from genserve.client.weights.layout import ByteSpace
from genserve.client.weights.sources import tensor_sources
from genserve.errors import PushRolledBackError
from genserve.v1 import control_pb2, weights_pb2
from genserve.wire.conversions import manifest_message
from tests.rpc.frames import END, Frame, push, refused
from tests.rpc.segments import has_bytes
from tests.support.answers import answer_of
from tests.support.patience import until
from tests.support.scripted_adapter import CONFIG, TENSORS
from tests.support.scripted_daemon import Daemon, field_of, reason_of
from tests.support.scripted_engine import Gate

CONFIG_TEXT = json.dumps(CONFIG | {"target_modules": ["q"]})


async def frames(*, config: str = CONFIG_TEXT, is_first: bool = True, **fields: Any) -> tuple[Frame, list[Frame]]:
    """The header and the chunks."""
    space = ByteSpace(tensor_sources(TENSORS, tied_once=False))
    manifest = space.manifest(partial=False)
    adapter = weights_pb2.LoraAdapter(lora_name="policy", config=config)
    opened = weights_pb2.PushHeader(**{"push_id": "p1", "lora": adapter, **fields})
    if is_first:
        opened.manifest.CopyFrom(manifest_message(manifest))
    else:
        opened.manifest_digest = manifest.digest
    chunks = [
        Frame(chunk=weights_pb2.PushChunk(offset=offset, data=b"".join(parts)))
        async for offset, parts in space.chunks(space.ranges, 40)
    ]
    assert len(chunks) > 1
    return Frame(header=opened), chunks


async def test_an_adapter_comes_over_two_streams(daemon: Daemon) -> None:
    """As weights do."""
    daemon.engine.max_loras = 1
    first, chunks = await frames(num_streams=2)
    second, _ = await frames(num_streams=2, is_first=False)
    answers = await asyncio.gather(push(daemon, [first, chunks[0], END]), push(daemon, [second, *chunks[1:], END]))
    assert {answer.push.state for answer in answers} == {weights_pb2.PUSH_STATE_APPLIED}
    assert list(daemon.engine.loras.files) == ["policy"]


async def test_another_configuration_under_the_same_id_is_a_conflict(daemon: Daemon) -> None:
    """The same tensors under another alpha are another adapter: nobody is told that it is loaded."""
    daemon.engine.max_loras = 1
    first, chunks = await frames()
    await push(daemon, [first, *chunks, END])
    other, _ = await frames(config=CONFIG_TEXT.replace('"lora_alpha": 4', '"lora_alpha": 8'))
    error = await refused(daemon, [other, *chunks, END])
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.ALREADY_EXISTS, "PUSH_CONFLICT")


@pytest.mark.parametrize(
    "config",
    ["[" * 100_000, '{"r": ' * 20_000, '{"r": 1e999, "lora_alpha": 1, "target_modules": []}', CONFIG_TEXT + "}", "[]"],
    ids=["lists", "objects", "infinite", "two", "list"],
)
async def test_a_configuration_that_no_parser_likes_is_refused_by_its_field(daemon: Daemon, config: str) -> None:
    """Rather than an internal error."""
    daemon.engine.max_loras = 1
    first, _ = await frames(config=config)
    error = await refused(daemon, [first, END])
    assert (reason_of(error), field_of(error)) == ("INVALID_FIELD", "header.lora.config")


async def test_the_status_says_why_an_adapter_failed(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    """In the row of its push."""
    daemon.engine.max_loras = 1
    daemon.engine.fails["load_lora"] = PushRolledBackError("adapter 'policy' could not be loaded")
    first, chunks = await frames()
    assert reason_of(await refused(daemon, [first, *chunks, END])) == "PUSH_ROLLED_BACK"
    assert await asyncio.to_thread(main, ["status", "--target", daemon.address]) == 0
    assert "failed: adapter 'policy' could not be loaded\n" in capsys.readouterr().out


async def test_an_adapter_is_not_loaded_into_an_engine_that_has_gone_to_sleep(daemon: Daemon) -> None:
    """It was awake when the push began: the bytes stay, and are loaded when it is awake again."""
    daemon.engine.max_loras = 1
    first, chunks = await frames()
    go_on = asyncio.Event()

    async def requests() -> Any:
        yield first
        for chunk in chunks:
            yield chunk
        await go_on.wait()
        yield END

    pushing = asyncio.ensure_future(answer_of(daemon.weights.PushWeights(requests(), timeout=30)))
    await until(lambda: has_bytes(daemon, 1))
    await daemon.control.Sleep(control_pb2.SleepRequest(), timeout=30)
    go_on.set()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pushing
    assert reason_of(caught.value) == "ENGINE_SLEEPING"
    assert daemon.engine.loras.files == {}
    await daemon.control.WakeUp(control_pb2.WakeUpRequest(), timeout=30)
    await daemon.weights.CommitPush(weights_pb2.CommitPushRequest(push_id="p1"), timeout=30)
    assert list(daemon.engine.loras.files) == ["policy"]


async def test_a_stream_that_is_late_for_an_adapter_is_told(daemon: Daemon) -> None:
    """Its bytes cannot be compared any more: that is a conflict, and no internal error. A named attempt need not."""
    daemon.engine.max_loras = 1
    for attempt, reason in (("", "PUSH_CONFLICT"), ("a", "")):
        first, chunks = await frames(push_id=f"p{attempt}", attempt=attempt)
        further, _ = await frames(push_id=f"p{attempt}", attempt=attempt, is_first=False)
        gate = Gate()

        async def requests(further: Frame = further, gate: Gate = gate, late: Frame = chunks[0]) -> Any:
            yield further
            gate.reached.set()
            await gate.open.wait()
            yield late
            yield END

        late = asyncio.ensure_future(answer_of(daemon.weights.PushWeights(requests(), timeout=30)))
        await until(gate.reached.is_set)
        for _ in range(2):  # its header waits for the push: these calls come after it on the same connection
            await daemon.control.GetStatus(control_pb2.GetStatusRequest())
        pushing = asyncio.ensure_future(push(daemon, [first, *chunks, END]))
        await pushing
        gate.open.set()
        if reason:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await late
            assert reason_of(caught.value) == reason
        else:
            assert (await late).push.state == weights_pb2.PUSH_STATE_APPLIED
