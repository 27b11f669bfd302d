"""What a person is told who waits for the first token: who keeps it waiting, and why."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from genserve.errors import GenserveError
from genserve.observe.notices import say

if TYPE_CHECKING:
    from genserve.client import Client

_FIRST_S: Final = 1.0
_NEXT_S: Final = 5.0
_ASK_S: Final = 5.0


@contextmanager
def telling_why(client: "Client") -> "Iterator[threading.Event]":
    """Says on a terminal's stderr, while the block runs and the event is not set, what keeps the daemon from
    generating: after a second, and again when it is something else."""
    begun = threading.Event()
    if not sys.stderr.isatty():
        yield begun
        return
    telling = threading.Thread(target=_tell, args=(client, begun), name="genserve-waiting", daemon=True)
    telling.start()
    try:
        yield begun
    finally:
        begun.set()


def _tell(client: "Client", begun: threading.Event) -> None:
    from genserve.client.control.waits import why_waiting

    said, wait_s = "", _FIRST_S
    while not begun.wait(wait_s):
        wait_s = _NEXT_S
        try:
            why = why_waiting(client.status(timeout_s=_ASK_S))
        except (GenserveError, RuntimeError):  # the call that waits says it
            continue
        if why and not begun.is_set() and _subject(why) != said:
            said = _subject(why)
            say("waiting: " + "".join(each if each.isprintable() else "?" for each in why))  # others give the names


def _subject(why: str) -> str:
    """Without the numbers, which change all the time."""
    return "".join(each for each in why if not each.isdigit())
