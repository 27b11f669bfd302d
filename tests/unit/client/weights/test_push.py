"""Pushes through a real server, whole and interrupted."""

import asyncio
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from google.rpc import code_pb2

from genserve.client import AsyncClient, PushProgress, UnavailableError
from genserve.client.weights import resumes, upload
from genserve.client.weights.options import MIB
from genserve.client.weights.results import Applied
from genserve.client.weights.resumes import MIN_RESUMES
from genserve.errors import DeadlineError, InvalidFieldError, PushTruncatedError, VersionNotNewerError
from genserve.tensors.safetensors import CheckpointFileError
from genserve.v1 import weights_pb2
from genserve.wire.conversions import manifest_of
from tests.support.clocks import advanced_clock
from tests.support.fault_proxy import FaultProxy
from tests.support.patience import STEP_S, until
from tests.support.refusals import refuses
from tests.support.scripted_services import ScriptedDaemon, refuse

WEIGHTS = {
    "b": numpy.arange(1000, dtype="float32"),
    "a": numpy.arange(7, dtype="uint8").reshape(7, 1),
    "scalar": numpy.array(2.0, dtype="float16"),
}
BYTES = b"".join(WEIGHTS[name].tobytes() for name in sorted(WEIGHTS))


async def test_a_push_brings_the_bytes_end_to_end_in_order_of_the_names(
    daemon: ScriptedDaemon, client: AsyncClient
) -> None:
    """No gaps between tensors, chunks may span them, and each has a checksum."""
    result = await client.push_weights(WEIGHTS, version=1, expected_version=0, chunk_bytes=100)
    header = daemon.header
    assert daemon.pushed_bytes() == BYTES
    assert [
        (each.name, each.dtype, list(each.shape), each.offset, each.length) for each in header.manifest.tensors
    ] == [
        ("a", "U8", [7, 1], 0, 7),
        ("b", "F32", [1000], 7, 4000),
        ("scalar", "F16", [], 4007, 2),
    ]
    assert header.manifest_digest == manifest_of(header.manifest).digest
    assert header.HasField("expected_version")
    assert all(daemon.checksums)
    assert result.push.state == "applied"
    assert result.applied is not None
    assert result.applied.step_s == {"receive": 0.0015, "commit": 0.0015}
    assert result.applied.paused_s == 0.001
    assert result.state.weight_version == 1


def test_a_push_into_an_engine_that_stays_paused_paused_nothing() -> None:
    """The wire leaves the time out then; programs that print it go on."""
    applied = Applied.of(weights_pb2.Applied(previous_version=1, active_version=2))
    assert f"paused for {1000 * applied.paused_s:.1f} ms" == "paused for 0.0 ms"


