"""`WarmPopen`: as subprocess.Popen, for Python programs that import torch or vLLM."""

import atexit
import inspect
import os
import socket
import subprocess
import sys
import threading
from typing import Any

from tests.support.warm import wire

# What an interpreter or a library reads when it is loaded. A program that is to have other values of these starts cold.
_READ_AT_IMPORT = ("LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "PYTHON", "TORCH", "TRANSFORMERS_", "HF_", "VLLM_LOGGING")
_READ_LATER = frozenset({"PYTHONFAULTHANDLER", "OMP_NUM_THREADS"})
# The daemon disables what would compile before its workers import torch. numpy and OpenCV would each start threads.
_SERVER_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "OPENBLAS_NUM_THREADS": "1"}


class WarmPopen(subprocess.Popen[Any]):
    """A program of this interpreter, `[sys.executable, "-m", MODULE, ...]`, which begins with what the daemon and its
    engine import already imported. Anything else starts as ever."""

    def _execute_child(self, *args: Any, **kwargs: Any) -> None:
        cold = super()._execute_child  # type: ignore[misc]
        asked = inspect.signature(cold).bind(*args, **kwargs).arguments
        command = [os.fsdecode(each) for each in asked["args"]] if not isinstance(asked["args"], str) else []
        env = dict(os.environ if asked["env"] is None else asked["env"])
        if not _can_be_warm(command, env, asked):
            cold(*args, **kwargs)
            return
        files = [
            asked["p2cread"] if asked["p2cread"] != -1 else 0,
            asked["c2pwrite"] if asked["c2pwrite"] != -1 else 1,
            asked["errwrite"] if asked["errwrite"] != -1 else 2,
            *asked["pass_fds"],
        ]
        group = None if asked["process_group"] == -1 else asked["process_group"]
        launch = wire.Launch(
            tuple(command[1:]),
            env,
            os.path.abspath(asked["cwd"] or os.getcwd()),
            (0, 1, 2, *asked["pass_fds"]),
            group,
            wire.ignored_signals(),
        )
        self.pid = _server.start(launch, files)
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            *(asked[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        )


def _can_be_warm(command: list[str], env: dict[str, str], asked: dict[str, Any]) -> bool:
    plain = {"preexec_fn": None, "shell": False, "start_new_session": False, "gid": None, "gids": None, "uid": None}
    return (
        command[:2] == [sys.executable, "-m"]
        and len(command) > 2
        and all(asked[name] == value for name, value in plain.items())
        and _read_at_import(env) == _read_at_import(dict(os.environ))
    )


def _read_at_import(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_READ_AT_IMPORT) and name not in _READ_LATER}


class _Server:
    """The server of this process, which starts when it is first needed, and ends with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, launch: wire.Launch, files: list[int]) -> int:
        """Starts a process; its id. Raises RuntimeError with the server's own words if it has ended."""
        self.warm_up()
        assert self._control is not None and self._process is not None
        with self._lock:
            try:
                return wire.ask(self._control, launch, files)
            except OSError as error:
                said = self._process.communicate()[1].decode(errors="replace")
                raise RuntimeError(f"the server of warm processes has ended:\n{said[-4000:]}") from error

    def warm_up(self) -> None:
        """Begins to import, so that it is done when the first process is wanted."""
        with self._lock:
            if self._control is not None:
                return
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.support.warm.server", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    # The forked processes keep its streams, with files of their own below: let them be pipes.
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={**os.environ, **_SERVER_ENVIRONMENT},
                )
            atexit.register(self._stop)

    def _stop(self) -> None:
        assert self._control is not None and self._process is not None
        self._control.close()
        self._process.communicate()


_server = _Server()
warm_up = _server.warm_up
