"""A program for the tests of warm starts: `python -m tests.support.warm.probe` starts a process of its own through
multiprocessing, says on its output what both have got, and waits for its input to end."""

import ctypes
import json
import multiprocessing
import os
import sys
import threading
from multiprocessing.connection import Connection
from typing import Final

_PR_GET_PDEATHSIG: Final = 2


def end_signal() -> int:
    """The signal that the kernel sends this process when its parent ends; 0 = none."""
    number = ctypes.c_int()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_GET_PDEATHSIG) failed")
    return number.value


def naps() -> bool:
    """Whether readers of vLLM's queues wait as tests.support.vllm_plugin has it, when vLLM has loaded its plugins."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return SpinCondition.wait.__module__ == "light_waits"


def describe() -> dict[str, object]:
    """What a process has from the one that started it, and what it has got otherwise."""
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "group": os.getpgid(0),
        "directory": os.getcwd(),
        "arguments": sys.argv[1:],
        "variable": os.environ.get("GENSERVE_PROBE"),
        "imported": "vllm.v1.engine.core" in sys.modules,
        "naps": naps(),
        "threads": threading.active_count(),
        "cpus": sorted(os.sched_getaffinity(0)),
        "end_signal": end_signal(),
    }


def tell(connection: Connection) -> None:
    """The program of the process that it starts."""
    connection.send(describe())


if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=tell, args=(theirs,))
    child.start()
    told = ours.recv()
    child.join()
    print(json.dumps({"own": describe(), "child": told, "child_status": child.exitcode}), flush=True)
    print("on stderr", file=sys.stderr)
    sys.stdin.read()
    sys.exit(7)
