"""Ends a process of the engine with the daemon, however the daemon ends.

vLLM's processes would outlive a killed daemon with all their memory: EngineCore waits for requests for ever, but ends
when one of its workers ends.
"""

import importlib.util
import os
import select
import socket
import sys
import threading
import time
from functools import cache
from typing import Any

from genserve.worker.contract.vllm_settings import DAEMON_PID_VARIABLE

_SPAWNED = "genserve.worker.contract.spawned"
_EXIT_FAILED = 1
CHECK_INTERVAL_S = 2.0
_CONNECT_TIMEOUT_S = 5.0
_MAX_REFUSED = 3
UNREACHABLE_S = 60.0
_START_TIMEOUT_S = 600.0


def end_spawned_with_this_process() -> None:
    """From here on, processes that multiprocessing starts for this one end with it. EngineCore has no worker yet while
    it waits for its first message, for five minutes, from a daemon that may have been ended meanwhile."""
    os.environ[DAEMON_PID_VARIABLE] = str(os.getpid())
    # A spawned process runs the main module first, but not the __main__ of a package, as `python -m genserve` is.
    sys.modules["__main__"].__spec__ = importlib.util.find_spec(_SPAWNED)


def end_with_daemon() -> None:
    """Ends this process with the daemon that it was started for, if it was started for one."""
    if DAEMON_PID_VARIABLE in os.environ:
        end_with_process(int(os.environ[DAEMON_PID_VARIABLE]))


def end_with_process(pid: int) -> None:
    """Ends this process with another one on this host."""
    _end_with_process(pid, os.getpid())


@cache  # once in each process, whoever calls it: a forked one does not have the thread
def _end_with_process(pid: int, _own_pid: int) -> None:
    try:
        ended = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(_EXIT_FAILED)

    def watch() -> None:
        watched = select.poll()
        watched.register(ended, select.POLLIN)
        watched.poll()
        os._exit(_EXIT_FAILED)

    threading.Thread(target=watch, name="genserve-watch", daemon=True).start()


@cache
def end_with_address(address: str, start_timeout_s: float = _START_TIMEOUT_S) -> None:
    """Ends this process when nobody listens at "HOST:PORT" any more: after some seconds if that host says so, after
    a minute if it does not answer. The daemon may be started after its workers, so it has `start_timeout_s` at
    first."""

    def watch() -> None:
        _wait_for_end(address, start_timeout_s)
        os._exit(_EXIT_FAILED)

    threading.Thread(target=watch, name="genserve-watch", daemon=True).start()


def _wait_for_end(address: str, start_timeout_s: float) -> None:
    host, _, port = address.rpartition(":")
    found: Any = None
    patience_s = start_timeout_s
    seen_s, num_refused, was_there = time.monotonic(), 0, False
    while time.monotonic() - seen_s < patience_s and not (was_there and num_refused >= _MAX_REFUSED):
        time.sleep(CHECK_INTERVAL_S)
        try:
            # Resolved once: a name that cannot be resolved later says nothing about the daemon.
            found = found or socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
            family, _, _, _, where = found
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.settimeout(_CONNECT_TIMEOUT_S)
                probe.connect(where)
        except ConnectionRefusedError:
            num_refused += 1
        except OSError:
            pass
        else:
            seen_s, num_refused, was_there, patience_s = time.monotonic(), 0, True, UNREACHABLE_S
