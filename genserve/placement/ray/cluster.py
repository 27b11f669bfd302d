"""The connection to a Ray cluster, where every call has a deadline; what Ray reserves there for a fleet; and the
actors in it, each of which has a daemon on its node."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, Self, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from genserve.launcher.daemon_process import DaemonFailedError, DaemonProcess
from genserve.launcher.output import Serving
from genserve.placement.output import PrefixedOutput
from genserve.placement.ray.resources import Node, bundle, not_placed
from genserve.placement.ray.settings import AUTO, RayConfig, RayFleet, actor_name, namespace_of, replica_number
from genserve.placement.shares import ProcessShare, core_shares_here

_OMP: Final = "OMP_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a daemon has ended, as DaemonFailedError says it."""

    words: str
    exit_status: int | None = None
    was_killed: bool = False


class ReplicaActor:
    """Runs one daemon at a time, as a process, on the address of its node. The kernel ends the daemon with this
    process, however that ends, if Ray does not. Who starts the daemon again is the driver."""

    def __init__(self, number: int, env: Mapping[str, str]) -> None:
        """`env`: of the daemon, in addition to what the node has."""
        self._number = number
        # Ray sets it to the CPUs that it counts for the actor, so that its workers do not take the threads of others.
        os.environ.pop(_OMP, None)
        os.environ.update(env)
        self._process: DaemonProcess | None = None

    def __repr__(self) -> str:
        return f"replica {self._number}"

    async def start(self, flags: Sequence[str], index: int, num_here: int) -> None:
        """Starts the daemon. It is one of `num_here` replicas on this node, which share its cores if their engines run
        on the CPU. Raises OSError."""
        if self._process is not None and not self._process.ended.done():
            raise RuntimeError("the daemon of this replica runs already")
        has_gpus = bool(ray.get_gpu_ids())
        share = ProcessShare() if has_gpus else core_shares_here(flags, num_here)[index]
        # Ray starts its workers with the lowest priority but four. A daemon would stand still beside any other program.
        with suppress(PermissionError):  # only root may raise it
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        listening = [f"--host={ray.util.get_node_ip_address()}", "--port=0"]
        self._process = DaemonProcess(
            [*listening, *flags], PrefixedOutput(f"[{self._number}] "), share.env, cpus=share.cpus
        )

    async def serving(self) -> Serving | None:
        """Waits until it serves; None: it has ended before."""
        try:
            return await asyncio.wrap_future(self._daemon().serving)
        except DaemonFailedError:
            return None

    async def ended(self) -> Ending:
        """Waits until it and all that it has started have ended."""
        process = self._daemon()
        was_killed = await asyncio.wrap_future(process.ended)
        failure = process.failure()
        return Ending(str(failure), failure.exit_status, was_killed)

    async def address(self) -> str:
        """Where it serves; "" if it does not."""
        process = self._process
        if process is None or process.exit_status is not None or not process.serving.done():
            return ""
        return process.serving.result().address if process.serving.exception() is None else ""

    async def stop(self, timeout_s: float) -> None:
        """Lets it drain, and kills what is left after that time. Does not wait: `ended` does."""
        if self._process is not None:
            self._process.stop(timeout_s)

    def _daemon(self) -> DaemonProcess:
        if self._process is None:
            raise RuntimeError("no daemon was started")
        return self._process


P = ParamSpec("P")
T = TypeVar("T")
CALL_TIMEOUT_S: Final = 30.0
"""For a call that Ray answers at once if it answers."""
_CONNECT_TIMEOUT_S: Final = 30.0
"""Without a cluster at the address that was given, Ray would try for minutes."""

_END_TIMEOUT_S: Final = 10.0
"""For what is removed at the end: what Ray does not remove in time, it removes when this process has ended."""


class RayFailedError(Exception):
    """Ray cannot do what is needed; the text says why. `exit_status`: 2 if another start would not help."""

    def __init__(self, message: str, exit_status: int = 1) -> None:
        super().__init__(message)
        self.exit_status = exit_status


async def connect(config: RayConfig) -> None:
    """Connects this process, in the namespace of the fleet. Raises RayFailedError."""
    where = "found" if config.address == AUTO else f"at {config.address}"
    try:
        if config.address != AUTO:
            await within(_CONNECT_TIMEOUT_S, _require_listener, config.address)
        await within(
            _CONNECT_TIMEOUT_S,
            ray.init,
            address=config.address,
            namespace=namespace_of(config.name),
            log_to_driver=True,
            logging_level=logging.ERROR,
        )
    except Exception as error:  # of many types: no cluster, another version, no such host, a token that is wrong
        raise RayFailedError(
            f"no Ray cluster {where} that this host is a node of ({' '.join(str(error).split())}): start one with `ray "
            "start --head`, and let other hosts join it with `ray start --address HEAD:6379`"
        ) from error


