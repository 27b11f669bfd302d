"""`WarmPopen` and `run`: as subprocess.Popen and subprocess.run, for Python programs that import torch or vLLM."""

import atexit
import inspect
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from genserve.launcher.end_with_starter import ending_with_this_process
from tests.support.warm import wire

Start = Callable[[wire.Launch, Sequence[int]], int]
"""Starts a process with these files of the one that asks; its id."""

# What an interpreter or a library reads when it is loaded. A program that is to have other values of these starts cold.
_READ_AT_IMPORT = (
    *("LD_", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_"),
    *("PYTHON", "TORCH", "TRANSFORMERS_", "HF_", "VLLM_LOGGING"),
)
_READ_LATER = frozenset({"OMP_NUM_THREADS", "PYTHONFAULTHANDLER"})  # `child` does what they ask for
_COLD_OPTIONS = {"preexec_fn": None, "shell": False, "start_new_session": False, "gid": None, "gids": None, "uid": None}
# The daemon disables what would compile before its workers import torch. numpy and OpenCV would each start threads.
# glibc otherwise raises its threshold with each large block that is freed: later ones leave holes in the heap, so that
# workers grow with what they did (70 MiB in 64 streams of 400 tokens, against 4), and tests of leaks would see them.
_SERVER_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 17)}


def starting_warm(
    cold: Callable[..., None], start: Start, programs: Sequence[Sequence[str]] = ((),)
) -> Callable[..., None]:
    """What starts the process of a subprocess.Popen: `start` does if the process can be a warm one and its arguments
    begin with one of `programs`, or else `cold`, which is subprocess.Popen's own."""
    signature = inspect.signature(cold)

    def execute_child(popen: Any, *args: Any, **kwargs: Any) -> None:
        asked = signature.bind(popen, *args, **kwargs).arguments
        command = [] if isinstance(asked["args"], str | bytes | os.PathLike) else list(map(os.fsdecode, asked["args"]))
        command, starter = _unwrapped(command)
        env = dict(os.environ if asked["env"] is None else asked["env"])
        if not any(command[1 : 1 + len(each)] == list(each) for each in programs) or not _can_be_warm(
            command, env, asked
        ):
            cold(popen, *args, **kwargs)
            return
        files = [asked[name] if asked[name] != -1 else number for number, name in enumerate(_STREAMS)]
        launch = wire.Launch(
            tuple(command[1:]),
            env,
            os.path.abspath(asked["cwd"] or os.getcwd()),
            (0, 1, 2, *asked["pass_fds"]),
            None if asked["process_group"] == -1 else asked["process_group"],
            wire.ignored_signals(),
            frozenset(os.sched_getaffinity(0)),  # of this thread
            starter,
        )
        popen.pid = start(launch, (*files, *asked["pass_fds"]))
        popen._child_created = True
        popen._close_pipe_fds(*(asked[name] for name in _PIPES))

    return execute_child


def _unwrapped(command: list[str]) -> tuple[list[str], int | None]:
    """What a command becomes that is to end with its starter, and who that is."""
    if len(command) > _NUM_WRAPPING and command[:_NUM_WRAPPING] == ending_with_this_process(()):
        return command[_NUM_WRAPPING:], int(command[_NUM_WRAPPING - 1])
    return command, None


_NUM_WRAPPING = len(ending_with_this_process(()))
_STREAMS = ("p2cread", "c2pwrite", "errwrite")
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def _can_be_warm(command: list[str], env: dict[str, str], asked: dict[str, Any]) -> bool:
    return (
        len(command) > 1
        and command[0] == sys.executable
        and ((command[1] in ("-m", "-c") and len(command) > 2) or command[1].endswith(".py"))
        and all(asked[name] == value for name, value in _COLD_OPTIONS.items())
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

    def start(self, launch: wire.Launch, files: Sequence[int]) -> int:
        """As `Start`. Raises RuntimeError with the server's own words if it has ended."""
        self._begin("client")
        assert self._control is not None and self._process is not None
        with self._lock:
            try:
                return wire.ask(self._control, launch, files)
            except OSError as error:
                said = self._process.communicate()[1].decode(errors="replace")
                raise RuntimeError(f"the server of warm processes has ended:\n{said[-4000:]}") from error

    def warm_up(self) -> None:
        """Begins to import what engines do, so that it is done when the first process is wanted."""
        self._begin("engine")

    def _begin(self, imports: str) -> None:
        with self._lock:
            if self._control is not None:
                return
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.support.warm.server", str(theirs.fileno()), imports],
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


class WarmPopen(subprocess.Popen[Any]):
    """A program of this interpreter, `[sys.executable, "-m", MODULE, ...]`, "-c" or a file, which begins with what the
    daemon and its engine import already imported. Anything else starts as ever."""

    _execute_child = starting_warm(subprocess.Popen._execute_child, _server.start)  # type: ignore[attr-defined]


def run(command: Sequence[str], *, timeout: float, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Runs a program to its end, as subprocess.run with text and `capture_output`."""
    with WarmPopen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
