"""What a soak has found, what of it is wrong, and what the processes of a daemon hold, sampled every few seconds."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import psutil

from genserve.client import AsyncClient
from tests.support.footprint import arena_sizes, private_bytes, shared_files, tree

MAX_GROWTH_BYTES = 100 * 10**6
"""Of the private memory of all processes together, from the middle on."""
_TENTH = 10


@dataclass(frozen=True)
class Sample:
    """One moment, `at_s` after the beginning. By the name of each process: its resident and private bytes, open files
    and threads. Latencies are those of the requests that ended since the sample before, None if none has."""

    at_s: float
    rss_bytes: dict[str, int]
    private_bytes: dict[str, int]
    open_files: dict[str, int]
    threads: dict[str, int]
    shared_files: int
    arena_bytes: int
    weight_version: int
    running: int
    waiting: int
    num_requests: int
    p50_s: float | None
    p99_s: float | None


@dataclass
class Report:
    """`outcomes` counts how calls ended, `wrong` says what may not happen; both are bounded. `findings` are those of
    the oracle at the end."""

    settings: dict[str, Any]
    machine: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    push_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    findings: dict[str, str] = field(default_factory=dict)

    def is_wrong(self, what: str) -> None:
        """Notes something that may not happen; the first hundred are kept."""
        self.outcomes["wrong"] += 1
        if len(self.wrong) < 100:
            self.wrong.append(what)

    @property
    def growth_bytes(self) -> int:
        """Of the private memory of all processes, from the tenth of the time after the middle to the last tenth."""
        totals = [sum(sample.private_bytes.values()) for sample in self.samples]
        width = max(1, len(totals) // _TENTH)
        middle = len(totals) // 2
        return round(mean(totals[-width:]) - mean(totals[middle : middle + width]))

    @property
    def faults(self) -> list[str]:
        """What is wrong; nothing if the daemon has passed."""
        found = [*self.wrong, *(f"oracle: {name}: {finding}" for name, finding in self.findings.items())]
        if self.growth_bytes > MAX_GROWTH_BYTES:
            found.append(f"memory grew by {self.growth_bytes / 1e6:.0f} MB from the middle on")
        return found

    def summary(self) -> str:
        """For people."""
        latencies = [sample.p99_s for sample in self.samples if sample.p99_s is not None]
        lines = [
            f"{len(self.samples)} samples, {len(self.push_s)} pushes applied in {max(self.push_s, default=0):.2f} s at "
            f"most, requests' p99 at most {max(latencies, default=0):.2f} s",
            f"growth from the middle on: {self.growth_bytes / 1e6:.1f} MB",
            *(f"{name}: {count}" for name, count in sorted(self.outcomes.items())),
            *(f"WRONG: {fault}" for fault in self.faults),
        ]
        return "\n".join(lines if self.faults else [*lines, "the oracle holds"])

    def save(self, path: Path) -> None:
        """As JSON."""
        fields = {**vars(self), "growth_bytes": self.growth_bytes, "faults": self.faults}
        fields["samples"] = [asdict(sample) for sample in self.samples]
        path.write_text(json.dumps(fields, indent=1) + "\n")


class Latencies:
    """Of the requests that have ended since they were last looked at."""

    def __init__(self) -> None:
        self._ended_s: list[float] = []
        self.num_requests = 0

    def note(self, took_s: float) -> None:
        """A request has ended."""
        self._ended_s.append(took_s)
        self.num_requests += 1

    def take(self) -> tuple[float | None, float | None]:
        """The median and the 99th percentile, and begins anew."""
        ended_s, self._ended_s = sorted(self._ended_s), []
        if not ended_s:
            return None, None
        return ended_s[len(ended_s) // 2], ended_s[min(len(ended_s) - 1, int(0.99 * len(ended_s)))]


async def sample_forever(
    client: AsyncClient, daemon_pid: int, latencies: Latencies, every_s: float, take: Callable[[Sample], None]
) -> None:
    """Samples until it is cancelled. Only the daemon's own processes are looked at."""
    began_s = time.monotonic()
    while True:
        await asyncio.sleep(every_s)
        status = await client.status(timeout_s=60)
        p50_s, p99_s = latencies.take()
        processes = await asyncio.to_thread(_processes, daemon_pid)
        take(
            Sample(
                at_s=round(time.monotonic() - began_s, 2),
                weight_version=status.state.weight_version,
                running=status.load.running,
                waiting=status.load.waiting,
                num_requests=latencies.num_requests,
                p50_s=p50_s,
                p99_s=p99_s,
                **processes,
            )
        )


def _processes(daemon_pid: int) -> dict[str, Any]:
    processes = tree(daemon_pid)
    named: dict[str, psutil.Process] = {}
    for number, process in enumerate(processes):
        named["daemon" if number == 0 else f"{process.name()} {number}"] = process
    return {
        "rss_bytes": {name: int(process.memory_info().rss) for name, process in named.items()},
        "private_bytes": {name: private_bytes(process) for name, process in named.items()},
        "open_files": {name: process.num_fds() for name, process in named.items()},
        "threads": {name: process.num_threads() for name, process in named.items()},
        "shared_files": len(shared_files(processes)),
        "arena_bytes": sum(size for process in processes for size in arena_sizes(process.pid)),
    }