def _require_listener(address: str) -> None:
    """Raises OSError, or ValueError, at once where Ray would try to connect for a long time."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()


async def within(timeout_s: float, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a call that blocks. Raises RayFailedError when it does not return in time; then it goes on in its
    thread."""
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.to_thread(function, *args, **kwargs)
    except TimeoutError:
        name = getattr(function, "__name__", "a call")
        raise RayFailedError(f"Ray does not answer within {timeout_s:g} s ({name})") from None


async def nodes() -> list[Node]:
    """The nodes that are alive."""
    return [Node.of(each) for each in await within(CALL_TIMEOUT_S, ray.nodes) if each["Alive"]]


async def free() -> Mapping[str, float]:
    """The resources that nothing uses, of all nodes together."""
    found: Mapping[str, float] = await within(CALL_TIMEOUT_S, ray.available_resources)
    return found


async def actor_names() -> list[str]:
    """The names of all actors of the fleet."""
    found: list[str] = await within(CALL_TIMEOUT_S, ray.util.list_named_actors)
    return found


async def disconnect() -> None:
    """Ends the job, with all that is left of it. A cluster that does not answer ends it when it sees this process
    gone."""
    with suppress(RayFailedError):
        await within(CALL_TIMEOUT_S, ray.shutdown)


class Placement:
    """A placement group with one bundle for each replica. A bundle lies on one node, so that a replica has all its GPUs
    there; the bundles are spread over the nodes, as far as these have room. Ray reserves all of them or none."""

    def __init__(self, group: PlacementGroup, fleet: RayFleet, env: dict[str, str]) -> None:
        self._group = group
        self._fleet = fleet
        self._env = env
        self._actors: dict[int, Any] = {}

    @classmethod
    async def reserve(cls, config: RayConfig, fleet: RayFleet, env: dict[str, str]) -> Self:
        """Waits until all is reserved. `env`: of the daemons. Raises RayFailedError, and leaves nothing then."""
        if any(replica_number(name) is not None for name in await actor_names()):
            raise RayFailedError(f"a fleet called {config.name} runs on this cluster: give --ray-name another name", 2)
        asked = bundle(fleet.cpus, fleet.gpus)
        group = await within(
            CALL_TIMEOUT_S, placement_group, [asked] * fleet.num_replicas, "SPREAD", namespace_of(config.name)
        )
        placement = cls(group, fleet, env)
        try:
            if not await within(config.timeout_s + CALL_TIMEOUT_S, group.wait, config.timeout_s):
                has = not_placed(fleet.num_replicas, asked, await nodes(), await free())
                raise RayFailedError(f"Ray has not placed the replicas within {config.timeout_s:g} s: {has}", 2)
        except BaseException:
            await placement.remove()
            raise
        return placement

    async def node_of(self) -> dict[int, str]:
        """The node of each replica, by its number; "" while a lost one has none."""
        table = await within(CALL_TIMEOUT_S, placement_group_table, self._group)
        return {int(index): node or "" for index, node in table["bundles_to_node_id"].items()}

    async def nodes(self) -> list[Node]:
        """That of each replica, in order."""
        by_id = {node.id: node for node in await nodes()}
        found = await self.node_of()
        return [by_id[found[number]] for number in sorted(found) if found[number] in by_id]

    async def actor(self, number: int) -> Any:
        """The actor of a replica, which Ray starts again wherever it can when it or its node is lost. Made anew after
        `forget`. Raises RayFailedError."""
        if number not in self._actors:
            self._actors[number] = await within(CALL_TIMEOUT_S, self._make, number)
        return self._actors[number]

    def forget(self, number: int) -> None:
        """Its actor is dead, and Ray does not start it again: somebody has killed it for good."""
        self._actors.pop(number, None)

    async def remove(self) -> None:
        """Removes all actors, and gives back what was reserved. Raises RayFailedError if Ray does not answer."""
        await within(_END_TIMEOUT_S, self._kill_all)
        await within(_END_TIMEOUT_S, remove_placement_group, self._group)

    def _kill_all(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor)

    def _make(self, number: int) -> Any:
        options = ray.remote(ReplicaActor).options(
            name=actor_name(number),
            num_cpus=self._fleet.cpus,
            num_gpus=self._fleet.gpus,
            max_restarts=-1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, number),
        )
        try:
            return options.remote(number, self._env)
        except (RayError, ValueError) as error:  # ValueError: the name of one that is dead is not free yet
            raise RayFailedError(f"Ray makes no actor: {error}") from error
