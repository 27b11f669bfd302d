"""Whatever a command is given, it ends by itself, with a status and a line that says what is wrong: no traceback."""

import argparse
import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from genserve import cli
from genserve.cli import main, make_parser
from genserve.cli.options import unrecognized
from tests.support.commands import start
from tests.support.scripted_services import ScriptedDaemon

VALUES = ("3000000000", "-1", "9" * 30, "9" * 5000, "1e999", "nan", "", "\udc80", "é", "\x00", "a\nb")
NUMBERS = ("3000000000", "-1", "1e999")
"""For each flag that is a number: beyond 32 bits, below what a message can have, and no integer or no finite time."""
TEXTS = ("", "\udc80", "\x00")
"""For each other one: nothing, what no message can have, and what no path can have."""
SETTINGS = {"target", "uds"}  # where the daemon is: tried apart


def commands(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that can be run, with its parser."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        yield path, parser
    for action in nested:
        for name, subparser in action.choices.items():
            if name not in ("serve", "route"):  # whose flags are vLLM's; which does not end: test_route.py
                yield from commands(subparser, (*path, name))


def attempts(parser: argparse.ArgumentParser) -> Iterator[list[str]]:
    """Every flag, and every positional argument, of every command with three wrong values, and one of each type with
    all of them."""
    types = set()
    for path, subparser in commands(parser):
        actions = [action for action in subparser._actions if action.nargs != 0 and action.dest not in SETTINGS]
        positionals = [action.dest for action in actions if not action.option_strings]
        for action in actions:
            kind = (action.type, action.choices is None, action.nargs, bool(action.option_strings))
            values = VALUES if kind not in types else TEXTS if action.type in (None, str, Path) else NUMBERS
            types.add(kind)
            for value in values:
                given = [value if dest == action.dest else "x" for dest in positionals]
                flag = [f"{action.option_strings[0]}={value}"] if action.option_strings else []
                yield [*path, *flag, *(["--", *given] if given else [])]  # a lone "--" is wrong usage, whatever else is


@pytest.mark.slow
async def test_no_flag_of_any_command_takes_a_value_that_ends_in_a_traceback(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each ends with 0, 1 or 2; an error is a line that begins with our name, wrong usage is argparse's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GENSERVE_TARGET", daemon.target)
    parser = make_parser()  # takes longer than what a command does
    monkeypatch.setattr(cli, "make_parser", lambda: parser)
    wrong: list[str] = []

    def run_all() -> None:
        for arguments in attempts(parser):
            try:
                status = main(arguments)
            except SystemExit as exited:
                status = exited.code if isinstance(exited.code, int) else 99
            except BaseException as error:
                wrong.append(f"{arguments!a:.100}: {error!r:.100}")
                continue
            errors = capsys.readouterr().err
            is_told = {0: True, 1: "genserve: " in errors, 2: "usage:" in errors}
            if not is_told.get(status, False) or "Traceback" in errors:
                wrong.append(f"{arguments!a:.100}: {status} {errors:.200}")

    await asyncio.to_thread(run_all)
    assert wrong == []


@pytest.mark.parametrize(
    ("arguments", "command", "says"),
    [
        (
            ["push", "path", "--verson", "3"],
            "genserve push",
            "unrecognized arguments: --verson 3 (did you mean --version?)",
        ),
        (["push", "--verson=3"], "genserve push", "unrecognized arguments: --verson=3 (did you mean --version?)"),
        (["lora", "load", "--bogus"], "genserve lora load", "unrecognized arguments: --bogus"),
        (["resume", "--bogus"], "genserve resume", "unrecognized arguments: --bogus"),
        (["status", "extra"], "genserve status", "unrecognized arguments: extra"),
        (["--bogus"], "genserve", "unrecognized arguments: --bogus"),
        (["push"], "genserve push", "the following arguments are required: PATH"),
        (["lora"], "genserve lora", "the following arguments are required: ACTION"),
    ],
)
def test_an_unknown_flag_is_named_with_the_usage_of_its_command(
    arguments: list[str], command: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named before a missing argument, which may be missing only because the flag was mistyped."""
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    errors = capsys.readouterr().err
    assert exited.value.code == 2
    assert errors.startswith(f"usage: {command} [-h]")
    assert errors.endswith(f"\n{command}: error: {says}\n")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--role", "nobody"], ["--name"], ["--bogus"], []], ids=lambda each: " ".join(each)
)
def test_a_usage_has_brackets_around_what_may_be_left_out(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever it is written."""
    with pytest.raises(SystemExit):
        main(["token", *arguments])
    assert "usage: genserve token [-h] --name NAME --role {" in "".join(capsys.readouterr())


def test_what_follows_two_dashes_is_not_taken_for_a_misspelt_flag() -> None:
    """Nor are the dashes themselves, with which every flag begins."""
    arguments = ["--", "--port", "7"]
    assert unrecognized(arguments, ["--port", "--host"]) == "unrecognized arguments: -- --port 7"


def test_a_flag_that_may_be_repeated_is_read_once() -> None:
    """Although the arguments are looked at twice."""
    assert make_parser().parse_args(["generate", "x", "--stop", "a", "--stop", "b"]).stop == ["a", "b"]


@pytest.mark.parametrize("target", ["", "\udc80", "a b\n", "unix:", "dns:///", "127.0.0.1:99999999", "\x00"])
@pytest.mark.parametrize("flag", ["--target", "--uds"])
async def test_no_address_ends_in_a_traceback(flag: str, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused, or nobody answers there."""
    assert await asyncio.to_thread(main, ["status", flag, target]) == 1
    assert capsys.readouterr().err.startswith("genserve: ")


async def run(
    daemon: ScriptedDaemon, *arguments: str | bytes, stdin: bytes = b"", environment: dict[str, str] | None = None
) -> tuple[int | None, bytes, bytes]:
    """A command as a process: exit status, stdout, stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "genserve", *arguments,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "GENSERVE_TARGET": daemon.target, **(environment or {})},
    )  # fmt: skip
    output, errors = await asyncio.wait_for(process.communicate(stdin), 60)
    return process.returncode, output, errors


@pytest.mark.slow
async def test_bytes_that_are_no_text_are_refused_in_one_line(daemon: ScriptedDaemon) -> None:
    """On standard input and as an argument."""
    piped, given = await asyncio.gather(run(daemon, "generate", stdin=b"\xff\xfe"), run(daemon, "generate", b"\xff"))
    for status, output, errors in (piped, given):
        assert (status, output) == (1, b"")
        assert errors.startswith(b"genserve: INVALID_FIELD: prompt: ")
        assert errors.count(b"\n") == 1


async def test_an_error_after_a_part_of_the_answer_has_a_line_of_its_own(daemon: ScriptedDaemon) -> None:
    """On a terminal both would be one line."""
    daemon.hangs_after = 2
    for timeout in ("1s", "20s"):  # a busy machine may not have the whole part in the first
        status, output, errors = await run(daemon, "generate", "x", "--timeout", timeout)
        if output == b"Once upon\n":
            break
    assert (status, output) == (1, b"Once upon\n")
    assert errors.startswith(b"genserve: DEADLINE_EXCEEDED: ")


@pytest.mark.slow
async def test_an_output_that_knows_ascii_only_gets_escapes(daemon: ScriptedDaemon) -> None:
    """The answer is printed whole."""
    daemon.words = ["é", "\U0001f600", "x"]
    outcome = await run(daemon, "generate", "x", environment={"PYTHONIOENCODING": "ascii"})
    assert outcome == (0, b"\\xe9\\U0001f600x\n", b"")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("generate x --json | head -c 1", 141),
        ("status --json | head -c 0", 141),
        ("generate x > /dev/full", 1),
        ("status 2>&1 > /dev/full", 1),
        ("generate x >&-", 0),
        ("generate x 2>&-", 0),
        ("generate x <&- >&- 2>&-", 0),
        ("generate <&-", 1),
        ("generate --help | head -c 0", 141),
        ("generate --temperature hot 2>&1 | head -c 0", 141),
    ],
)
async def test_an_output_that_is_closed_or_full_ends_without_a_traceback(
    daemon: ScriptedDaemon, command: str, status: int
) -> None:
    """Nor does Python complain at exit; a reader that has gone away is no error to tell of."""
    daemon.words = ["x" * 1000] * 300
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", f'"$0" -m genserve {command}; exit ${{PIPESTATUS[0]}}', sys.executable,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "GENSERVE_TARGET": daemon.target},
    )  # fmt: skip
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert b"Traceback" not in errors
    assert b"Exception ignored" not in errors
    assert process.returncode == status or (status == 141 and process.returncode in (0, 2))  # all fitted into the pipe


@pytest.mark.slow
async def test_a_held_pause_ends_when_its_lease_is_lost(daemon: ScriptedDaemon) -> None:
    """Somebody else has ended it: the engine may run, and who holds it has to know. Exit 1."""
    process = await start(daemon.target, "pause", "--hold", "--ttl", "300ms")
    assert b"lease-1" in await process.stdout.readline()
    daemon.leases.clear()
    output, errors = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, output) == (1, b"")
    assert errors.startswith(b"genserve: PAUSE_LEASE_LOST: ")
    assert errors.count(b"\n") == 1


def test_python_m_genserve_is_the_command() -> None:
    """As the tests above run it."""
    done = subprocess.run([sys.executable, "-m", "genserve", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("genserve ")
