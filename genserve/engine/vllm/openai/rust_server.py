"""The process of vLLM's OpenAI server in Rust."""

import ctypes
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from genserve.engine.vllm.openai.environment import allow_connections, of_server

_PR_SET_PDEATHSIG: Final = 1
_EXIT_FAILED: Final = 1


@dataclass(frozen=True, slots=True)
class RustServer:
    """`command`: without its sockets: `listener` of HTTP, `requests` and `outputs` where it joins the engine.
    `variables`: of its environment, besides the daemon's."""

    daemon_pid: int
    command: Sequence[str]
    listener: socket.socket
    requests: socket.socket
    outputs: socket.socket
    variables: Mapping[str, str] = field(default_factory=dict)


def run(server: RustServer) -> None:
    """Becomes the server. It serves until SIGTERM; then until the requests that run have been answered."""
    os.setpgid(0, 0)  # Ctrl-C in a terminal is for the daemon, which ends this process
    # The kernel watches the thread that has started this process: the main thread of the daemon.
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != server.daemon_pid:
        os._exit(_EXIT_FAILED)  # it has ended before
    allow_connections()
    # internal: as vllm.v1.utils.RustFrontendProcessManager.
    descriptors = {
        "--listen-fd": server.listener,
        "--input-listener-fd": server.requests,
        "--output-listener-fd": server.outputs,
    }
    command = list(server.command)
    for flag, inherited in descriptors.items():
        inherited.set_inheritable(True)
        command += [flag, str(inherited.fileno())]
    os.execve(command[0], command, of_server(os.environ) | dict(server.variables))
