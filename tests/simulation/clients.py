"""Those who use a fleet: a trainer, an operator, and who asks for tokens. Each is a program on a host of its own."""

import asyncio
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc.aio

from genserve.errors import GenserveError, NoReplicaError, UnavailableError
from genserve.fleet.leases import new_lease_id
from genserve.forward.upstream import may_have_done
from genserve.transport.errors import error_of
from genserve.v1 import control_pb2, generation_pb2, weights_pb2
from genserve.v1.control_pb2_grpc import ControlServiceStub
from genserve.v1.generation_pb2_grpc import GenerationServiceStub
from genserve.v1.weights_pb2_grpc import WeightServiceStub
from genserve.wire.conversions import duration_of
from tests.simulation.channel import MemoryChannel
from tests.simulation.engine import CONTENT_BYTES, bytes_of
from tests.simulation.events import ASLEEP, Events, Lease, Push, Request
from tests.simulation.network import Network

_SLACK_S = 1.0
PUSH_S, ASK_S, REQUEST_S = 60.0, 20.0, 30.0


class Client:
    """Calls a fleet, or one replica. `router`: gives the address to call."""

    def __init__(self, network: Network, events: Events, router: Callable[[], str]) -> None:
        self.network, self.events, self.router = network, events, router
        self.drawn: random.Random = network.drawn
        self._channels: dict[str, MemoryChannel] = {}

    def channel(self, address: str = "") -> MemoryChannel:
        """To this address."""
        address = address or self.router()
        return self._channels.setdefault(address, MemoryChannel(self.network, address))

    async def ask(self, name: str, call: Callable[..., Awaitable[Any]], request: Any, timeout_s: float) -> Any:
        """The answer of a call. Raises GenserveError, and notes if it came too late."""
        asked_s = self.events.now_s
        try:
            answer = await call(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            known = error_of(error, "the fleet")
            self.events.note(name, "failed", known.reason, known.message)
            raise known from None
        finally:
            if self.events.now_s > asked_s + timeout_s + _SLACK_S:
                self.events.violation(f"{name} ended {self.events.now_s - asked_s:.1f} s after it was asked")
        self.events.note(name, "done")
        return answer


class Trainer(Client):
    """Pushes one version after the other. `content`: of the last one."""

    content = 0
    version = 0

    async def run(self) -> None:
        """Pushes until it is cancelled."""
        while True:
            await asyncio.sleep(self.drawn.expovariate(1 / 3.0))
            kind = self.drawn.random()
            if kind < 0.25:
                await self.push(max(1, self.version - self.drawn.randrange(1, 4)), force=True)
            elif kind < 0.3:
                number = self.drawn.choice((self.version, self.version + 1, self.version + 5))
                await self.push(max(1, number), force=True, alone_at=self.drawn.choice(self.replicas))
            else:
                await self.push(self.version + 1)

    replicas: list[str]

    async def push(self, version: int, *, force: bool = False, alone_at: str = "", num_tries: int = 4) -> bool:
        """Pushes under one id until the answer is known, or it gives up. Whether it was told that it is applied."""
        Trainer_content = self.content = self.content + 1
        push = Push(Trainer_content, version, f"push-{Trainer_content}", force, self.events.now_s, alone_at)
        self.events.pushes.append(push)
        if not alone_at:
            self.version = max(version, self.version if not force else 0)
        try:
            for _ in range(num_tries):
                try:
                    stub = WeightServiceStub(self.channel(alone_at))
                    name = f"push {push.content} as {version}{' by force' if force else ''} to {alone_at or 'all'}"
                    answer = await self.ask(name, stub.PushWeights, self._frames(push), PUSH_S)
                except GenserveError as error:
                    if not may_have_done(error) and error.reason not in ("APPLY_IN_PROGRESS", "PUSH_TRUNCATED"):
                        push.is_refused = not push.is_unknown
                        return False
                    push.is_unknown |= not isinstance(error, NoReplicaError)
                    await asyncio.sleep(self.drawn.random() * 2)
                    continue
                if answer.push.state == weights_pb2.PUSH_STATE_APPLIED:
                    push.told_s = self.events.now_s
                    return True
        finally:
            push.over_s = self.events.now_s
        return False

    async def _frames(self, push: Push) -> AsyncIterator[weights_pb2.PushWeightsRequest]:
        header = weights_pb2.PushHeader(push_id=push.push_id, weight_version=push.version, force=push.force)
        header.apply.timeout.CopyFrom(duration_of(20.0))
        header.staging_ttl.CopyFrom(duration_of(60.0))
        for index, name in enumerate(("a", "b")):
            header.manifest.tensors.add(
                name=name, dtype="F32", shape=[4], offset=index * CONTENT_BYTES, length=CONTENT_BYTES
            )
        header.manifest.total_bytes = 2 * CONTENT_BYTES
        yield weights_pb2.PushWeightsRequest(header=header)
        data = bytes_of(push.content)
        for index in range(2):
            yield weights_pb2.PushWeightsRequest(chunk=weights_pb2.PushChunk(offset=index * CONTENT_BYTES, data=data))
            await asyncio.sleep(self.drawn.random() * 0.2)
        yield weights_pb2.PushWeightsRequest(end=weights_pb2.PushEnd())


class Operator(Client):
    """Pauses the fleet, and resumes it."""

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(self.drawn.expovariate(1 / 3.0))
            await self._pause()

    async def _pause(self) -> None:
        drawn, asked_s = self.drawn, self.events.now_s
        ttl_s = 3.0 + drawn.random() * drawn.choice((5.0, 40.0))
        request = control_pb2.PauseRequest(
            holder="operator", ttl=duration_of(ttl_s), timeout=duration_of(5.0), request_id=f"{drawn.getrandbits(64)}"
        )
        lease = Lease(new_lease_id(request.request_id), math.inf, asked_s + ttl_s)
        self.events.leases.append(lease)
        try:
            await self.ask("pause", ControlServiceStub(self.channel()).Pause, request, ASK_S)
        except GenserveError as error:
            if not isinstance(error, UnavailableError) or "the fleet" not in error.message:
                lease.failed_s = self.events.now_s  # the router has answered
            return
        lease.told_s = self.events.now_s
        await asyncio.sleep(drawn.expovariate(1 / 4.0))
        if drawn.random() < 0.3:
            with suppress(GenserveError):
                renewed_s = self.events.now_s
                renewal = control_pb2.RenewPauseRequest(lease_id=lease.lease_id, ttl=duration_of(ttl_s))
                await self.ask("renew", ControlServiceStub(self.channel()).RenewPause, renewal, ASK_S)
                if lease.until_s > self.events.now_s:
                    lease.until_s = max(lease.until_s, renewed_s + ttl_s)
                await asyncio.sleep(drawn.expovariate(1 / 4.0))
        if drawn.random() < 0.2:
            await asyncio.sleep(max(0.0, lease.until_s - self.events.now_s))
        lease.until_s = min(lease.until_s, self.events.now_s)
        for _ in range(3):
            try:
                resume = control_pb2.ResumeRequest(lease_id=lease.lease_id)
                await self.ask("resume", ControlServiceStub(self.channel()).Resume, resume, ASK_S)
                return
            except GenserveError as error:
                if not may_have_done(error):
                    return


class Sleeper(Client):
    """Puts the fleet to sleep, and wakes it up."""

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(self.drawn.expovariate(1 / 6.0))
            request = control_pb2.SleepRequest(level=1, timeout=duration_of(5.0))
            try:
                await self.ask("sleep", ControlServiceStub(self.channel()).Sleep, request, ASK_S)
            except GenserveError:
                await self.wake_up()
                continue
            sleep = Lease(ASLEEP, self.events.now_s, math.inf)
            self.events.leases.append(sleep)
            await asyncio.sleep(self.drawn.expovariate(1 / 3.0))
            sleep.until_s = self.events.now_s
            await self.wake_up()

    async def wake_up(self) -> None:
        """Until it is answered."""
        while True:
            try:
                await self.ask("wake up", ControlServiceStub(self.channel()).WakeUp, control_pb2.WakeUpRequest(), ASK_S)
                return
            except GenserveError:
                await asyncio.sleep(1.0)


class Rollouts(Client):
    """Asks for tokens."""

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(self.drawn.expovariate(1 / 0.5))
            await self._generate()

    async def _generate(self) -> None:
        request = generation_pb2.GenerateRequest()
        request.token_ids.ids.extend((1, 2))
        request.stop.max_tokens = self.drawn.randrange(1, 12)
        told = Request(self.events.now_s)
        self.events.requests.append(told)
        call: Any = GenerationServiceStub(self.channel()).Generate(request, timeout=REQUEST_S)
        try:
            async for answer in call:
                for output in answer.outputs:
                    told.tokens.extend(output.token_ids)
                    told.versions.extend(s.version for s in output.weight_spans for _ in range(s.start, s.end))
        except grpc.aio.AioRpcError as error:
            told.ended = error_of(error, "the fleet").reason
        if self.events.now_s > told.asked_s + REQUEST_S + _SLACK_S:
            self.events.violation(f"a request took {self.events.now_s - told.asked_s:.1f} s")
