"""`interference`: what live streams feel of a push, before it pauses them: while its bytes arrive, and while the new
version is prepared.

The controls are one and two processes that do nothing but compute: where cores are few, a part of what streams feel is
merely a core that somebody takes, and a push has two at work, the trainer's and the daemon's. Undisturbed, controls and
push take turns in every round.
"""

import asyncio
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic

from bench.genserve_daemon import start_daemon
from bench.machine import turns
from bench.measurements.sizes import Sizes
from bench.options import Defaults, Options
from bench.processes import Program, say
from bench.results.result import Result
from bench.updates import trainer
from bench.updates.live_streams import LiveStreams, live_streams

PEERS = (
    "undisturbed",
    "cpu_hog",
    "cpu_hog_2",
    "receiving",
    "receiving_4_streams",
    "receiving_shared_memory",
    "preparing",
)
DEFAULTS = Defaults(PEERS, sizes="64,smollm2")
BASELINE = "undisturbed"
WATCH_S = 4.0


async def run(options: Options) -> Result:
    """Every size, one after the other."""
    sizes = Sizes("interference", options)
    await sizes.measure(_measure, models=6, further_bytes=3 << 30)
    by_size = sizes.medians()
    ratios = {
        size: {
            phase: {name: each[name] / phases[BASELINE][name] for name in phases[BASELINE] if name in each}
            for phase, each in phases.items()
        }
        for size, phases in by_size.items()
        if BASELINE in phases
    }
    return sizes.result(by_size, ratios, {"ratio_to": BASELINE}, streams=options.streams, seconds_watched=WATCH_S)


async def _measure(size: str, checkpoint: Path, directory: Path, options: Options) -> dict[str, list[dict[str, float]]]:
    rounds: dict[str, list[dict[str, float]]] = {phase: [] for phase in options.peers}
    async with AsyncExitStack() as stack:
        say("starting genserve")
        daemon = await start_daemon(checkpoint, directory, stack)
        pusher = await trainer.start("interference", daemon.address, directory)
        stack.callback(pusher.stop)
        await pusher.order(do="load", weights=str(checkpoint), others=[])
        for number, phase in turns(options.peers, options.rounds):
            # Streams of their own: the longer a stream, the longer its steps.
            async with live_streams(daemon.address, options.streams) as streams:
                figures = await _phase(phase, streams, pusher, checkpoint)
            shown = " ".join(f"{name} {value:.2f}" for name, value in figures.items())
            say(f"{size:>8} round {number}: {phase:20} {shown}")
            if number > 0:  # the first one warms up
                rounds[phase].append(figures)
    return rounds


async def _phase(phase: str, streams: LiveStreams, pusher: Program, checkpoint: Path) -> dict[str, float]:
    """Figures of the streams while that goes on."""
    if phase == "undisturbed":
        began_at = monotonic()
        await asyncio.sleep(WATCH_S)
        return streams.figures((began_at, monotonic()))
    if phase in ("cpu_hog", "cpu_hog_2"):
        hogs = [
            subprocess.Popen([sys.executable, "-c", "while True: pass"])
            for _ in range(2 if phase == "cpu_hog_2" else 1)
        ]
        try:
            began_at = monotonic()
            await asyncio.sleep(WATCH_S)
            return streams.figures((began_at, monotonic()))
        finally:
            for hog in hogs:
                hog.kill()
                hog.wait()
    if phase == "preparing":
        spans: list[tuple[float, float]] = []
        while sum(ended_at - began_at for began_at, ended_at in spans) < WATCH_S / 2:
            done = await pusher.order(do="commit", weights=str(checkpoint))
            # Up to the pause, which is told apart in `pause`.
            spans.append((done["began_at"], done["began_at"] + done["verify_s"] + done["prepare_s"]))
        return streams.figures(*spans)
    num_streams = 4 if phase == "receiving_4_streams" else 1
    done = await pusher.order(
        do="stage",
        weights=str(checkpoint),
        streams=num_streams,
        shared_memory=phase == "receiving_shared_memory",
        seconds=WATCH_S,
    )
    return {**streams.figures((done["began_at"], done["ended_at"])), "gb_per_s": done["gb_per_s"]}
