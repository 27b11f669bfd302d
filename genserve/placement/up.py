"""The composition root of `genserve up`: a router, and its replicas as processes on this host.

Start: the router listens, then all daemons start at once, and each is added when it serves. Stop: the router drains,
then every daemon.
"""

import asyncio
import logging
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final

from genserve.config import MAX_TIMEOUT_S
from genserve.fleet.serve import RouteConfig, start_router
from genserve.fleet.settings import MAX_REPLICAS
from genserve.notices import say
from genserve.placement.backoff import Starts
from genserve.placement.replica import START_TIMEOUT_S, LocalReplica, keep
from genserve.placement.shares import process_shares
from genserve.signals import stop_on_signals

CLOSE_S: Final = 30.0
"""Time that a daemon has to end its engine, in addition to the drain timeout."""


@dataclass(frozen=True, slots=True)
class UpConfig:
    """`flags` are those of each daemon, without where it listens and how long it drains, which are ours. `gpus_each`:
    GPUs per replica, None = as many as the flags say. `start_timeout_s`: of each daemon, until it serves."""

    num_replicas: int
    flags: Sequence[str]
    gpus_each: int | None = None
    route: RouteConfig = field(default_factory=RouteConfig)
    start_timeout_s: float = START_TIMEOUT_S

    def __post_init__(self) -> None:
        if not 1 <= self.num_replicas <= MAX_REPLICAS:
            raise ValueError(f"--replicas must be in [1, {MAX_REPLICAS}], is {self.num_replicas}")
        check_start_timeout(self.start_timeout_s)

    @property
    def daemon_flags(self) -> list[str]:
        """The flags of a daemon that only the router is to reach."""
        ours = {"host": "127.0.0.1", "port": 0, "drain-timeout-s": self.route.drain_timeout_s}
        return [*(f"--{name}={value}" for name, value in ours.items()), *self.flags]


def check_start_timeout(timeout_s: float) -> None:
    """Raises ValueError."""
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ValueError(f"--start-timeout must be in (0, {MAX_TIMEOUT_S:g}] s, is {timeout_s:g}")


async def up(config: UpConfig) -> int:
    """Serves until a signal, or until no replica can be started. Returns the exit status. Raises ValueError before
    anything starts if this machine has not enough for all replicas."""
    logging.basicConfig(level=logging.INFO, format="genserve: %(message)s", stream=sys.stderr)
    shares = process_shares(config.flags, config.num_replicas, config.gpus_each)
    timeout_s = config.route.drain_timeout_s
    replicas: list[LocalReplica] = []
    stopped = asyncio.Event()

    def stop(signal_name: str) -> None:
        stopped.set()
        say(
            f"{signal_name}: draining the router, then the replicas, {timeout_s:g} s at most each; a second signal "
            "exits at once"
        )

    def kill_all() -> None:
        for each in replicas:
            each.kill()
        for each in replicas:
            each.wait_killed()

    async with AsyncExitStack() as stack:
        stack.callback(kill_all)  # whatever happens, none outlives this process
        stack.enter_context(stop_on_signals(stop, kill_all))
        async with AsyncExitStack() as routing:
            running = await start_router(config.route, routing)
            starts = Starts()
            for number, share in enumerate(shares):
                replicas.append(
                    LocalReplica(number, config.daemon_flags, share, running.router, starts, config.start_timeout_s)
                )
                if share.words:
                    say(f"replica {number} has {share.words}")
            print(f"genserve: routing to {len(replicas)} local replicas on {running.address}", flush=True)
            failure = await keep(replicas, stopped)
            if failure is not None:
                say(f"no replica can be started: {failure}")
            await running.drain(timeout_s)
        in_order = await asyncio.gather(*(each.stop(timeout_s + CLOSE_S) for each in replicas))
    if failure is not None:
        return 2 if failure.exit_status == 2 else 1
    return 0 if all(in_order) else 1
