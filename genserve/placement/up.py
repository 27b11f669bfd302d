"""The composition root of `genserve up`: a router, and its replicas as processes on this host.

Start: the router listens, then all daemons start at once, and each is added when it serves. Stop: the router drains,
then every daemon.
"""

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import Final

from genserve.aio import cancel_all
from genserve.fleet.config import RouteConfig
from genserve.fleet.serve import RunningRouter, start_router
from genserve.observe.last_line import ErasingHandler
from genserve.observe.notices import say
from genserve.placement.config import UpConfig, flags_of_replica
from genserve.placement.replica import LocalReplica, keep, show_starts
from genserve.placement.shares import process_shares
from genserve.process.signals import Stopped, stop_on_signals
from genserve.security.access_list import listed_environment
from genserve.settings.flags import as_flags
from genserve.settings.listen_config import ListenConfig

_OF_THE_ROUTER: Final = ("host", "port", "uds", "metrics_port", "max_message_bytes")


async def up(config: UpConfig) -> int:
    """Serves until a signal, or until no replica can be started. Returns the exit status. Raises ValueError before
    anything starts if this machine has not enough for all replicas."""
    logging.basicConfig(level=logging.INFO, format="genserve: %(message)s", handlers=[ErasingHandler()])
    shares, flags = process_shares(config.flags, config.num_replicas, config.gpus_each), daemon_flags(config)
    replicas: list[LocalReplica] = []
    stopped = Stopped()

    def kill_all() -> None:
        for each in replicas:
            each.kill()
        for each in replicas:
            each.wait_killed()

    async with AsyncExitStack() as stack:
        stack.callback(kill_all)  # whatever happens, none outlives this process
        stack.enter_context(stop_on_signals(stopped.signal, kill_all))
        async with AsyncExitStack() as routing:
            running = await start_router(config.route, routing, stopped, environment=listed_environment())
            any_served = asyncio.Event()
            for number, share in enumerate(shares):
                own = flags_of_replica(flags, number)
                replicas.append(LocalReplica(number, own, share, running.router, any_served, config.start_timeout_s))
                if share.words:
                    say(f"replica {number} has {share.words}")
            where = f"{len(replicas)} local replica{'s' if len(replicas) != 1 else ''}"
            print(f"genserve: routing to {where} on {running.address}", flush=True)
            showing = asyncio.create_task(show_starts(replicas), name="showing the starts")
            try:
                failure = await keep(replicas, stopped)
            finally:
                await cancel_all([showing])
            await drain_router(running, stopped, config)
        in_order = await asyncio.gather(*(each.stop(config.stop_timeout_s) for each in replicas))
    if failure is not None:
        return 2 if failure.exit_status == 2 else 1
    return 0 if all(in_order) else 1


async def drain_router(running: RunningRouter, stopped: Stopped, config: UpConfig) -> None:
    """Drains the router. Says so, if a signal or a call has stopped `up`, and not a failure."""
    if stopped.is_set():
        limit_s = stopped.limit_s(config.route.drain_timeout_s)
        say(
            f"{stopped.cause}: draining the router, {limit_s:g} s at most, then the replicas; a second signal exits "
            "at once"
        )
    await running.drain(stopped, config.route.drain_timeout_s)


def daemon_flags(config: UpConfig) -> list[str]:
    """The flags of a daemon that only the router is to reach. The router's callers may call it, too."""
    ours = {"host": "127.0.0.1", "port": 0}
    if config.route.metrics_port != -1:
        ours["metrics-port"] = 0
    listening = [f"--{name}={value}" for name, value in ours.items()]
    return [*listening, *time_flags(config.route), *access_flags(config.route), *config.flags]


def time_flags(route: RouteConfig) -> list[str]:
    """The flags of a daemon that the router has, too."""
    return [f"--drain-timeout={route.drain_timeout_s}", f"--write-timeout={route.write_timeout_s}"]


def access_flags(route: RouteConfig) -> list[str]:
    """The flags that say who may call, for a daemon of this router. Raises ValueError if the router could not."""
    if route.lists_callers and not route.peer_token_file and not route.ssl_ca_certs:
        raise ValueError("--auth-file is for the replicas, too: pass --peer-token-file, for the router to call them")
    return as_flags(route, ListenConfig, without=_OF_THE_ROUTER)