async def test_a_cut_stream_is_resumed_with_the_missing_bytes_only(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """UNAVAILABLE in the middle: the same push goes on, and no byte that the daemon has is sent again."""
    daemon.cut_after_bytes = [1000, 2000]
    reports: list[PushProgress] = []
    result = await client.push_weights(WEIGHTS, version=1, chunk_bytes=100, progress=reports.append)
    assert result.push.state == "applied"
    assert daemon.pushed_bytes() == BYTES
    received = [byte_range for stream in daemon.streams for byte_range in stream]
    assert len(daemon.streams) == 3
    assert sum(end - start for start, end in received) == len(BYTES)
    assert reports[-1].sent_bytes == reports[-1].total_bytes == len(BYTES)
    assert reports[-1].num_resumes == 2


async def test_a_break_that_each_connection_notices_for_itself_is_one_break(
    daemon: ScriptedDaemon, client: AsyncClient
) -> None:
    """The question for what is missing goes over another connection than the bytes, and may be lost as well."""
    daemon.cut_after_bytes, daemon.num_lost_lookups = [1000], 2
    assert (await client.push_weights(WEIGHTS, version=1, chunk_bytes=100)).push.state == "applied"
    assert daemon.pushed_bytes() == BYTES


async def test_a_proxy_that_has_no_daemon_is_asked_with_pauses_for_a_while(
    daemon: ScriptedDaemon, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses every question at once. The daemon may be back as late as behind a port that nobody listens on."""
    monkeypatch.setattr(upload, "RESUME_TIMEOUT_S", 5.0)
    daemon.cut_after_bytes, daemon.num_lost_lookups = [1000], 1000
    with pytest.raises(UnavailableError):
        await client.push_weights(WEIGHTS, version=2, chunk_bytes=100)
    num_asked = 1000 - daemon.num_lost_lookups
    assert 3 < num_asked <= 3 * 7  # gRPC makes three attempts of each question


async def test_a_truncated_push_is_resumed(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """PUSH_TRUNCATED is answered by sending what is missing under the same id."""
    missing_once = iter([True])

    async def fail(context: Any) -> None:
        if next(missing_once, False):
            await refuse(context, code_pb2.ABORTED, "PUSH_TRUNCATED", "bytes are missing")

    daemon.fail = fail
    await client.push_weights(WEIGHTS, version=1, push_id="p")
    assert daemon.pushed_bytes() == BYTES
    assert daemon.header.push_id == "p"


async def test_a_push_that_stays_truncated_is_given_up(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """Resuming is bounded."""

    async def fail(context: Any) -> None:
        await refuse(context, code_pb2.ABORTED, "PUSH_TRUNCATED", "bytes are missing")

    daemon.fail = fail
    with advanced_clock() as clock:
        pushing = asyncio.create_task(client.push_weights(WEIGHTS, version=1))
        await clock.advance_until(pushing.done, 0.5)
        with pytest.raises(PushTruncatedError):
            await pushing
    assert len(daemon.streams) == 0


async def test_push_that_is_forgotten_after_a_resume_is_sent_anew(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """Not only what was missing before: the daemon has been started again."""
    daemon.cut_after_bytes, daemon.forgets_at_lookup = [1000, 2000], 2
    assert (await client.push_weights(WEIGHTS, version=1, chunk_bytes=100)).push.state == "applied"
    assert daemon.pushed_bytes() == BYTES
    assert len(daemon.streams) == 3


async def test_push_survives_an_outage_that_refuses_only_new_connections(daemon: ScriptedDaemon) -> None:
    """The connection that asks what is missing lives on, so the question is answered at once, each time; and a refused
    connection fails within milliseconds."""
    daemon.cut_after_bytes = [1000]
    async with FaultProxy(daemon.target) as proxy, AsyncClient(proxy.address) as client:
        await client.status()

        def refuse_new_ones(progress: PushProgress) -> None:
            if progress.num_resumes == 0 and len(proxy.connections) > 1:
                proxy.refuse()
                proxy.connections[1].reset()

        pushing = asyncio.create_task(
            client.push_weights(WEIGHTS, version=1, chunk_bytes=100, streams=2, progress=refuse_new_ones)
        )
        await until(lambda: daemon.num_lookups > MIN_RESUMES)
        await proxy.listen()
        assert (await pushing).push.state == "applied"
    assert daemon.pushed_bytes() == BYTES


async def test_an_answer_that_is_lost_each_time_is_looked_up(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """When connections break after the weights were applied, no byte of them is sent again, and asking is bounded."""
    daemon.loses_answer = True
    with advanced_clock() as clock:
        pushing = asyncio.create_task(client.push_weights(WEIGHTS, version=3))
        await clock.advance_until(pushing.done, 0.5)
        result = await pushing
    assert result.push.state == "applied"
    assert result.applied is not None
    assert len(daemon.streams) > MIN_RESUMES
    assert not any(daemon.streams[1:])


async def test_a_refusal_while_sending_is_the_typed_error(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """The daemon answers the header while megabytes are on their way: its reason arrives, not a broken pipe."""

    async def fail(context: Any) -> None:
        await refuse(context, code_pb2.FAILED_PRECONDITION, "VERSION_NOT_NEWER", "version 5 is served")

    daemon.fail = fail
    with refuses(VersionNotNewerError):
        await client.push_weights({"w": numpy.zeros(64 * MIB, dtype="uint8")}, version=1)


async def test_a_refusal_is_typed_whenever_it_comes(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """Often enough for the refusal to cross the frames in every order."""

    async def fail(context: Any) -> None:
        await asyncio.sleep(0)
        await refuse(context, code_pb2.FAILED_PRECONDITION, "VERSION_NOT_NEWER", "version 5 is served")

    daemon.fail = fail
    weights = {"w": numpy.zeros(MIB, dtype="uint8")}
    for _ in range(50):
        with pytest.raises(VersionNotNewerError):
            await client.push_weights(weights, version=1, chunk_bytes=MIB // 16)


async def test_a_dry_run_sends_no_bytes(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """VALIDATE is a header and an end, on one stream: nobody waits for others."""
    result = await client.push_weights(WEIGHTS, version=1, action="validate", streams=3)
    assert result.push.state == "valid"
    assert daemon.streams == [[]]
    assert daemon.header.num_streams == 1


async def test_checksums_can_be_left_out(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """`checksum=False` sends none."""
    await client.push_weights(WEIGHTS, version=1, checksum=False)
    assert not any(daemon.checksums)


async def test_a_daemon_that_was_never_there_is_not_waited_for() -> None:
    """Only a push that has begun is resumed."""
    async with AsyncClient("127.0.0.1:1") as client, asyncio.timeout(STEP_S):
        with pytest.raises(UnavailableError):
            await client.push_weights(WEIGHTS, version=1)


@pytest.mark.parametrize(
    ("timeout_s", "reconnect_s", "told"),
    [(None, 0.2, UnavailableError), (3600.0, 0.2, UnavailableError), (0.3, 3600.0, (UnavailableError, DeadlineError))],
)
async def test_push_waits_for_a_lost_daemon_until_its_deadline(
    daemon: ScriptedDaemon,
    client: AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    timeout_s: float | None,
    reconnect_s: float,
    told: type[Exception] | tuple[type[Exception], ...],
) -> None:
    """What broke the stream is told, as nobody could be asked for what is missing; or that the time is up."""
    monkeypatch.setattr("genserve.client.weights.upload.RESUME_TIMEOUT_S", reconnect_s)
    daemon.lookups_hang = True
    daemon.cut_after_bytes = [1000]
    async with asyncio.timeout(STEP_S):
        with pytest.raises(told):
            await client.push_weights(WEIGHTS, version=1, chunk_bytes=100, timeout_s=timeout_s)


async def test_the_deadline_ends_a_push(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """`timeout_s` counts from the call, over all streams."""
    daemon.fail = _never
    with pytest.raises(DeadlineError):
        await client.push_weights(WEIGHTS, version=1, timeout_s=0.3)


@pytest.mark.parametrize(
    ("names", "told"), [("abcd", "24 bytes of b, c, d"), ("abcdef", "40 bytes of b, c, d and 2 more")]
)
async def test_deadline_error_of_a_rank_names_what_others_have_not_sent(
    daemon: ScriptedDaemon, client: AsyncClient, names: str, told: str
) -> None:
    """At its own deadline: the first few tensors, and how many more."""
    weights = {name: numpy.zeros(8, "uint8") for name in names}
    await client.push_weights(weights, version=1, push_id="p")
    layout = await client.get_weights()
    daemon.applied.clear()
    daemon.staged = {"p": {0: bytes(8)}}
    daemon.fail = lambda context: asyncio.Event().wait()
    with pytest.raises(DeadlineError) as caught:
        await client.push_weights({"a": weights["a"]}, version=2, push_id="p", callers=2, layout=layout, timeout_s=0.3)
    assert told in caught.value.message
    assert caught.value.metadata == {"push_id": "p"}


async def test_an_error_in_the_progress_callback_reaches_the_caller(
    daemon: ScriptedDaemon, client: AsyncClient
) -> None:
    """It is the caller's own code: neither swallowed nor retried."""

    def fail(progress: PushProgress) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await client.push_weights(WEIGHTS, version=1, progress=fail)
    assert not daemon.applied.is_set()


async def test_what_cannot_be_pushed_is_refused_before_anything_is_sent(client: AsyncClient, tmp_path: Path) -> None:
    """Wrong words, files and nothing at all."""
    with refuses(InvalidFieldError, field="header.apply.pause_mode", says="keep, wait, abort"):
        await client.push_weights(WEIGHTS, version=1, pause_mode="sleep")  # type: ignore[arg-type]
    with pytest.raises(CheckpointFileError):
        await client.push_weights(tmp_path, version=1)
    with pytest.raises(ValueError, match="no weights"):  # and nothing else about them
        await client.push_weights({}, version=1)


async def test_served_weights_tell_version_tensors_and_digests(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """What a trainer compares its own state with."""
    await client.push_weights(WEIGHTS, version=2)
    served = await client.get_weights(include_digests=True)
    assert served.weight_version == 2
    assert [(tensor.name, tensor.shape) for tensor in served.tensors] == [("a", (7, 1)), ("b", (1000,)), ("scalar", ())]
    assert served.manifest_digest == daemon.header.manifest_digest
    assert served.digests == {("tp0", "w"): "00"}


async def _never(context: Any) -> None:
    await asyncio.Event().wait()


async def test_progress_counts_each_chunk_of_the_push(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """By its id, in bytes and seconds since the call."""
    reports: list[PushProgress] = []
    clock = asyncio.get_running_loop().time
    began_s = clock()
    await client.push_weights(WEIGHTS, version=1, chunk_bytes=1000, progress=reports.append)
    took_s = clock() - began_s
    assert [each.sent_bytes for each in reports] == [1000, 2000, 3000, 4000, len(BYTES)]
    assert {(each.push_id, each.total_bytes, each.num_resumes) for each in reports} == {
        (daemon.header.push_id, len(BYTES), 0)
    }
    elapsed_s = [each.elapsed_s for each in reports]
    assert elapsed_s == sorted(elapsed_s) and elapsed_s[0] >= 0 and elapsed_s[-1] <= took_s


async def test_a_push_that_is_only_checked_sends_a_header_on_one_stream(
    daemon: ScriptedDaemon, client: AsyncClient
) -> None:
    """However many it would take."""
    result = await client.push_weights(WEIGHTS, version=1, action="validate", streams=3, push_id="p")
    assert (result.push.state, result.applied, daemon.streams) == ("valid", None, [[]])
    assert (daemon.header.num_streams, daemon.header.manifest.total_bytes) == (1, len(BYTES))


@pytest.mark.parametrize("knows", ["nothing", "that own bytes are missing", "that it was applied", "no bytes to miss"])
async def test_deadline_error_for_another_reason_names_the_time_alone(
    daemon: ScriptedDaemon, client: AsyncClient, knows: str
) -> None:
    """What others have not sent is no explanation then."""
    weights = {name: numpy.zeros(8, "uint8") for name in "ab"}
    await client.push_weights(weights, version=1, push_id="p")
    layout = await client.get_weights()
    if knows != "that it was applied":
        daemon.applied.clear()
    daemon.staged = {
        "nothing": {},
        "that own bytes are missing": {"p": {}},
        "that it was applied": {"p": {0: bytes(8)}},
        "no bytes to miss": {"p": {0: bytes(16)}},
    }[knows]
    daemon.fail = lambda context: asyncio.Event().wait()
    with pytest.raises(DeadlineError) as caught:
        await client.push_weights({"a": weights["a"]}, version=2, push_id="p", callers=2, layout=layout, timeout_s=0.15)
    assert "GetPush" in caught.value.message
    assert caught.value.metadata == {"push_id": "p"}
    notes = [note.partition(":")[0] for note in getattr(caught.value, "__notes__", [])]
    assert notes == (["what was missing is not known"] if knows == "nothing" else [])


async def test_shared_value_counts_for_each_name_in_a_partial_checkpoint(
    daemon: ScriptedDaemon, client: AsyncClient
) -> None:
    """A whole model brings tied tensors once; whoever names some tensors means each of them."""
    sent = []
    for version, partial in ((1, False), (2, True)):
        one = torch.ones(4)
        await client.push_weights({"a": one, "b": one}, version=version, partial=partial)
        sent.append([each.name for each in daemon.header.manifest.tensors])
    assert sent == [["a"], ["a", "b"]]


async def test_a_push_whose_streams_always_break_is_given_up(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """After so many resumes, and so long, that a daemon which restarts is there again."""
    daemon.breaks_streams = True
    with advanced_clock() as clock:
        pushing = asyncio.create_task(client.push_weights(WEIGHTS, version=1))
        await clock.advance_until(pushing.done, 0.5)
        with pytest.raises(UnavailableError):
            await pushing
    assert len(daemon.streams) > MIN_RESUMES


async def test_a_push_that_a_daemon_always_loses_is_given_up(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """It dies of the version, and who starts it again has none of the bytes: to bring them again is no progress."""
    daemon.cut_after_bytes, daemon.dies_when_complete = [1000] * 1000, True
    with advanced_clock() as clock:
        pushing = asyncio.create_task(client.push_weights(WEIGHTS, version=1, chunk_bytes=100))
        await clock.advance_until(lambda: pushing.done() or len(daemon.streams) > 20 * MIN_RESUMES, 0.5)
        pushing.cancel()
        with pytest.raises(UnavailableError):
            await pushing


async def test_a_lost_answer_is_not_asked_for_beyond_the_deadline(
    daemon: ScriptedDaemon, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose pauses may be longer than the time that is left."""
    monkeypatch.setattr(resumes, "FIRST_PAUSE_S", 1000.0)
    monkeypatch.setattr(resumes, "LONGEST_PAUSE_S", 1000.0)
    daemon.loses_answer = True
    with advanced_clock() as clock:
        began_s = clock.now_s()
        pushing = asyncio.create_task(client.push_weights(WEIGHTS, version=1, timeout_s=60.0))
        await clock.advance_until(pushing.done, 5.0)
        assert (await pushing).push.state == "applied"
        assert clock.now_s() - began_s < 500.0
