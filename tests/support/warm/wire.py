"""What goes between a process that starts others and the server that forks them: one message each way.

The connection is a Unix socket that keeps messages apart. A `Launch` goes one way with its files, the new process's id,
eight bytes, comes back.
"""

import ctypes
import os
import pickle
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_LAUNCH_BYTES = 1 << 18
_MAX_DESCRIPTORS = 64
_PR_SET_CHILD_SUBREAPER = 36
_IGNORABLE = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Launch:
    """A process to be: the arguments of the Python interpreter after its own name, and what a process inherits.

    `descriptors` are the numbers under which it has the files that come along. `process_group` is as for subprocess:
    None joins the caller's, 0 makes a new one. `ignored` are the signals that it begins with ignored, `cpus` those that
    it may run on. It ends with the process `starter`, None = with nobody, as genserve.launcher.end_with_starter says.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    directory: str
    descriptors: tuple[int, ...]
    process_group: int | None
    ignored: frozenset[int]
    cpus: frozenset[int]
    starter: int | None = None


def ignored_signals() -> frozenset[int]:
    """Those that this process ignores, which a process that it starts inherits."""
    return frozenset(int(each) for each in _IGNORABLE if signal.getsignal(each) is signal.SIG_IGN)


def ask(server: socket.socket, launch: Launch, files: Sequence[int]) -> int:
    """Starts a process and makes it a child of this one; its id. `files` are the descriptors here that become
    `launch.descriptors` there. Raises OSError if the server has ended."""
    message = pickle.dumps(launch)
    if len(message) > MAX_LAUNCH_BYTES:
        raise ValueError(f"a process with {len(message)} bytes of arguments and environment cannot be started warm")
    _set_subreaper(True)
    try:
        socket.send_fds(server, [message], files)
        answer = server.recv(8)
    finally:
        _set_subreaper(False)
    if len(answer) != 8:
        raise ConnectionResetError("the server of warm processes has ended")
    if (pid := int.from_bytes(answer, "little")) == 0:  # which kill and killpg take for this process's own group
        raise ChildProcessError("a warm process could not be forked")
    return pid


def receive(server: socket.socket) -> tuple[Launch, list[int]] | None:
    """The next process to start, and its files; None when whoever asks has ended."""
    message, files, _, _ = socket.recv_fds(server, MAX_LAUNCH_BYTES, _MAX_DESCRIPTORS)
    if not message:
        return None
    launch = pickle.loads(message)
    assert isinstance(launch, Launch)
    return launch, files


def answer(server: socket.socket, pid: int) -> None:
    """Says which process it has become."""
    server.send(pid.to_bytes(8, "little"))


def _set_subreaper(value: bool) -> None:
    """Whether orphans below this process become its children. The server's are orphans on purpose, see server."""
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, int(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "prctl(PR_SET_CHILD_SUBREAPER)")
