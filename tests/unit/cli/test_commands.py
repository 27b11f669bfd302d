"""The commands against a real server: what they print, and how they end.

Commands that block run in a worker thread; those that are interrupted are processes of their own.
"""

import asyncio
import io
import json
import re
import signal
import sys
from pathlib import Path

import numpy
import pytest
from google.protobuf.json_format import Parse, ParseDict
from safetensors.numpy import save_file

from genserve.cli import main
from genserve.v1 import control_pb2, generation_pb2, types_pb2, weights_pb2
from tests.support.commands import Command, start
from tests.support.patience import until
from tests.support.scripted_services import ScriptedDaemon


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    path = tmp_path / "m.safetensors"
    save_file({"w": numpy.arange(1000, dtype="float32")}, path)
    return str(path)


# --- generate


async def test_generate_prints_the_text_and_ends_the_line(genserve: Command) -> None:
    """As it comes, and nothing else on stdout."""
    assert await genserve("generate", "x") == (0, "Once upon a time\n", "")


async def test_generate_passes_options_on(daemon: ScriptedDaemon, genserve: Command) -> None:
    """Flags reach the request, those not given do not; --system makes a chat."""
    await genserve("generate", "x", "--top-p", "0", "--stop", "a", "--stop", "b", "--time-budget", "2s")
    await genserve("generate", "x", "--system", "s")
    flags, chat = daemon.requests
    assert flags.sampling.HasField("top_p")
    assert not flags.sampling.HasField("temperature")
    assert flags.stop.strings == ["a", "b"]
    assert flags.stop.time_budget.seconds == 2
    assert [(each.role, each.content) for each in chat.chat.messages] == [("system", "s"), ("user", "x")]


