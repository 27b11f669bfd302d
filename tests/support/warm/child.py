"""What a forked process does to become one that was started: takes what was sent for it, and runs its program."""

import faulthandler
import fcntl
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import setproctitle
import torch

from genserve.launcher.end_with_starter import ends_with
from tests.support.warm import wire
from tests.support.warm.process import starting_warm

MAX_DEPTH = 3
"""The doctor starts a daemon, which starts an engine's core, which starts workers. Those start nothing."""
_HEAVY = (
    ("-m", "genserve", "serve"),
    ("-m", "genserve.doctor.machine.device"),
    ("-m", "vllm.model_executor.models.registry"),
)
"""What the doctor starts that imports torch or vLLM, and what vLLM starts to look at a kind of model for the first time
in a home. What else a daemon starts is to be as light as it is."""
_ABOVE_ALL = 1000  # no process is to have so many files


def become(launch: wire.Launch, files: Sequence[int], own_server: Callable[[], socket.socket] | None) -> None:
    """Runs the program of `launch` here, to its end. `own_server` forks the server of the processes that it starts."""
    os.sched_setaffinity(0, launch.cpus)
    os.chdir(launch.directory)
    server = own_server() if own_server is not None else None
    _take_files(files, launch.descriptors)
    for each in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN if each in launch.ignored else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN if signal.SIGINT in launch.ignored else signal.default_int_handler)
    if launch.starter is not None and not ends_with(launch.starter):
        return
    os.environ.clear()
    os.environ.update(launch.environment)
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    setproctitle.setproctitle(" ".join((sys.executable, *launch.arguments)))
    np.random.seed()
    _bind_threads()
    if server is not None:
        _start_warm(server)
    _run(*launch.arguments)


def _run(kind: str, *arguments: str) -> None:
    """As the interpreter does with these arguments."""
    if kind == "-m":
        sys.path[0], sys.argv = os.getcwd(), list(arguments)
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path[0], sys.argv = "", ["-c", *arguments[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(arguments[0], vars(main))
    else:
        sys.path[0], sys.argv = os.path.dirname(os.path.abspath(kind)), [kind, *arguments]
        runpy.run_path(kind, run_name="__main__")


def _take_files(files: Sequence[int], descriptors: Sequence[int]) -> None:
    """Gives the files their numbers. They move out of the way of each other first."""
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ABOVE_ALL) for fd in files]
    for fd in files:
        os.close(fd)
    for fd, number in zip(moved, descriptors, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def _bind_threads() -> None:
    """As libgomp does when it is loaded, which was before there were these variables: vLLM sets them for a worker."""
    if (num_threads := os.environ.get("OMP_NUM_THREADS")) is not None:
        torch.set_num_threads(int(num_threads))
    if (cpus := os.environ.get("GOMP_CPU_AFFINITY")) is not None:
        os.sched_setaffinity(0, {int(each) for each in cpus.split()})


def _start_warm(server: socket.socket) -> None:
    """Lets multiprocessing start its processes, and subprocess those in _HEAVY, through the server."""
    start_cold = multiprocessing.util.spawnv_passfds
    lock = threading.Lock()

    def start(launch: wire.Launch, files: Sequence[int]) -> int:
        with lock:
            return wire.ask(server, launch, files)

    def spawnv_passfds(path: bytes, args: Sequence[str], passfds: Sequence[int]) -> int:
        command = [os.fsdecode(each) for each in args]
        if "--multiprocessing-fork" not in command:  # its tracker of resources
            return int(start_cold(path, args, passfds))
        program = command[command.index("-c") :]
        descriptors = tuple(sorted({0, 1, 2, *map(int, passfds)}))
        launch = wire.Launch(
            tuple(program),
            dict(os.environ),
            os.getcwd(),
            descriptors,
            None,
            wire.ignored_signals(),
            frozenset(os.sched_getaffinity(0)),
        )
        return start(launch, descriptors)

    util: Any = multiprocessing.util
    util.spawnv_passfds = spawnv_passfds
    popen: Any = subprocess.Popen
    popen._execute_child = starting_warm(popen._execute_child, start, _HEAVY)
