"""What the processes of a daemon hold, every few seconds."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import psutil

from bench.soak.report import Sample
from genserve.client import AsyncClient
from tests.support.footprint import arena_sizes, private_bytes, shared_files, tree


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
