"""CPU time by process. Unlike a share of two cores, what a token costs each process says what many cores would do."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import psutil

ENGINE_ROLES = ("engine_core", "worker")
_ROLES = (
    ("VLLM::EngineCore", "engine_core"),
    ("VLLM::Worker", "worker"),
    ("vllm-rs", "front_end"),
    ("genserve::frontend", "front_end"),
    ("VLLM::APIServer", "api_server"),
    ("genserve.ingest", "ingest"),
)
"""What is in a command line, and which part of a server runs so."""


@dataclass(frozen=True, slots=True, order=True)
class Process:
    """`role`: `server` is the process that was started, `other` one of which no more is known."""

    role: str
    pid: int


def seconds(pid: int, *, recursive: bool = True) -> dict[Process, float]:
    """CPU time of a process and of each that it has started and that still runs; all threads of it summed."""
    root = psutil.Process(pid)
    found: dict[Process, float] = {}
    for each in (root, *(root.children(recursive=True) if recursive else ())):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            times = each.cpu_times()
            role = "server" if each.pid == pid else _role(" ".join(each.cmdline()))
            found[Process(role, each.pid)] = times.user + times.system
    return found


def _role(command: str) -> str:
    return next((role for part, role in _ROLES if part in command), "other")


def per_token(before: Mapping[Process, float], after: Mapping[Process, float], num_tokens: int) -> dict[str, float]:
    """Microseconds a token of each process: `server`, `front_end_1`, `front_end_2`, … Those that took nothing are left
    out, but for the server itself."""
    spent: dict[str, float] = {}
    count: dict[str, int] = {}
    for process, now_s in sorted(after.items()):
        taken_s = now_s - before.get(process, 0.0)
        number = count[process.role] = count.get(process.role, 0) + 1
        if process.role == "server":
            spent[process.role] = 1e6 * taken_s / num_tokens
        elif taken_s > 0:
            spent[f"{process.role}_{number}"] = 1e6 * taken_s / num_tokens
    return spent


def figures(client_us: float, by_process: Mapping[str, float]) -> dict[str, float]:
    """The client; all of the server but the engine, and the busiest process of that; the engine with its workers."""
    engine_us = sum(us for name, us in by_process.items() if name.rpartition("_")[0] in ENGINE_ROLES)
    serving = {name: us for name, us in by_process.items() if name.rpartition("_")[0] not in ENGINE_ROLES}
    return {
        "cpu_client_us": client_us,
        "cpu_server_us": sum(serving.values()),
        "cpu_busiest_us": max(serving.values()),
        "cpu_engine_us": engine_us,
    }


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each process, over the rounds; one that a round does not have took nothing in it."""
    names = sorted({name for each in rounds for name in each})
    return {name: median(each.get(name, 0.0) for each in rounds) for name in names}
