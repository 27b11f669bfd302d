"""A worker ends with the daemon, however that has ended.

vLLM's processes would outlive a killed daemon, with all their memory: EngineCore waits for requests for ever, and ends
when a worker of it has.
"""

import os
import select
import socket
import threading
import time
from functools import cache

_EXIT_FAILED = 1
_CHECK_INTERVAL_S = 2.0
_CONNECT_TIMEOUT_S = 5.0
_MAX_MISSED = 3
_START_TIMEOUT_S = 600.0


@cache  # once, whoever asks
def end_with_process(pid: int) -> None:
    """Ends this process with another one on this host."""
    try:
        ended = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(_EXIT_FAILED)

    def watch() -> None:
        select.select([ended], [], [])
        os._exit(_EXIT_FAILED)

    threading.Thread(target=watch, name="genserve-watch", daemon=True).start()


@cache
def end_with_address(address: str) -> None:
    """Ends this process when nobody has listened at "HOST:PORT" for some seconds. The daemon begins to listen after its
    workers have been attached, so it may take its time at first."""
    host, _, port = address.rpartition(":")
    place = (host.strip("[]"), int(port))

    def watch() -> None:
        began_s, missed, was_there = time.monotonic(), 0, False
        while missed < _MAX_MISSED:
            time.sleep(_CHECK_INTERVAL_S)
            if _listens(place):
                missed, was_there = 0, True
            elif was_there or time.monotonic() - began_s > _START_TIMEOUT_S:
                missed += 1
        os._exit(_EXIT_FAILED)

    threading.Thread(target=watch, name="genserve-watch", daemon=True).start()


def _listens(place: tuple[str, int]) -> bool:
    try:
        socket.create_connection(place, _CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True