async def test_generate_reads_standard_input(
    daemon: ScriptedDaemon, genserve: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without PROMPT."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    await genserve("generate")
    assert daemon.requests[0].text == "from a pipe"


async def test_generate_without_a_prompt_says_how_to_give_one(
    daemon: ScriptedDaemon, genserve: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And asks the daemon for nothing."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    status, output, errors = await genserve("generate")
    assert (status, output, daemon.requests) == (1, "", [])
    assert errors.startswith("genserve: INVALID_FIELD: prompt: ")
    assert "standard input" in errors


async def test_generate_as_json_prints_each_message(genserve: Command) -> None:
    """One line each, which protobuf reads back."""
    _, output, _ = await genserve("generate", "x", "--json")
    messages = [Parse(line, generation_pb2.GenerateResponse()) for line in output.splitlines()]
    assert "".join(message.outputs[0].text for message in messages) == "Once upon a time"


async def test_generate_prints_statistics_on_stderr(genserve: Command) -> None:
    """Tokens, speed, time to the first token, weight versions, and that of an adapter."""
    _, _, errors = await genserve("generate", "x", "--stats", "--lora-name", "poet")
    assert errors.rstrip().endswith("weights 0, 1 | adapter 4")
    _, _, errors = await genserve("generate", "x", "--stats")
    assert "4 output tokens (length)" in errors
    assert "tok/s" in errors
    assert "first token after" in errors
    assert errors.rstrip().endswith("weights 0, 1")


@pytest.mark.slow
async def test_generate_is_cancelled_by_an_interrupt(daemon: ScriptedDaemon) -> None:
    """Ctrl-C ends the request in the daemon; exit 130, no traceback."""
    daemon.hangs_after = 2
    process = await start(daemon.target, "generate", "x")
    assert await process.stdout.readexactly(len("Once upon")) == b"Once upon"
    process.send_signal(signal.SIGINT)
    _, errors = await process.communicate()
    assert (process.returncode, errors) == (130, b"")
    await asyncio.wait_for(daemon.cancelled.wait(), 30)


@pytest.mark.slow
async def test_a_reader_that_goes_away_is_no_error_to_tell_of(daemon: ScriptedDaemon) -> None:
    """`genserve generate | head -c 4` prints no traceback."""
    daemon.words = ["x" * 1000] * 1000
    process = await start(daemon.target, "generate", "x")
    assert await process.stdout.readexactly(4) == b"xxxx"
    process._transport.get_pipe_transport(1).close()
    errors = await process.stderr.read()
    assert (await process.wait(), errors) == (141, b"")


# --- push


async def test_push_takes_the_next_version_and_prints_the_steps(
    daemon: ScriptedDaemon, genserve: Command, checkpoint: str
) -> None:
    """Progress goes to stderr, the steps in milliseconds to stdout."""
    daemon.weight_version = 6
    status, output, errors = await genserve("push", checkpoint, "--pause-mode", "wait", "--kv-policy", "reuse")
    assert status == 0
    assert daemon.weight_version == 7
    assert daemon.header.apply.pause_mode == 2
    assert "receive         1.5 ms" in output
    assert "paused for 1.0 ms" in output
    assert "\ntokens to recompute: 512\n" in output
    assert "-> 7" in output
    assert "100%" in errors


async def test_push_as_json_prints_the_answer(genserve: Command, checkpoint: str) -> None:
    """One message, nothing else on stdout."""
    _, output, _ = await genserve("push", checkpoint, "--version", "3", "--json")
    assert Parse(output, weights_pb2.PushWeightsResponse()).applied.active_version == 3


async def test_push_can_only_validate(daemon: ScriptedDaemon, genserve: Command, checkpoint: str) -> None:
    """A dry run changes nothing."""
    status, output, _ = await genserve("push", checkpoint, "--validate")
    assert (status, daemon.streams) == (0, [[]])
    assert "valid" in output


async def test_push_that_prepares_says_how_and_until_when_to_commit(
    daemon: ScriptedDaemon, genserve: Command, checkpoint: str
) -> None:
    """The command to type next, for the same daemon: that of a router's push would go to one of its replicas. Not with
    --json, and not beside --stage."""
    daemon.state_of_push = weights_pb2.PUSH_STATE_PREPARED
    status, output, _ = await genserve("push", checkpoint, "--prepare", "--prepared-ttl", "5m")
    assert (status, daemon.header.action) == (0, weights_pb2.PUSH_ACTION_PREPARE)
    assert daemon.header.prepared_ttl.seconds == 300
    last = output.splitlines()[-1]
    command = f"genserve commit {daemon.header.push_id} --target {daemon.target}"
    assert re.fullmatch(rf"{command}  # before \d\d:\d\d:\d\d, .*", last)
    _, output, _ = await genserve("push", checkpoint, "--prepare", "--json")
    assert Parse(output, weights_pb2.PushWeightsResponse()).push.state == weights_pb2.PUSH_STATE_PREPARED
    with pytest.raises(SystemExit):
        await genserve("push", checkpoint, "--prepare", "--stage")


async def test_push_of_a_broken_file_names_it(genserve: Command, tmp_path: Path) -> None:
    """A file that is no checkpoint, and one that is not there."""
    (tmp_path / "x.safetensors").write_bytes(b"no")
    for path in (tmp_path / "x.safetensors", tmp_path / "none.safetensors"):
        status, _, errors = await genserve("push", str(path))
        assert status == 1
        assert errors.startswith("genserve: ")
        assert str(path) in errors
        assert errors.count("\n") == 1


async def test_a_load_takes_the_options_of_a_push(daemon: ScriptedDaemon, genserve: Command, checkpoint: str) -> None:
    """The daemon is asked for the same, wherever the bytes are from; without a version for the one after the served."""
    flags = ["--expected-version", "3", "--force", "--prepare", "--prepared-ttl", "5m", "--pause-mode", "wait"]
    flags += ["--kv-policy", "reuse", "--lease", "l", "--prepare-mode", "paused"]
    for version, asked in ((["--version", "2"], 2), ([], 7)):
        daemon.weight_version = 6
        await genserve("push", checkpoint, *flags, *version)
        daemon.weight_version = 6
        status, _, _ = await genserve("load", "/c", "--push-id", "p", *flags, *version)
        assert (status, daemon.load.push_id, daemon.load.checkpoint_path) == (0, "p", "/c")
        assert daemon.load.weight_version == daemon.header.weight_version == asked
        for field in ("expected_version", "force", "action", "prepared_ttl", "apply"):
            loaded, pushed = getattr(daemon.load, field), getattr(daemon.header, field)
            assert loaded == pushed != type(pushed)(), field


async def test_a_load_from_peers_takes_their_version(daemon: ScriptedDaemon, genserve: Command) -> None:
    """Unless another one is asked for."""
    await genserve("load", "--peer", "a:1", "--peer", "b:2", "--peer-push", "p")
    assert (list(daemon.load.peers.addresses), daemon.load.peers.push_id) == (["a:1", "b:2"], "p")
    assert daemon.load.weight_version == 0
    await genserve("load", "--peer", "a:1", "--version", "4")
    assert daemon.load.weight_version == 4


async def test_a_rollback_is_a_load_of_the_version_before(
    daemon: ScriptedDaemon, genserve: Command, checkpoint: str
) -> None:
    """From the daemon's disk, or from a peer, whatever its number is."""
    await genserve("push", checkpoint)
    status, _, _ = await genserve("rollback", "--expected-version", "7", "--pause-mode", "wait")
    assert (status, daemon.load.WhichOneof("source"), daemon.load.force) == (0, "previous", True)
    assert (daemon.load.weight_version, daemon.load.expected_version) == (0, 7)
    await genserve("rollback", "--peer", "a:1", "--version", "6")
    assert (list(daemon.load.peers.addresses), daemon.load.force, daemon.load.weight_version) == (["a:1"], True, 6)


# --- pause, resume, status


async def test_pause_prints_the_lease_and_how_to_resume(daemon: ScriptedDaemon, genserve: Command) -> None:
    """The holder is user@host unless given."""
    status, output, _ = await genserve("pause", "--mode", "abort", "--ttl", "2m")
    assert status == 0
    assert f"\nresume with: genserve resume lease-1 --target {daemon.target}\n" in output
    assert "@" in daemon.leases["lease-1"].holder
    status, output, _ = await genserve("resume", "lease-1")
    assert (status, output, daemon.leases) == (0, "running\n", {})


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_pause_with_hold_renews_until_interrupted_and_resumes(
    daemon: ScriptedDaemon, number: signal.Signals
) -> None:
    """Ctrl-C is how a held pause ends, and SIGTERM where there is no terminal: exit 0."""
    process = await start(daemon.target, "pause", "--hold", "--ttl", "6s")  # it is renewed after a third of that
    assert b"lease-1" in await process.stdout.readline()
    await until(lambda: daemon.renewed.is_set() or process.returncode is not None)
    process.send_signal(number)
    output, errors = await process.communicate()
    assert (process.returncode, output, errors) == (0, b"resumed\n", b"")
    assert daemon.resumed == ["lease-1"]


async def test_sleep_and_wake_up_say_what_is_asleep(daemon: ScriptedDaemon, genserve: Command) -> None:
    """Part by part; the status shows it too."""
    told = await genserve("sleep", "--level", "2", "--mode", "abort", "--timeout", "9s")
    restore = "or wake up everything, which restores version 0"
    lost = "the weights were discarded"
    asleep = f"scheduling, weights, kv_cache; {lost}: wake them up and push a version, {restore}"
    assert told == (0, f"sleeping: {asleep}\n", "")
    assert f"asleep   {asleep}" in (await genserve("status"))[1]
    told = await genserve("wake-up", "--tag", "weights")
    assert told[:2] == (0, f"sleeping: scheduling, kv_cache; {lost}: push a version, {restore}\n")
    assert (await genserve("wake-up"))[1] == "running\n"
    slept, woken, _ = daemon.sleeps
    assert (slept.level, slept.mode, slept.timeout.seconds) == (2, types_pb2.PAUSE_MODE_ABORT, 9)
    assert list(woken.tags) == ["weights"]


async def test_status_is_a_table(genserve: Command) -> None:
    """Phase, version, model, load, and the leases with the time that is left."""
    await genserve("pause", "--no-expiry", "--holder", "me")
    _, output, _ = await genserve("status")
    assert output.splitlines() == [
        "phase    paused",
        "version  0",
        "model    smol",
        "load     3 running, 0 waiting, 0 tok/s",
        "cache    25% in use, 0% prefix hits",
        "updates  beside: there is room",
        "pause    lease-1  keep  no expiry  me",
    ]


async def test_status_shows_where_else_the_daemon_serves(daemon: ScriptedDaemon, genserve: Command) -> None:
    """The ports of its front ends, and that of its OpenAI server."""
    daemon.info.frontend_ports.extend([4001, 4002])
    daemon.info.openai_port = 8000
    _, output, _ = await genserve("status")
    assert output.splitlines()[-2:] == ["serving  2 front ends, on ports 4001, 4002", "openai   HTTP on port 8000"]


async def test_status_shows_the_model_runner_of_a_daemon_that_tells_it(
    daemon: ScriptedDaemon, genserve: Command
) -> None:
    """What a bug report about tokens needs to say. Older daemons do not tell it."""
    assert "runner" not in (await genserve("status"))[1]
    daemon.info.model_runner = "v2"
    assert "runner   v2, of vLLM's model runners" in (await genserve("status"))[1].splitlines()
    assert json.loads((await genserve("status", "--json"))[1])["modelRunner"] == "v2"


async def test_status_as_json_and_on_every_change(daemon: ScriptedDaemon, genserve: Command) -> None:
    """A line a status, and in each how new weights are taken and where else the daemon serves."""
    daemon.info.frontend_ports.extend([4001, 4002])
    daemon.info.openai_port = 8000
    _, output, _ = await genserve("status", "--watch", "--json")
    lines = [json.loads(line) for line in output.splitlines()]
    for line in lines:
        assert (line.pop("weightUpdate"), line.pop("weightUpdateReason")) == ("beside", "there is room")
        assert (line.pop("frontendPorts"), line.pop("numFrontendsDown"), line.pop("openaiPort")) == (
            [4001, 4002],
            0,
            8000,
        )
        assert line.pop("modelRunner") == ""
    messages = [ParseDict(line, control_pb2.WatchStatusResponse()) for line in lines]
    assert [message.load.running for message in messages] == [0, 1]


async def test_json_has_zeros_and_empty_lists(genserve: Command, checkpoint: str) -> None:
    """A program that reads them need not know that protobuf's JSON leaves them out."""
    status = json.loads((await genserve("status", "--json"))[1])
    assert (status["state"]["weightVersion"], status["state"]["pauses"]) == (0, [])
    assert (status["load"]["running"], status["load"]["waiting"]) == (3, 0)
    assert (status["frontendPorts"], status["openaiPort"]) == ([], 0)
    first = json.loads((await genserve("generate", "x", "--json"))[1].splitlines()[0])
    assert first["outputs"][0]["index"] == 0
    pushed = json.loads((await genserve("push", checkpoint, "--validate", "--json"))[1])
    assert (pushed["push"]["issues"], pushed["push"]["receivedBytes"]) == ([], "0")


# --- settings


async def test_target_and_token_come_from_the_environment(
    daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """$GENSERVE_TARGET and $GENSERVE_TOKEN; the token is not shown by --help."""
    monkeypatch.setenv("GENSERVE_TARGET", daemon.target)
    monkeypatch.setenv("GENSERVE_TOKEN", "secret")
    assert await asyncio.to_thread(main, ["generate", "x"]) == 0
    assert daemon.metadata["authorization"] == "Bearer secret"
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    assert "secret" not in capsys.readouterr().out
