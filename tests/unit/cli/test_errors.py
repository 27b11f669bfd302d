"""What the commands say of what went wrong: a daemon that refuses, none that answers, wrong usage."""

import re
import socket
import threading
from contextlib import suppress
from typing import Any

import pytest
from google.rpc import code_pb2, error_details_pb2

from genserve.cli import main, make_parser
from genserve.cli.options import to_the_same
from tests.support.commands import Command, start
from tests.support.scripted_services import ScriptedDaemon, refuse


async def test_an_error_is_one_line_and_one_a_violation(daemon: ScriptedDaemon, genserve: Command) -> None:
    """Reason and message, then the fields; exit 1."""

    async def fail(context: Any) -> None:
        violation = error_details_pb2.BadRequest.FieldViolation(field="sampling.top_p", description="must be above 0")
        details = error_details_pb2.BadRequest(field_violations=[violation])
        await refuse(context, code_pb2.INVALID_ARGUMENT, "INVALID_FIELD", "bad", details)

    daemon.fail = fail
    expected = "genserve: INVALID_FIELD: bad\n  sampling.top_p: must be above 0\n"
    assert await genserve("generate", "x", "--top-p", "0") == (1, "", expected)


async def test_a_terminal_obeys_nothing_that_a_daemon_answers(daemon: ScriptedDaemon, genserve: Command) -> None:
    """Neither in the message nor in the names of fields."""

    async def fail(context: Any) -> None:
        violation = error_details_pb2.BadRequest.FieldViolation(field="a\x1b[2J", description="b\x9bc\n")
        details = error_details_pb2.BadRequest(field_violations=[violation])
        await refuse(context, code_pb2.INVALID_ARGUMENT, "INVALID_FIELD", "bad\x1b]0;title\x07", details)

    daemon.fail = fail
    expected = "genserve: INVALID_FIELD: bad\\x1b]0;title\\x07\n  a\\x1b[2J: b\\x9bc\n"
    assert await genserve("generate", "x", "--top-p", "0") == (1, "", expected)


def test_without_a_daemon_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 1."""
    assert main(["status", "--target", "127.0.0.1:1"]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("genserve: UNAVAILABLE: no daemon answers at 127.0.0.1:1")
    assert errors.count("\n") == 1


@pytest.mark.slow
async def test_what_grpc_logs_of_a_handshake_is_not_printed_beside_the_error(daemon: ScriptedDaemon) -> None:
    """In a process of its own, because gRPC reads its level once."""
    process = await start(daemon.target, "status", "--tls")
    _, errors = await process.communicate()
    assert process.returncode == 1
    why = r"it has no TLS, or is no daemon: leave out what asks for it \(--tls\)"
    assert re.fullmatch(rf"genserve: UNAVAILABLE: no daemon answers at \S+: {why}\n", errors.decode())


def test_a_setting_that_an_error_names_is_told_as_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """A program gets its name in Python, and a file of that name stays what it is."""
    closing = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{closing.getsockname()[1]}"

    def close_all() -> None:
        with suppress(OSError):
            while True:
                closing.accept()[0].close()

    thread = threading.Thread(target=close_all)
    thread.start()
    try:
        assert main(["status", "--target", address]) == 1
    finally:
        closing.shutdown(socket.SHUT_RDWR)
        thread.join()
        closing.close()
    assert capsys.readouterr().err.endswith("it may need TLS (--tls or --ca-file)\n")


@pytest.mark.parametrize(
    ("flags", "appended"),
    [
        ([], ""),
        (["--target", "a:1", "--ca-file", "our ca.crt"], " --target a:1 --ca-file 'our ca.crt'"),
        (["--uds", "/run/x", "--allow-insecure"], " --uds /run/x --allow-insecure"),
    ],
)
def test_a_command_that_helps_has_the_flags_of_the_connection(flags: list[str], appended: str) -> None:
    """Without --target, that of a router's pause would go to one of its replicas. One with an address stays."""
    args = make_parser().parse_args(["status", *flags])
    for text in ("or end the pause: genserve resume l1", "wake it up: genserve wake-up"):
        assert to_the_same(text, args) == text + appended
    for text in ("ends it: genserve resume --force --target b:2", "genserve resume l1 ended it", "no: genserve"):
        assert to_the_same(text, args) == text


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["resume"],
        ["resume", "x", "--force"],
        ["pause", "--ttl", "soon"],
        ["pause", "--mode", "stop"],
        ["push"],
        ["generate", "x", "--temperature", "hot"],
        ["status", "--target", "a", "--uds", "b"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """argparse's way, with the usage on stderr."""
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == 2
    assert "usage: genserve" in capsys.readouterr().err
