"""A router before daemons whose engines do as they are told: real sockets, and links that break."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc.aio

from genserve.engine.generation import (
    Finish,
    FinishReason,
    GenerationUpdate,
    LogprobColumns,
    PromptInfo,
    SequenceDelta,
    Usage,
    WeightSpan,
)
from genserve.fleet.config import FleetSettings, RouteConfig
from genserve.fleet.fleet import Fleet
from genserve.fleet.member import Member
from genserve.fleet.services.generation import FleetGeneration, add_generation
from genserve.fleet.upstream import Upstream
from genserve.fleet.watch import Watch
from genserve.routing.names import make_chain, parse_policies
from genserve.routing.replica import Request
from genserve.rpc.listener import add_port, make_server
from genserve.rpc.services import ServiceTable
from genserve.rpc.streams.write_deadline import WriteDeadline
from genserve.security.caller import Caller
from genserve.settings.config import ServeConfig
from genserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.support.breakable_link import BreakableLink
from tests.support.patience import until
from tests.support.scripted_daemon import FIXED_WINDOWS, MAX_MESSAGE_BYTES, Daemon, ScriptedStream, serving

if TYPE_CHECKING:
    from genserve.v1.generation_pb2_grpc import GenerationServiceAsyncStub

SETTINGS = FleetSettings(
    heartbeat_s=60.0, report_interval_s=0.1, silence_s=120.0, connect_timeout_s=30.0, wait_ready_s=60.0
)
"""Replicas report what changes, and nothing else while a test lasts: a scripted engine's load leaves out the requests
that run, so a report between two requests would change where the second one goes."""


async def running(
    daemons: Sequence[Daemon], request_id: str, besides: ScriptedStream | None = None
) -> tuple[int, ScriptedStream]:
    """Which of the daemons runs a request, and its engine's side of it, once the server waits for its next update.
    `besides`: not this one of it."""
    found: list[tuple[int, ScriptedStream]] = []

    def looks() -> bool:
        found[:] = [
            (number, stream)
            for number, daemon in enumerate(daemons)
            for stream in daemon.engine.streams
            if stream.request_id == request_id and stream is not besides and not stream.is_finished
        ]
        return bool(found)

    await until(looks)
    await found[0][1].waiting.wait()
    return found[0]


@dataclass
class ScriptedFleet:
    """`daemons` and the `links` that the router reaches them by; `address` is the router's."""

    daemons: list[Daemon]
    links: list[BreakableLink]
    fleet: Fleet
    service: FleetGeneration
    channel: grpc.aio.Channel
    address: str

    @property
    def generation(self) -> "GenerationServiceAsyncStub":
        return GenerationServiceStub(self.channel)

    async def running(self, request_id: str, besides: ScriptedStream | None = None) -> tuple[int, ScriptedStream]:
        """Where a request runs, and the engine's side of it. `besides`: not this one of it."""
        return await running(self.daemons, request_id, besides)

    @property
    def num_submitted(self) -> list[int]:
        """Requests that each engine was given."""
        return [len(daemon.engine.requests) for daemon in self.daemons]

    @property
    def inflight(self) -> list[int]:
        """Sequences that the router has sent to each replica, and that have not ended."""
        return [self.fleet.upstreams[link.address].member.inflight for link in self.links]

    @contextmanager
    def busy(self, number: int) -> Iterator[None]:
        """Other clients have requests on this replica: a policy that counts them prefers the others. These are more
        than a scripted engine reports, so its next report changes nothing."""
        upstream = self.fleet.upstreams[self.links[number].address]
        with self.fleet.carrying(Request(num_sequences=99), upstream):
            yield

    async def alone(self, number: int) -> None:
        """Returns when this replica alone is ready; the others are killed."""
        for index, link in enumerate(self.links):
            if index != number:
                link.kill()
        await until(lambda: [each.address for each in self.fleet.ready] == [self.links[number].address])


@asynccontextmanager
async def scripted_fleet(
    count: int = 3,
    settings: FleetSettings = SETTINGS,
    policies: str = "requests",
    versions: tuple[int, ...] = (),
    write_timeout_s: float = 0.0,
    **limits: int,
) -> AsyncIterator[ScriptedFleet]:
    """`versions`: what the replicas serve, if not 0. They count as ready whatever it is, as during a commit. `limits`:
    of the replicas, as in ServeConfig."""
    async with AsyncExitStack() as stack:
        config = ServeConfig(port=0, **{"max_message_bytes": MAX_MESSAGE_BYTES, **limits})
        daemons = [
            await stack.enter_async_context(serving(config, instance_id=f"instance-{number}"))
            for number in range(count)
        ]
        for daemon, version in zip(daemons, versions, strict=False):
            daemon.engine.weight_version = version
        links = [await stack.enter_async_context(BreakableLink(daemon.address)) for daemon in daemons]
        chain = make_chain(parse_policies(policies), random.Random(0), time.monotonic)
        fleet = Fleet(settings, chain)
        upstreams = [Upstream(Member(link.address), Caller()) for link in links]
        for upstream in upstreams:
            stack.push_async_callback(upstream.close)
            fleet.add(upstream)
        watches = [asyncio.create_task(Watch(fleet, upstream).run()) for upstream in upstreams]
        service = FleetGeneration(fleet, WriteDeadline(write_timeout_s))
        table = ServiceTable()
        add_generation(table.as_server, service)
        server = make_server(RouteConfig(), table)
        address = f"127.0.0.1:{add_port(server, '127.0.0.1:0')}"
        await server.start()
        stack.push_async_callback(server.stop, 0)
        channel = await stack.enter_async_context(
            grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1), FIXED_WINDOWS])
        )
        try:
            await until(lambda: all(member.version is not None for member in fleet.members))
            fleet.settle()
            await until(lambda: len(fleet.ready) == count)
            yield ScriptedFleet(daemons, links, fleet, service, channel, address)
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.wait(watches)


def tokens(
    ids: list[int],
    start: int = 0,
    version: int = 0,
    *,
    prompt: int | None = None,
    finish: FinishReason | None = None,
    index: int = 0,
    num_prompt_tokens: int = 2,
    with_logprobs: bool = False,
    lora_version: int = 0,
) -> GenerationUpdate:
    """New tokens of a sequence from `start` on, all under the same versions. `prompt`: the number of the prompt's
    tokens, on the first message. `finish`: on the last one."""
    end = start + len(ids)
    spans = [WeightSpan(version, start, end, lora_version)] if ids else []
    logprobs = LogprobColumns([-float(i) for i in ids], [1] * len(ids), 0, [], []) if with_logprobs else None
    whole = [WeightSpan(version, 0, end, lora_version)] if end else []
    total = sum(-float(i) for i in ids) if with_logprobs else None
    last = None if finish is None else Finish(finish, None, end, whole, total)
    return GenerationUpdate(
        None if prompt is None else PromptInfo(prompt, 1, None, None),
        [SequenceDelta(index, ids, "", logprobs, spans, last)],
        None if finish is None else Usage(num_prompt_tokens, 1, end),
    )
