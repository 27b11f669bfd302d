"""`pause`: how long generation stands still for new weights, and what streams feel, by the size of the model.

Each update happens while streams generate in the engine that is updated, and the others are idle; the ways take turns.
`memcpy` is what moving the bytes alone would take.
"""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench import engines, machine
from bench.genserve_daemon import start_daemon
from bench.machine import turns
from bench.measurements.sizes import Sizes
from bench.movers.memcpy import Memcpy
from bench.options import Defaults, Options
from bench.processes import Program, say
from bench.results.result import Result
from bench.updates import naive_update, trainer
from bench.updates.live_streams import live_streams
from tests.support import models
from tests.support.daemon_process import DaemonProcess

PEERS = ("memcpy", "genserve", "genserve_hint", "genserve_inplace", "tmpfs", "collective_rpc")
DEFAULTS = Defaults(PEERS, sizes="16,64,smollm2,1000")
BASELINE = "memcpy"
MODELS_IN_MEMORY = 14
"""Copies of the model: of each of two daemons the live, resident, arriving and prepared one and its trainer's; in the
plain engine the live one and what arrives, and in shared memory what is saved; memcpy's two."""
Update = Callable[[Path], Awaitable[dict[str, float]]]


async def run(options: Options) -> Result:
    """Every size, one after the other."""
    sizes = Sizes("pause", options)
    await sizes.measure(_measure, models=MODELS_IN_MEMORY, further_bytes=6 << 30)
    by_size = sizes.medians()
    ratios = {
        size: {peer: each["paused_s"] / by_peer[BASELINE]["paused_s"] for peer, each in by_peer.items()}
        for size, by_peer in by_size.items()
        if BASELINE in by_peer
    }
    return sizes.result(by_size, ratios, {"ratio_to": BASELINE}, streams=options.streams)


async def _measure(size: str, checkpoint: Path, directory: Path, options: Options) -> dict[str, list[dict[str, float]]]:
    other = models.perturbed(checkpoint, directory / "other", seed=1, scale=0.01)
    async with AsyncExitStack() as stack:
        engine_pids: list[int] = []
        updates = await _updates(checkpoint, directory, options, stack, engine_pids)
        rounds: dict[str, list[dict[str, float]]] = {peer: [] for peer in updates}
        for number, peer in turns(updates, options.rounds):
            weights = (other, checkpoint)[number % 2]
            await machine.rest("an engine", *engine_pids)
            figures = await updates[peer](weights)
            shown = " ".join(f"{name} {value:.4f}" for name, value in figures.items())
            say(f"{size:>8} round {number}: {peer:17} {shown}")
            if number > 0:  # the first one warms up
                rounds[peer].append(figures)
        return rounds


async def _updates(
    checkpoint: Path, directory: Path, options: Options, stack: AsyncExitStack, engine_pids: list[int]
) -> dict[str, Update]:
    """The ways that are asked for, started."""
    updates: dict[str, Update] = {}
    plain: Program | None = None
    daemons: dict[str, tuple[DaemonProcess, Program]] = {}
    for peer in options.peers:
        say(f"starting {peer}")
        if peer == "memcpy":
            copier = Memcpy(np.random.default_rng(0).integers(0, 256, engines.model_bytes(checkpoint), dtype=np.uint8))
            updates[peer] = partial(_copy, copier)
        elif peer.startswith("genserve"):
            how = "inplace" if peer == "genserve_inplace" else "beside"
            if how not in daemons:
                daemon = await start_daemon(checkpoint, directory, stack, weight_update=how)
                pusher = await trainer.start(peer, daemon.address, directory)
                stack.callback(pusher.stop)
                engine_pids.append(daemon.process.pid)
                daemons[how] = daemon, pusher
            prepare_mode = "paused" if peer == "genserve_hint" else None
            updates[peer] = partial(_push, *daemons[how], options.streams, prepare_mode)
        else:
            if plain is None:
                plain = await naive_update.start(checkpoint, directory)
                stack.callback(plain.stop)
                engine_pids.append(plain.pid)
            updates[peer] = partial(_update, plain, peer, options.streams)
    return updates


async def _copy(copier: Memcpy, weights: Path) -> dict[str, float]:
    elapsed_s = await copier.move()
    return {"total_s": elapsed_s, "paused_s": elapsed_s}


async def _push(
    daemon: DaemonProcess, pusher: Program, num_streams: int, prepare_mode: str | None, weights: Path
) -> dict[str, float]:
    await pusher.order(do="load", weights=str(weights), others=[])
    async with live_streams(daemon.address, num_streams) as streams:
        pushed: dict[str, float] = await pusher.order(do="push", weights=str(weights), prepare_mode=prepare_mode)
        began_at = pushed.pop("began_at")
        # What follows the update counts: keys and values are computed anew before a stream goes on.
        felt = await streams.after(began_at + pushed["total_s"], since=began_at)
    return {**pushed, "longest_wait_s": felt}


async def _update(plain: Program, way: str, num_streams: int, weights: Path) -> dict[str, Any]:
    measured: dict[str, float] = await plain.order(do="update", way=way, weights=str(weights), streams=num_streams)
    return measured
