"""vLLM's own weight transfer through the daemon: labels, refusals, and what becomes of an update that fails."""

import asyncio
from typing import Any

import pytest

from genserve.client import AsyncClient
from genserve.errors import (
    ApplyInProgressError,
    DeadlineError,
    EngineTaintedError,
    GenserveError,
    NotResidentError,
    PushRolledBackError,
    UnsupportedError,
    UpdateNotFoundError,
    VersionNotNewerError,
)
from tests.engine.transfer_subject import STRANGER, TransferSubject
from tests.support import models
from tests.support.plain_vllm import PROMPTS
from tests.support.refusals import refuses

LONG = pytest.mark.long("genserve/weights", "genserve/worker", "genserve/engine/vllm", "genserve/control")
V_PROJ = "model.layers.1.self_attn.v_proj.weight"


async def test_a_daemon_without_a_backend_refuses_vllms_calls(client: AsyncClient) -> None:
    """And generates on."""
    info = await client.server_info()
    assert (info.weight_transfer, "weight_transfer" in info.features) == ("", False)
    for call in (
        client.init_weight_transfer({}),
        client.start_weight_update(),
        client.update_weights({}),
        client.finish_weight_update(),
    ):
        with pytest.raises(UnsupportedError, match="--weight-transfer-config"):
            await call
    assert (await client.status()).state.phase == "running"


async def test_a_stream_across_an_update_is_labelled_token_by_token(subject: TransferSubject) -> None:
    """It stands still from start to finish, and goes on under the new version."""
    client, version = subject.client, await subject.next_version()
    stream = client.stream(PROMPTS[0], temperature=0.0, max_tokens=1500, ignore_eos=True)
    first = await anext(stream)
    started = await client.start_weight_update()
    assert (started.requests_kept, started.state.phase) == (1, "applying")
    await subject.send("b")
    finished = await client.finish_weight_update(version=version + 6)
    spans = [span for delta in [first, *[d async for d in stream]] for span in delta.outputs[0].weight_spans]
    assert {span.version for span in spans} == {version - 1, version + 6}
    assert [span.start for span in spans[1:]] == [span.end for span in spans[:-1]]
    assert spans[-1].end == 1500
    assert (finished.applied.previous_version, finished.applied.active_version) == (version - 1, version + 6)
    assert list(finished.applied.step_s) == ["wait", "pause", "receive", "commit", "resume"]
    assert finished.applied.paused_s > finished.applied.step_s["receive"] > 0


async def test_after_an_update_the_daemon_says_that_it_has_no_bytes(subject: TransferSubject) -> None:
    """Partial pushes and pulls are refused, and why; a whole push brings them back."""
    client = subject.client
    await subject.update("b")
    norm = {"model.norm.weight": models.load_tensors(subject.checkpoints["a"])["model.norm.weight"]}
    with refuses(NotResidentError):
        await client.push_weights(norm, version=await subject.next_version(), partial=True)
    with refuses(NotResidentError):
        await client.pull_weights()
    await subject.push("b")
    await client.push_weights(norm, version=await subject.next_version(), partial=True)
    assert (await client.get_weights()).resident


@pytest.mark.parametrize(
    ("orders", "error", "words"),
    [
        pytest.param(
            {"fails_before": V_PROJ}, PushRolledBackError, f"ordered to fail before {V_PROJ}", id="in a layer"
        ),
        pytest.param({"names": [STRANGER]}, PushRolledBackError, "stranger", id="an unknown tensor", marks=LONG),
        pytest.param(
            {"fails_to_finish": True}, PushRolledBackError, "ordered to fail to finish", id="at the end", marks=LONG
        ),
        pytest.param({"takes_s": 1.0, "timeout_s": 0.5}, DeadlineError, "0.5 s", id="too late", marks=LONG),
        pytest.param({"unheard": 1}, PushRolledBackError, "update_info", id="an unknown field", marks=LONG),
    ],
)
async def test_an_update_that_fails_is_undone(
    subject: TransferSubject, orders: dict[str, Any], error: type[GenserveError], words: str
) -> None:
    """Bit for bit, in the same pause; a stream goes on, and the next update works, and so does the next push."""
    client = subject.client
    version, before = (await client.get_weights()).weight_version, await subject.digests()
    stream = client.stream(PROMPTS[0], temperature=0.0, max_tokens=1000, ignore_eos=True)
    await anext(stream)
    with pytest.raises(error, match=words):
        await subject.update("b", **orders)
    state = (await client.status()).state
    assert (state.phase, state.weight_version) == ("running", version)
    assert await subject.digests() == before
    spans = [span async for delta in stream for span in delta.outputs[0].weight_spans]
    assert {span.version for span in spans} == {version}
    assert spans[-1].end == 1000
    with pytest.raises(UpdateNotFoundError):
        await client.finish_weight_update()
    await subject.update("b")
    after = await subject.digests()
    assert after != before
    assert await subject.push("b") == after
    assert await subject.push("a") == before


