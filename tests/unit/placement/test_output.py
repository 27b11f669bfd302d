"""Lines of replicas, with their numbers."""

import asyncio
import os
import sys
from dataclasses import dataclass
from io import BytesIO, StringIO

import pytest

from genserve.placement.output import PrefixedOutput
from genserve.placement.replica import show_starts
from tests.support.patience import until


class Closed(BytesIO):
    """A terminal that is gone."""

    def write(self, _: object) -> int:
        raise BrokenPipeError


def test_every_line_has_the_prefix_and_stays_whole() -> None:
    """Those of stdout too; the last one may have no end."""
    shown = BytesIO()
    output = PrefixedOutput("[3] ", shown)
    os.write(output.stderr, b"one\ntw")
    os.write(output.stderr, b"o\n\n")
    output.write(b"genserve: three")
    output.close()
    assert shown.getvalue() == b"[3] one\n[3] two\n[3] \n[3] genserve: three\n"
    assert output.last_words() == ": three"


def test_what_nobody_reads_is_not_in_the_way() -> None:
    """The daemon's pipe is read on, and its last words are known."""
    output = PrefixedOutput("[0] ", Closed())
    for _ in range(100):
        os.write(output.stderr, b"x" * 4095 + b"\n")
    output.write(b"genserve: no such model\n")
    output.close()
    assert output.last_words() == ": no such model"


def test_a_line_without_end_is_cut() -> None:
    """A progress bar of an hour does not fill the memory."""
    shown = BytesIO()
    output = PrefixedOutput("", shown)
    for _ in range(64):
        os.write(output.stderr, b"x" * 16384)
    output.close()
    assert len(shown.getvalue()) <= (2 << 16) + 1


class Terminal(StringIO):
    """A person reads it."""

    def isatty(self) -> bool:
        """It is one."""
        return True


@dataclass
class Starting:
    """A replica."""

    serves: bool = False


async def test_a_terminal_says_how_many_replicas_serve_until_all_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, in whose place what a replica says is written."""
    terminal, shown = Terminal(), BytesIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    replicas = [Starting(serves=True), Starting()]
    showing = asyncio.create_task(show_starts(replicas))
    await until(lambda: "1 of 2 replicas serve" in terminal.getvalue())
    output = PrefixedOutput("[1] ", shown)
    os.write(output.stderr, b"loading\n")
    output.close()
    assert shown.getvalue() == b"\r\x1b[K[1] loading\n"
    replicas[1].serves = True
    await showing
    assert "genserve: all replicas serve after " in terminal.getvalue()
