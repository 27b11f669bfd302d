"""Watches one replica for as long as it belongs to the fleet."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import grpc.aio

from genserve.aio import Backoff, silence
from genserve.errors import (
    DeadlineError,
    DrainingError,
    FleetHeldError,
    GenserveError,
    NoReplicaError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from genserve.fleet.desired import Version
from genserve.fleet.fleet import Fleet
from genserve.fleet.member import Kind
from genserve.fleet.upstream import Upstream
from genserve.transport.errors import error_of
from genserve.v1 import control_pb2, types_pb2, weights_pb2
from genserve.wire.conversions import duration_of

log = logging.getLogger(__name__)

ROUTER_FEATURE = "fleet"
"""The feature of GetServerInfo that only a router has."""
_LORAS_EVERY_S = 1.0
FIRST_PAUSE_S = 0.2
CALL_AGAIN_S = 5.0
"""The longest wait before a replica that does not answer is called again."""
_CALL_EVERY_S = 20.0
"""Seconds between calls. A replica lets another router in after a minute without a call from this one."""
_IS_A_ROUTER = "it is a router, not a daemon"
_STANDSTILL_S = 60.0
"""A router that is suspended for longer may consider its replicas lost."""

T = TypeVar("T")


class Watch:
    """Keeps the fleet's knowledge of a replica current. It has its own deadline, because the TCP connection to a host
    that has vanished stays silent for many minutes."""

    def __init__(self, fleet: Fleet, upstream: Upstream) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._member = upstream.member
        self._loras_at_s = 0.0
        self._asked_at_s = 0.0

    async def run(self) -> None:
        """Watches until it is cancelled. Calls again after each loss of the replica."""
        backoff = Backoff(FIRST_PAUSE_S, CALL_AGAIN_S)
        while True:
            try:
                await self._upstream.renew()
                await self._watch()
            except GenserveError as error:
                self._member.is_held = isinstance(error, FleetHeldError)
                if self._member.engine is not None:
                    backoff.reset()  # it was reached
                self._fleet.lost(self._upstream, self._why(error), cuts=not isinstance(error, DrainingError))
            except Exception as error:  # a bug of ours: without a watch, nothing would notice a loss
                log.exception("the watch of replica %s failed", self._upstream.address)
                self._fleet.lost(self._upstream, f"the router failed to watch it: {error!r}")
            await asyncio.sleep(backoff.next_s())

    def _why(self, error: GenserveError) -> str:
        """For operators of the router: a replica says what its own callers do about a token."""
        has_token = bool(self._upstream.caller.metadata)
        if has_token and isinstance(error, (UnauthenticatedError, PermissionDeniedError)):
            return f"{error.message} (the token in --peer-token-file)"
        if isinstance(error, UnauthenticatedError):
            return "it knows neither a token nor a certificate of this router: give it a token with --peer-token-file"
        return error.message

    async def _watch(self) -> None:
        info = await self._info()
        self._check_kind(info)
        self._check_alone(info.state.instance_id)
        self._check_held(info)
        self._check_free()
        await self._upstream.connect(self._fleet.settings.connect_timeout_s)
        self._member.connected(info)
        self._found(info)
        async with aclosing(self._reports()) as reports:
            async for report in reports:
                if report.state.instance_id != info.state.instance_id:
                    raise UnavailableError("it has started again")  # and keeps another record
                await self._take(report)

    async def _info(self) -> control_pb2.GetServerInfoResponse:
        """What it serves, as soon as its engine has started."""
        upstream, timeout_s = self._upstream, self._fleet.settings.connect_timeout_s
        while True:
            try:
                return await upstream.ask(upstream.control.GetServerInfo, control_pb2.GetServerInfoRequest(), timeout_s)
            except NoReplicaError:  # its text would be in this router's own answer, and that in its text again
                raise UnavailableError(_IS_A_ROUTER) from None
            except DrainingError as error:
                if error.metadata.get("phase") != "STARTING":
                    raise
            self._check_free()
            await self._until_started()

    async def _until_started(self) -> None:
        async with aclosing(self._reports()) as reports:
            async for report in reports:
                if report.state.phase != types_pb2.PHASE_STARTING:
                    return
                self._check_alone(report.state.instance_id)
                self._check_free()
                await self._check_reached()
                self._member.starts(report.state)
                self._fleet.refresh(self._upstream)

    async def _reports(self) -> AsyncGenerator[control_pb2.WatchStatusResponse, None]:
        settings = self._fleet.settings
        request = control_pb2.WatchStatusRequest(
            interval=duration_of(settings.report_interval_s),
            heartbeat=duration_of(settings.heartbeat_s),
            router=self._fleet.router,
        )
        upstream = self._upstream
        call = upstream.control.WatchStatus(request, metadata=upstream.metadata)
        try:
            while True:
                yield await self._next(call)
        finally:
            call.cancel()

    async def _next(
        self, call: "grpc.aio.UnaryStreamCall[control_pb2.WatchStatusRequest, control_pb2.WatchStatusResponse]"
    ) -> control_pb2.WatchStatusResponse:
        silence_s = self._fleet.settings.silence_s
        try:
            async with silence(silence_s):
                report = await call.read()
        except TimeoutError:
            raise UnavailableError(f"it has said nothing for {silence_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise error_of(error, self._upstream.address) from None
        if not isinstance(report, control_pb2.WatchStatusResponse):
            raise DrainingError("it has shut down")  # the ends of its last requests may still be on their way
        self._member.is_held = False
        return report

    async def _take(self, report: control_pb2.WatchStatusResponse) -> None:
        member, upstream = self._member, self._upstream
        self._check_alone(report.state.instance_id)
        self._check_free()
        member.reported(report.state, report.load, report.pushes)
        if report.HasField("time"):
            member.clock.reported(report.time, time.time())
        leases_changed = self._fleet.leases.reported(upstream.address, map(member.clock.lease, report.state.pauses))
        if member.version is None:
            beside = self._fleet.answering  # one of them may be lost before the version is known
            # Waiters for its state have to see this one: it may be the same as before when the version is known.
            self._fleet.refresh(upstream)
            omitting = weights_pb2.GetWeightsRequest(omit_manifest=True)
            weights = await self._ask(upstream.weights.GetWeights, omitting)
            if not member.is_outdated(weights.state):  # by a commit meanwhile: the next report asks again
                self._fleet.serves(upstream, Version.of(weights.state), beside)
        if report.state.fleet_epoch > (member.record.epoch if member.record is not None else 0):
            self._found(await self._ask(upstream.control.GetServerInfo, control_pb2.GetServerInfoRequest()))
        await self._check_reached()
        loras_changed = False
        if member.takes_loras and time.monotonic() >= self._loras_at_s:
            self._loras_at_s = time.monotonic() + _LORAS_EVERY_S
            before = member.lora_names, member.lora_sources
            loras = await self._ask(upstream.control.ListLoras, control_pb2.ListLorasRequest())
            member.reported_loras(loras.loras)
            loras_changed = (member.lora_names, member.lora_sources) != before
        self._fleet.refresh(None if leases_changed or loras_changed else upstream)

    def _found(self, info: control_pb2.GetServerInfoResponse) -> None:
        if info.HasField("fleet"):
            self._fleet.found(self._upstream, info.fleet)

    async def _check_reached(self) -> None:
        """Calls the replica every few seconds. Reports only prove that messages arrive from it; gRPC notices after a
        minute that none reach it. Raises UnavailableError."""
        if time.monotonic() < self._asked_at_s + min(self._fleet.settings.silence_s, _CALL_EVERY_S):
            return
        await self._ask(self._upstream.control.GetStatus, control_pb2.GetStatusRequest())
        self._asked_at_s = time.monotonic()

    async def _ask(self, call: Callable[..., Awaitable[T]], request: Any) -> T:
        """Raises UnavailableError if the answer takes longer than a replica may be silent. A gRPC deadline of that
        length would end the calls to all replicas after this process has been suspended for as long."""
        silence_s = self._fleet.settings.silence_s
        try:
            async with silence(silence_s):
                return await self._upstream.ask(call, request, silence_s + _STANDSTILL_S)
        except (TimeoutError, DeadlineError):
            raise UnavailableError(f"it has not answered a call for {silence_s:g} s") from None

    def _check_held(self, info: control_pb2.GetServerInfoResponse) -> None:
        """Raises FleetHeldError if another router looks after the replica. Checked before this router asks to be let
        in, because a standby router asks often."""
        router_address = info.state.router_address
        if router_address not in ("", self._fleet.router.address):
            self._member.found_held(info)
            raise FleetHeldError(
                f"the router at {router_address} looks after this daemon", metadata={"router_address": router_address}
            )

    def _check_free(self) -> None:
        """Raises UnavailableError if this replica has to be left to another router.

        A standby router may reach a replica that has just restarted, which belongs to the router of the others. If two
        routers look after some replicas each, one of them lets its own go. That is the one with fewer, once this router
        knows what the fleet should serve; replicas that were added from another fleet do not count for the other router
        then. Before that, and between equals, `Member.precedence` decides.
        """
        members = self._fleet.members
        had = [each.precedence for each in members if each.engine is not None]
        others = [each for each in members if each is not self._member and each.is_held]
        if self._fleet.committed is not None:
            others = [each for each in others if each.is_written or not each.joins]
            if len(others) < len(had):
                return
            if len(others) > len(had):
                had = []
        for other in others:
            if not had or min(had) >= other.precedence:
                raise UnavailableError(f"it is left to the router of {other.address}: {other.failure}")

    def _check_kind(self, info: control_pb2.GetServerInfoResponse) -> None:
        """Raises UnavailableError for a replica of another model, which could take neither weights nor requests, and
        for a router, which may be this one."""
        if ROUTER_FEATURE in info.features:
            raise UnavailableError(_IS_A_ROUTER)
        kind = Kind.of(info)
        for other in self._fleet.members:
            if other is not self._member and other.kind is not None and not other.failure and other.kind != kind:
                raise UnavailableError(f"it serves {kind}, but {other.address} {other.kind}")

    def _check_alone(self, instance_id: str) -> None:
        """Raises UnavailableError for another address of a daemon that is a replica already."""
        for other in self._fleet.members:
            if other is not self._member and other.engine is not None and other.engine.instance_id == instance_id:
                raise UnavailableError(f"it is the daemon at {other.address}, which is a replica already")
