"""`memory`: host memory of the daemon and its workers before, during and after pushes, by the size of the model.

`shared` is what a push stages and what stays for partial pushes, pulls and the next push: the daemon's arenas, counted
by their descriptors, as most of their pages are in no process's map. `anonymous` is what all processes have for
themselves, of which the prepared version is a part: on the CPU, the device's memory is the host's. Pages of files (the
checkpoint, libraries) are the page cache's and are not counted, nor is what vLLM's processes share: it does not change.
"""

import asyncio
import contextlib
import os
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.genserve_daemon import start_daemon
from bench.measurements.sizes import Sizes
from bench.options import Defaults, Options
from bench.processes import say
from bench.results.result import Result
from bench.updates import trainer

PEERS = ("genserve",)
DEFAULTS = Defaults(PEERS, sizes="64,smollm2")
SAMPLE_S = 0.02
MARGIN_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes of one moment."""

    anonymous: int
    shared: int
    total: int


async def run(options: Options) -> Result:
    """Every size, one after the other."""
    sizes = Sizes("memory", options)
    await sizes.measure(_measure, models=6, further_bytes=3 << 30)
    figures = {size: _figures(each) for size, each in sizes.rounds.items()}
    ratios = {
        size: {
            "staging_of_limit": each["peak_staging"] / (2 * sizes.num_bytes[size] + MARGIN_BYTES),
            "prepared_of_model": each["peak_prepared"] / sizes.num_bytes[size],
            "growth_after_first_of_model": (each["after_last"] - each["after_first"]) / sizes.num_bytes[size],
        }
        for size, each in figures.items()
    }
    notes = {"staging_limit": "2x model bytes + 256 MiB"}
    return sizes.result(figures, ratios, notes, rounds=options.pushes)


async def _measure(size: str, checkpoint: Path, directory: Path, options: Options) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        say("starting genserve")
        daemon = await start_daemon(checkpoint, directory, stack)
        pusher = await trainer.start("memory", daemon.address, directory)
        stack.callback(pusher.stop)
        await pusher.order(do="load", weights=str(checkpoint), others=[])
        before = await asyncio.to_thread(sample, daemon.process.pid)
        peaks, after = [], []
        for number in range(options.pushes):
            pushing = asyncio.create_task(pusher.order(do="push", weights=str(checkpoint)))
            during = []
            while not pushing.done():
                during.append(await asyncio.to_thread(sample, daemon.process.pid))
                await asyncio.sleep(SAMPLE_S)
            await pushing
            during.append(await asyncio.to_thread(sample, daemon.process.pid))
            peaks.append(Sample(*(max(getattr(each, name) for each in during) for name in Sample.__slots__)))
            after.append(during[-1])
            if number % 10 == 0:
                say(f"{size:>8} push {number + 1}: peak {peaks[-1].total / 1e6:.0f} MB, {after[-1].total / 1e6:.0f} MB")
    return {
        "before": asdict(before),
        "peak_of_push": [asdict(each) for each in peaks],
        "after_push": [asdict(each) for each in after],
    }


def sample(pid: int) -> Sample:
    """The daemon and all it has started."""
    daemon = psutil.Process(pid)
    anonymous = 0
    for process in (daemon, *daemon.children(recursive=True)):
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            key, _, value = line.partition(":")
            if key == "Pss_Anon":
                anonymous += int(value.split()[0]) << 10
    shared = _arena_bytes(pid)
    return Sample(anonymous, shared, anonymous + shared)


def _arena_bytes(pid: int) -> int:
    """Memory behind the arenas that a daemon has open; each once, whatever descriptors it has."""
    found: dict[int, int] = {}
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if "genserve-arena" in os.readlink(descriptor):
                status = os.stat(descriptor)
                found[status.st_ino] = 512 * status.st_blocks
    return sum(found.values())


def _figures(measured: dict[str, Any]) -> dict[str, float]:
    before, peaks, after = measured["before"], measured["peak_of_push"], measured["after_push"]
    return {
        "before": before["total"],
        "peak": max(each["total"] for each in peaks),
        "peak_staging": max(each["shared"] for each in peaks) - before["shared"],
        "peak_prepared": max(each["anonymous"] for each in peaks) - before["anonymous"],
        "after_first": after[0]["total"],
        "after_last": after[-1]["total"],
    }
