"""`push`: how fast weights arrive, by the size of the model, from nothing but a memcpy up to the whole update.

The first peers move bytes into another process (memcpy: within one; grpc_bytes: to nowhere). `update_*` go on until the
new version is served, with no stream running; `pause` tells what streams feel of it.
"""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench import engines, machine
from bench.genserve_daemon import start_daemon
from bench.machine import turns
from bench.measurements.sizes import Sizes
from bench.movers import Mover
from bench.movers.genserve_push import GenservePush, GenserveUpdate
from bench.movers.grpc_bytes import GrpcBytes
from bench.movers.memcpy import Memcpy
from bench.movers.naive_stub import NaiveStub
from bench.movers.raw_tcp import RawTcp
from bench.options import Defaults, Options
from bench.processes import PeerError, say
from bench.results.result import Result
from bench.updates import naive_update
from genserve.client import AsyncClient
from tests.support import models

PEERS = (
    "memcpy",
    "raw_tcp",
    "grpc_bytes",
    "naive_stub",
    "genserve",
    "genserve_2_streams",
    "genserve_4_streams",
    "genserve_shared_memory",
    "update_genserve",
    "update_tmpfs",
    "update_collective_rpc",
)
DEFAULTS = Defaults(PEERS, sizes="16,64,smollm2,1000")
BASELINE = "raw_tcp"
MODELS_IN_MEMORY = 11
"""Copies of the model at the worst moment: in the harness the source, memcpy's buffer and the tensors; two buffers of
receivers; in the daemon the live, resident, arriving and prepared ones; in the plain engine the live one and what
arrives."""


async def run(options: Options) -> Result:
    """Every size, one after the other."""
    sizes = Sizes("push", options)
    await sizes.measure(_measure, models=MODELS_IN_MEMORY, further_bytes=4 << 30)
    by_size = sizes.medians()
    ratios = {
        size: {peer: each["gb_per_s"] / by_peer[BASELINE]["gb_per_s"] for peer, each in by_peer.items()}
        for size, by_peer in by_size.items()
        if BASELINE in by_peer
    }
    client = "uvloop; in one process for every peer"
    return sizes.result(by_size, ratios, {"ratio_to": BASELINE}, client=client)


async def _measure(size: str, checkpoint: Path, directory: Path, options: Options) -> dict[str, list[dict[str, float]]]:
    async with AsyncExitStack() as stack:
        engine_pids: list[int] = []
        movers = await _movers(checkpoint, directory, options.peers, stack, engine_pids)
        rounds: dict[str, list[dict[str, float]]] = {peer: [] for peer in movers}
        num_bytes = engines.model_bytes(checkpoint)
        for number, peer in turns(movers, options.rounds):
            await machine.rest("an engine", *engine_pids)
            seconds = await movers[peer].move()
            figures = {"seconds": seconds, "gb_per_s": num_bytes / 1e9 / seconds}
            say(f"{size:>8} round {number}: {peer:24} {figures['gb_per_s']:7.2f} GB/s")
            if number > 0:  # the first one warms up
                rounds[peer].append(figures)
        return rounds


async def _movers(
    checkpoint: Path, directory: Path, peers: list[str], stack: AsyncExitStack, engine_pids: list[int]
) -> dict[str, Mover]:
    """Those that are asked for, started; `stack` ends them. Adds the engines' processes to `engine_pids`."""
    source = np.random.default_rng(0).integers(0, 256, engines.model_bytes(checkpoint), dtype=np.uint8)
    tensors: Any = models.load_tensors(checkpoint)
    client: AsyncClient | None = None
    if any("genserve" in peer for peer in peers):
        say("starting genserve")
        daemon = await start_daemon(checkpoint, directory, stack)
        engine_pids.append(daemon.process.pid)
        client = await stack.enter_async_context(AsyncClient(daemon.address))
    plain = None
    if "update_tmpfs" in peers or "update_collective_rpc" in peers:
        say("starting a plain engine")
        plain = await naive_update.start(checkpoint, directory)
        stack.callback(plain.stop)
        engine_pids.append(plain.pid)
    movers: dict[str, Mover] = {}
    for peer in peers:
        match peer.split("_"):
            case ["memcpy"]:
                movers[peer] = Memcpy(source)
            case ["raw", "tcp"]:
                movers[peer] = await RawTcp.start(source, directory)
            case ["grpc", "bytes"]:
                movers[peer] = await GrpcBytes.start(source.nbytes, directory)
            case ["naive", "stub"]:
                movers[peer] = await NaiveStub.start(source, directory)
            case ["genserve", *rest] if client is not None:
                num_streams = int(rest[0]) if rest and rest[0].isdigit() else 1
                movers[peer] = GenservePush(client, tensors, num_streams, shared_memory=rest[:1] == ["shared"])
            case ["update", "genserve"] if client is not None:
                movers[peer] = GenserveUpdate(client, tensors)
            case ["update", *way] if plain is not None:
                movers[peer] = naive_update.NaiveUpdate(plain, "_".join(way), checkpoint)
            case _:
                raise PeerError(peer, "there is no such way")
        stack.push_async_callback(movers[peer].stop)
    return movers
