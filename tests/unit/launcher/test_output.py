"""What is understood of a daemon's words, and how much of them is read."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from genserve.launcher.output import Serving, StdoutReader, last_words
from tests.support.kept import kept

LINE = b"genserve: serving a model on 127.0.0.1:9\n"


class Log(BytesIO):
    """Where the daemon's words go; `first` is called before each write."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Callable[[], None] = lambda: None

    def write(self, data: Any) -> int:
        """As a file's."""
        self.first()
        return super().write(data)


@dataclass
class Stdout:
    """A daemon's, and who reads it."""

    writing: int
    reader: StdoutReader
    log: Log
    serving: Future[Serving]

    def say(self, said: bytes) -> None:
        """As the daemon."""
        os.write(self.writing, said)


@pytest.fixture
def stdout() -> Iterator[Stdout]:
    reading, writing = os.pipe()
    log, serving = Log(), Future[Serving]()
    with os.fdopen(reading, "rb", buffering=0) as file:
        made = Stdout(writing, StdoutReader(file, log, serving), log, serving)
        yield made
        os.close(made.writing)


@pytest.mark.parametrize(
    ("line", "serving"),
    [
        (LINE, Serving("a model", "127.0.0.1:9")),
        (
            b"genserve: serving /models/on on the shelf on [::1]:50051\n",
            Serving("/models/on on the shelf", "[::1]:50051"),
        ),
        (b"genserve: serving \xff on unix:/run/a\n", Serving("\N{REPLACEMENT CHARACTER}", "unix:/run/a")),
        (b"genserve: starting the engine for a model on 127.0.0.1:9\n", None),
        (b"INFO genserve: serving a model on 127.0.0.1:9\n", None),
        (b"", None),
    ],
)
def test_only_one_line_says_where_a_daemon_serves(line: bytes, serving: Serving | None) -> None:
    """The address is its last word; a model's name may be anything."""
    assert Serving.parse(line) == serving


def test_the_line_is_found_among_others_and_in_pieces(stdout: Stdout) -> None:
    """vLLM logs to stdout when it is told to; a pipe keeps no lines together."""
    assert stdout.reader.read() is False, "nothing was said"
    for piece in (b"INFO loading\ngenserve: ser", b"ving a model on 127.0.", b"0.1:9\nINFO"):
        assert not stdout.serving.done()
        stdout.say(piece)
        assert stdout.reader.read() is True
    assert stdout.serving.result(0) == Serving("a model", "127.0.0.1:9")
    stdout.say(b" more\n" + LINE.replace(b":9", b":8"))
    assert stdout.reader.read()
    assert stdout.serving.result(0).address == "127.0.0.1:9", "the first one counts"
    assert stdout.log.getvalue() == b"INFO loading\n" + LINE + b"INFO more\n" + LINE.replace(b":9", b":8")


def test_a_line_without_end_is_not_kept_whole(stdout: Stdout) -> None:
    """A progress bar may go on for hours. What follows its end is read as ever."""
    for _ in range(4):
        stdout.say(b"x" * (48 << 10))
        assert stdout.reader.read()
    assert sum(map(len, kept(stdout.reader, bytes))) == 64 << 10
    stdout.say(b"\n" + LINE)
    assert stdout.reader.read()
    assert stdout.serving.result(0) == Serving("a model", "127.0.0.1:9")


def test_the_end_of_stdout_is_noticed(stdout: Stdout) -> None:
    """Silence is not the end."""
    assert not stdout.reader.read()
    assert stdout.reader.is_open
    os.close(stdout.writing)
    stdout.writing = os.dup(stdout.reader.fd)  # for the fixture to close
    assert not stdout.reader.read()
    assert not stdout.reader.is_open


def test_a_log_without_room_does_not_stop_the_daemon(stdout: Stdout) -> None:
    """It would wait for somebody to read its stdout."""

    def fail() -> None:
        raise OSError("no space left on device")

    stdout.log.first = fail
    stdout.say(LINE)
    assert stdout.reader.read()
    assert stdout.serving.done()


def test_what_is_left_is_read_to_its_end_and_not_for_ever(stdout: Stdout) -> None:
    """A process that the daemon has left behind may write as fast as anybody reads."""
    stdout.say(b"a")
    stdout.reader.read_rest()
    assert stdout.log.getvalue() == b"a"

    num_writes = 0

    def say_more() -> None:
        nonlocal num_writes
        num_writes += 1
        stdout.say(b"more")

    stdout.log.first = say_more
    stdout.say(b"more")
    stdout.reader.read_rest()
    assert 1 < num_writes < 10_000


OWN = "genserve: "


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("", ""),
        ("\n  \n", ""),
        ("one\n\n two \nthree\n", ": one; two; three"),
        ("one\ntwo\nthree\nfour", ": two; three; four"),
        (f"{OWN}no such model\nTraceback\nValueError: x\n", ": no such model"),
        (f"{OWN}starting\nnoise\n{OWN}the engine has died\nnoise\n", ": the engine has died"),
        (f"{OWN}the engine has died\n{OWN}error: stop failed\n{OWN}warning: x\n", ": the engine has died"),
        (f"{OWN}the engine has died\n{OWN}serving a model on 127.0.0.1:9\n", ": the engine has died"),
        (f"noise\n{OWN}warning: x\n", ": warning: x"),
        ("usage: genserve serve\ngenserve serve: error: argument --port: no number\n", ": argument --port: no number"),
        (f"INFO {OWN}is quoted\n", f": INFO {OWN}is quoted"),
    ],
)
def test_last_words_are_the_daemons_own_or_else_what_others_said_last(said: str, words: str, tmp_path: Path) -> None:
    """In one line, that follows what has happened: of its own lines the last one, of others' three."""
    log = tmp_path / "log"
    log.write_text(said)
    assert last_words(log) == words


def test_last_words_are_looked_for_at_the_end_of_a_log(tmp_path: Path) -> None:
    """A daemon may have logged for weeks; and in bytes that are no text."""
    log = tmp_path / "log"
    end = b"\xff\nlast\n"
    log.write_bytes(f"{OWN}starting\n".encode() + b"." * ((64 << 10) - len(end)) + end)
    assert last_words(log) == f": {'.' * ((64 << 10) - len(end))}\N{REPLACEMENT CHARACTER}; last"


def test_a_log_that_was_removed_has_no_last_words(tmp_path: Path) -> None:
    """What else goes wrong with it is an error."""
    assert last_words(tmp_path / "log") == ""
    with pytest.raises(IsADirectoryError):
        last_words(tmp_path)
