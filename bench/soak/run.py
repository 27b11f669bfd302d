"""One soak: a daemon, what is done to it, and what is found; and its curves as a PNG file."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench import machine
from bench.soak.faults import Faults
from bench.soak.report import Latencies, Report, sample_forever
from bench.soak.traffic import Pushes, Streams
from tests.support import models
from tests.support.fault_proxy import FaultProxy
from tests.support.interference import Cases, interferences
from tests.support.oracle import OracleError
from tests.support.subject import Subject, started


def draw(report: Report, path: Path) -> None:
    """Memory, open files and threads, latencies, versions and requests over time."""
    import matplotlib

    matplotlib.use("Agg")  # there may be no screen
    from matplotlib import pyplot

    samples = report.samples
    minutes = [sample.at_s / 60 for sample in samples]
    figure, axes = pyplot.subplots(2, 3, figsize=(16.0, 8.0))
    names = list(dict.fromkeys(name for sample in samples for name in sample.private_bytes))
    for axis, title, unit, attribute in (
        (axes[0][0], "private memory, MB", 1e6, "private_bytes"),
        (axes[0][1], "open files", 1, "open_files"),
        (axes[0][2], "threads", 1, "threads"),
    ):
        axis.set_title(title)
        for name in names:
            axis.plot(minutes, [_of(getattr(sample, attribute), name, unit) for sample in samples], label=name)
        axis.legend(fontsize=7)
    axes[1][0].set_title("time of a request, s")
    for label, attribute in (("p50", "p50_s"), ("p99", "p99_s")):
        values: list[Any] = [getattr(sample, attribute) for sample in samples]
        axes[1][0].plot(minutes, [float("nan") if value is None else value for value in values], label=label)
    axes[1][0].legend(fontsize=7)
    axes[1][1].set_title("served version")
    axes[1][1].step(minutes, [sample.weight_version for sample in samples], where="post")
    axes[1][2].set_title("sequences")
    for attribute in ("running", "waiting"):
        axes[1][2].plot(minutes, [getattr(sample, attribute) for sample in samples], label=attribute)
    axes[1][2].legend(fontsize=7)
    for axis in axes.flat:
        axis.set_xlabel("minutes")
        axis.set_ylim(bottom=0)
        axis.grid(visible=True, alpha=0.25)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _of(by_name: Mapping[str, int], name: str, unit: float) -> float:
    return by_name[name] / unit if name in by_name else float("nan")


WRITE_TIMEOUT_S = 5.0
NUM_SAMPLES = 720
"""In an hour one every five seconds; never more than one a second."""
_MAX_TIMES = 4
_NUM_INTERFERENCE_CASES = 40
REST_S = 60.0
"""What may still run when everybody has gone: requests of slow readers, pushes whose trainer was killed."""


@dataclass(frozen=True)
class Load:
    """How long, and how much."""

    seconds: float = 3600.0
    num_streams: int = 256
    push_every_s: float = 30.0
    seed: int = 1


async def soak(load: Load, directory: Path, has_seen: Callable[[Report], bool] = lambda _: True) -> Report:
    """Starts a daemon, loads it for so long, and looks at it with the oracle of the fault tests. Goes on for a while,
    four times as long at most, until it has seen what was wanted."""
    report = Report(asdict(load), machine.facts())
    a = models.tiny_qwen3(directory / "a", seed=0)
    checkpoints = {"a": a, "b": models.perturbed(a, directory / "b", seed=1, scale=0.5)}
    flags = ("--write-timeout", str(WRITE_TIMEOUT_S), "--max-num-seqs", str(load.num_streams), "--dtype", "float32")
    async with started(checkpoints, directory / "subject", *flags) as subject:
        async with _loaded(subject, load, report) as working:
            for _ in range(_MAX_TIMES):
                await asyncio.wait(working, timeout=load.seconds, return_when=asyncio.FIRST_COMPLETED)
                if has_seen(report) or any(task.done() for task in working):
                    break
            for task in working:
                if task.done():
                    report.is_wrong(f"{task.get_name()} ended: {task.exception()!r}")
        try:
            await _at_rest(subject)
            # What vLLM's workers keep for large batches is no leak: growth is judged by the samples alone.
            oracle = subject.oracle
            if oracle.baseline is not None:
                kept_bytes = sum(report.samples[-1].private_bytes.values())
                oracle.baseline = replace(oracle.baseline, private_bytes=kept_bytes)
            served = await subject.oracle.served_version()
            name = subject.oracle.committed.get(served, "a")
            await subject.oracle.holds((served, name))
            if found := await interferences(subject.client, Cases(load.seed), _NUM_INTERFERENCE_CASES):
                report.is_wrong(f"answers depend on other requests: {found[:3]}")
        except (OracleError, TimeoutError) as error:
            findings = error.findings if isinstance(error, OracleError) else {"rest": "requests still run"}
            report.findings.update(findings)
    return report


@asynccontextmanager
async def _loaded(subject: Subject, load: Load, report: Report) -> AsyncIterator[set["asyncio.Task[None]"]]:
    latencies, rng = Latencies(), random.Random(load.seed)
    address = subject.process.address
    async with AsyncExitStack() as stack:
        link = await stack.enter_async_context(FaultProxy(address))
        streams = Streams(address, link.address, subject.oracle.committed, report, latencies, rng)
        pushes = Pushes(address, link.address, subject.oracle, report, rng)
        faults = Faults(subject, link, pushes, report, rng, every_s=min(20.0, load.seconds / 10))
        every_s = max(1.0, load.seconds / NUM_SAMPLES)
        works = {
            "samples": sample_forever(subject.client, subject.pid, latencies, every_s, report.samples.append),
            "streams": streams.run(load.num_streams),
            "pushes": pushes.run(min(load.push_every_s, load.seconds / 5)),
            "faults": faults.run(),
        }
        working = {asyncio.create_task(work, name=name) for name, work in works.items()}
        try:
            yield working
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)


async def _at_rest(subject: Subject) -> None:
    """Nothing runs, waits or is paused any more."""
    async with asyncio.timeout(REST_S):
        while True:
            status = await subject.client.status()
            if status.state.phase == "running" and not status.load.running and not status.load.waiting:
                return
            await asyncio.sleep(0.1)