async def test_an_update_whose_trainer_dies_is_undone(subject: TransferSubject) -> None:
    """After its time to live, in the middle of a layer; nothing is left paused or locked."""
    client = subject.client
    version, before = (await client.get_weights()).weight_version, await subject.digests()
    subject.save("b")
    started = await client.start_weight_update(ttl_s=3.0)
    await subject.send("b", names=[V_PROJ])
    waiting = asyncio.create_task(client.generate(PROMPTS[0], max_tokens=4, ignore_eos=True))
    await subject.until_running()
    (span,) = (await waiting).sequences[0].weight_spans
    assert (span.version, span.end) == (version, 4)
    assert await subject.digests() == before
    with pytest.raises(UpdateNotFoundError):
        await client.update_weights({}, update_id=started.update_id)
    assert await subject.push("b") != before


async def test_what_cannot_be_undone_is_not_served(subject: TransferSubject) -> None:
    """There are no bytes to go back to after an update; a whole push heals, another update may not try."""
    client, a = subject.client, await subject.digests()
    await subject.update("b")
    await client.start_weight_update()
    with refuses(EngineTaintedError):
        await subject.send("a", fails_before=V_PROJ)
    assert (await client.status()).state.phase == "tainted"
    with pytest.raises(EngineTaintedError):
        await client.generate(PROMPTS[0], max_tokens=1)
    with pytest.raises(EngineTaintedError):
        await client.start_weight_update()
    assert await subject.push("a") == a
    assert len((await client.generate(PROMPTS[0], max_tokens=2, ignore_eos=True)).token_ids) == 2


@pytest.mark.parametrize("timed_out", [False, True])
async def test_an_update_that_received_nothing_is_undone_without_bytes(
    subject: TransferSubject, timed_out: bool
) -> None:
    """Nobody wrote to the live weights, so nothing has to be restored, and none of it is here; the next one works."""
    client = subject.client
    await subject.update("b")
    version, before = (await client.get_weights()).weight_version, await subject.digests()
    if timed_out:
        await client.start_weight_update(ttl_s=0.2)
        await subject.until_running()
    else:
        await client.start_weight_update()
        with pytest.raises(PushRolledBackError, match="UpdateWeights"):
            await client.finish_weight_update()
    state = (await client.status()).state
    assert (state.phase, state.weight_version) == ("running", version)
    assert await subject.digests() == before
    await subject.update("a")
    assert await subject.digests() != before


async def test_pushes_and_other_updates_wait_for_an_update(subject: TransferSubject) -> None:
    """They are told which; it cannot be finished under an old version, and once it is, a repeat answers the same."""
    client, version = subject.client, await subject.next_version()
    for _ in range(2):
        assert (await client.start_weight_update(update_id="step-7")).update_id == "step-7"
    for call in (
        client.push_weights(subject.checkpoints["b"], version=version),
        client.start_weight_update(),
        subject.init(),
    ):
        with pytest.raises(ApplyInProgressError) as caught:
            await call
        assert caught.value.metadata["update_id"] == "step-7"
    await subject.send("b")
    with pytest.raises(VersionNotNewerError):
        await client.finish_weight_update(version=version - 1)
    finished = await client.finish_weight_update(update_id="step-7")
    assert finished.applied.active_version == finished.state.weight_version == version
    assert (await client.finish_weight_update(update_id="step-7")).applied == finished.applied
    await client.push_weights(subject.checkpoints["a"], version=version + 1)


async def test_an_update_under_a_lease_leaves_the_engine_paused(subject: TransferSubject) -> None:
    """vLLM's trainers pause first, and resume when they like."""
    client = subject.client
    async with client.paused() as lease:
        await client.start_weight_update(pause_lease_id=lease.lease_id)
        await subject.send("b")
        finished = await client.finish_weight_update()
        assert (finished.state.phase, finished.applied.paused_s) == ("paused", 0)
    assert (await client.status()).state.phase == "running"


@pytest.mark.parametrize(
    ("info", "says"),
    [({"directory": "/nowhere/at/all"}, "no directory"), ({"unheard": 1}, "Invalid init_info")],
    ids=["nowhere", "unheard"],
)
async def test_what_vllm_says_of_a_wrong_init_is_reported(
    subject: TransferSubject, info: dict[str, Any], says: str
) -> None:
    """Nothing changes."""
    with refuses(PushRolledBackError, says=says):
        await subject.client.init_weight_transfer(info)
    assert (await subject.client.status()).state.phase == "running"
