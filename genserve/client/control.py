"""The calls of ControlService, waiting until the daemon is ready, and holding a pause: the block that holds one
takes a lease, renews it in the background, and ends it however the block ends."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Protocol

import grpc.aio

from genserve.client.state import EngineState, PauseLease, PauseResult, ResumeResult, ServerInfo, Status
from genserve.errors import DeadlineError, GenserveError, PauseLeaseLostError, UnavailableError
from genserve.transport.connection import UNSET, ServiceCalls, Timeout
from genserve.transport.errors import ClientClosedError
from genserve.transport.fields import build, duration, optional_duration, wire_value
from genserve.transport.streams import ResponseStream
from genserve.v1 import control_pb2, types_pb2
from genserve.wire.literals import KvPolicy, PauseMode, SleepTag


@dataclass(frozen=True, slots=True)
class HeldPause(PauseLease):
    """A lease that is renewed in the background until its block ends."""

    renewal: "asyncio.Task[None]" = field(repr=False, compare=False)

    @property
    def is_lost(self) -> bool:
        """Whether the lease could not be renewed: the engine may already run, and leaving the block raises the reason.
        True at the latest a third of the time to live after the lease was lost. Any thread may read it."""
        return self.renewal.done()


class PauseCalls(Protocol):
    """The three calls that a lease needs."""

    async def pause(
        self, mode: PauseMode | None, kv_policy: KvPolicy | None, *, holder: str, ttl_s: float, timeout_s: float
    ) -> PauseResult:
        """Takes a lease."""

    async def renew_pause(self, lease_id: str, *, ttl_s: float, timeout_s: float) -> PauseLease:
        """Extends the lease."""

    async def resume(self, lease_id: str) -> ResumeResult:
        """Ends the lease."""


@asynccontextmanager
async def held_pause(
    calls: PauseCalls,
    mode: PauseMode | None,
    kv_policy: KvPolicy | None,
    *,
    holder: str,
    ttl_s: float,
    timeout_s: float,
) -> AsyncIterator[HeldPause]:
    """See `ControlCalls.paused`."""
    paused = await calls.pause(mode, kv_policy, holder=holder, ttl_s=ttl_s, timeout_s=timeout_s)
    lease = paused.lease
    renewal = asyncio.create_task(_keep_renewing(calls, lease.lease_id, ttl_s), name=f"renew pause {lease.lease_id}")
    try:
        yield HeldPause(lease.lease_id, lease.holder, lease.mode, lease.expire_time, lease.fleet_lease_id, renewal)
    except Exception as error:
        try:
            await _give_back(calls, lease.lease_id, renewal)
        except PauseLeaseLostError as lost:
            raise lost from error
        except (GenserveError, ClientClosedError) as failure:
            error.add_note(f"the pause could not be ended: {failure}; lease {lease.lease_id} ends by itself")
        raise
    except BaseException as cancellation:  # must not be replaced by another error
        try:
            await _give_back(calls, lease.lease_id, renewal)
        except (GenserveError, ClientClosedError) as failure:
            cancellation.add_note(f"ending the pause: {failure}")
        raise
    else:
        await _give_back(calls, lease.lease_id, renewal)


async def _keep_renewing(calls: PauseCalls, lease_id: str, ttl_s: float) -> None:
    """Renews every third of the time to live, so that two failures are tolerated. Never returns; raises once the lease
    is lost."""
    clock = asyncio.get_running_loop().time
    renewed_at = clock()
    while True:
        await asyncio.sleep(ttl_s / 3)
        asked_at = clock()
        try:
            await calls.renew_pause(lease_id, ttl_s=ttl_s, timeout_s=ttl_s / 3)
            renewed_at = asked_at
        except (UnavailableError, DeadlineError) as error:
            if clock() - renewed_at >= ttl_s:
                raise PauseLeaseLostError(f"lease {lease_id} could not be renewed in time") from error


async def _give_back(calls: PauseCalls, lease_id: str, renewal: "asyncio.Task[None]") -> None:
    """Ends the renewal and the pause. Raises what ended the renewal, or PauseLeaseLostError if the lease was lost."""
    renewal.cancel()
    (failure,) = await asyncio.gather(renewal, return_exceptions=True)
    lost = failure if isinstance(failure, Exception) else None
    expired = False
    try:
        expired = (await calls.resume(lease_id)).lease_expired
    except GenserveError:
        if lost is None:
            raise
    if lost is not None:
        raise lost
    if expired:
        raise PauseLeaseLostError(f"lease {lease_id} had expired before the end of the block; the engine may have run")


# grpc.health.v1 by hand, so that the client needs no package for two messages of one field each.
_HEALTH_WATCH: Final = "/grpc.health.v1.Health/Watch"
_EVERY_SERVICE: Final = b""  # HealthCheckRequest{service: ""}
GIVE_UP_S: Final = 2.0
LAST_LOOK_S: Final = 1.0
_NEXT_WATCH_S: Final = 0.2  # a proxy without a daemon refuses every call at once
_SERVING: Final = b"\x08\x01"  # HealthCheckResponse{status: SERVING}


class ControlCalls(ServiceCalls):
    """Pause, resume, sleep and status."""

    async def pause(
        self,
        mode: PauseMode | None = None,
        kv_policy: KvPolicy | None = None,
        *,
        holder: str = "",
        ttl_s: float | None = None,
        no_expiry: bool = False,
        request_id: str = "",
        timeout_s: float = 60.0,
    ) -> PauseResult:
        """Pauses generation under a lease. The engine runs again when no lease is left.

        Defaults: mode keep, KV cache reuse, `ttl_s` 60. The daemon gives up after `timeout_s`, and then nothing is
        paused. A repeat with the same `request_id` returns the same lease. Prefer `paused()`, which renews and resumes.
        If the caller is cancelled, a lease that the daemon has just granted is ended first, unless `request_id` is
        given: a repeat finds that one, and it may be older than the call.
        """
        fields = {
            "mode": wire_value(types_pb2.PauseMode, mode, "mode"),
            "kv_policy": wire_value(types_pb2.KvPolicy, kv_policy, "kv_policy"),
            "holder": holder,
            "ttl": optional_duration(ttl_s, "ttl_s"),
            "no_expiry": no_expiry,
            "request_id": request_id or uuid.uuid4().hex,
            "timeout": duration(timeout_s, "timeout_s"),
        }
        request = build(control_pb2.PauseRequest, fields)
        call_timeout_s = timeout_s + self._connection.timeouts.pause_slack_s
        try:
            response = await self._connection.unary(self._connection.control.Pause, request, call_timeout_s)
        except asyncio.CancelledError:
            if not request_id:
                await self._give_up(request)
            raise
        return PauseResult(
            PauseLease.of(response.lease),
            response.requests_kept,
            response.requests_aborted,
            EngineState.of(response.state),
        )

    async def _give_up(self, request: control_pb2.PauseRequest) -> None:
        """Ends the lease of a pause whose caller does not wait any more. The daemon grants none after it has seen the
        cancellation, but its answer may have been on the way, and only a repeat says which lease was granted."""
        # If this fails, the lease expires, unless it was asked for with no_expiry.
        with suppress(GenserveError, ClientClosedError, TimeoutError):
            async with asyncio.timeout(GIVE_UP_S):
                if (await self.status(timeout_s=GIVE_UP_S)).state.pauses:
                    # Should it pause after all, then for a moment, and without harm to requests.
                    repeat = control_pb2.PauseRequest(
                        mode=types_pb2.PAUSE_MODE_KEEP,
                        kv_policy=types_pb2.KV_POLICY_REUSE,
                        holder=request.holder,
                        ttl=duration(GIVE_UP_S, "ttl_s"),
                        request_id=request.request_id,
                        timeout=duration(GIVE_UP_S, "timeout_s"),
                    )
                    granted = await self._connection.unary(self._connection.control.Pause, repeat, GIVE_UP_S)
                    await self.resume(granted.lease.lease_id, timeout_s=GIVE_UP_S)

    async def renew_pause(self, lease_id: str, *, ttl_s: float | None = None, timeout_s: Timeout = UNSET) -> PauseLease:
        """Extends a lease to `ttl_s` from now; default: its first time to live. Raises PauseLeaseLostError."""
        request = build(control_pb2.RenewPauseRequest, {"lease_id": lease_id, "ttl": optional_duration(ttl_s, "ttl_s")})
        response = await self._connection.unary(self._connection.control.RenewPause, request, timeout_s)
        return PauseLease.of(response.lease)

    async def resume(self, lease_id: str = "", *, force: bool = False, timeout_s: Timeout = UNSET) -> ResumeResult:
        """Ends a lease, or with `force` every lease, whoever holds it."""
        request = build(control_pb2.ResumeRequest, {"lease_id": lease_id, "force": force})
        response = await self._connection.unary(self._connection.control.Resume, request, timeout_s)
        return ResumeResult(response.lease_expired, EngineState.of(response.state))

    def paused(
        self,
        mode: PauseMode | None = None,
        kv_policy: KvPolicy | None = None,
        *,
        holder: str = "",
        ttl_s: float = 60.0,
        timeout_s: float = 60.0,
    ) -> AbstractAsyncContextManager[HeldPause]:
        """Keeps generation paused inside `async with`, which yields the lease, and resumes however the block ends.

        The lease is renewed every `ttl_s / 3`; its `is_lost` says whether renewing failed for good. Leaving the block
        raises PauseLeaseLostError if the lease was lost meanwhile: the engine may then have run.
        """
        return held_pause(self, mode, kv_policy, holder=holder, ttl_s=ttl_s, timeout_s=timeout_s)

    async def status(self, *, timeout_s: Timeout = UNSET) -> Status:
        """State and load of the engine."""
        request = control_pb2.GetStatusRequest()
        response = await self._connection.unary(self._connection.control.GetStatus, request, timeout_s)
        return Status.of(response)

    def watch_status(
        self, *, interval_s: float | None = None, heartbeat_s: float | None = None, timeout_s: float | None = None
    ) -> ResponseStream[Status]:
        """Yields state, load and pushes, at once and then on every change; while the load changes, at least every
        `interval_s`, and every `heartbeat_s` if nothing changes, both at least 0.1. It continues until it is closed:
        this is the one call without a deadline by default."""
        request = control_pb2.WatchStatusRequest(
            interval=optional_duration(interval_s, "interval_s"),
            heartbeat=optional_duration(heartbeat_s, "heartbeat_s"),
        )
        return self._connection.stream(self._connection.control.WatchStatus, request, timeout_s, Status.of)

    async def server_info(self, *, timeout_s: Timeout = UNSET) -> ServerInfo:
        """What the daemon serves and can do."""
        request = control_pb2.GetServerInfoRequest()
        return ServerInfo.of(await self._connection.unary(self._connection.control.GetServerInfo, request, timeout_s))

    async def reset_cache(self, *, reset_running_requests: bool = False, timeout_s: Timeout = UNSET) -> bool:
        """Drops the prefix cache; False when blocks of running requests kept it alive."""
        request = build(control_pb2.ResetCacheRequest, {"reset_running_requests": reset_running_requests})
        response = await self._connection.unary(self._connection.control.ResetCache, request, timeout_s)
        return response.reset

    async def sleep(
        self,
        mode: PauseMode | None = None,
        *,
        level: int | None = None,
        tags: Iterable[SleepTag] = (),
        timeout_s: float = 60.0,
    ) -> EngineState:
        """Releases the device's memory until `wake_up`. Nothing is generated meanwhile, and nothing can be pushed
        before the weights are awake again.

        Default mode keep: running requests continue afterwards. `level` is vLLM's: 0 keeps all memory, 1 (the default)
        keeps the weights on the host and drops the KV cache, 2 drops both. `tags=["kv_cache"]` releases the KV cache
        and keeps the weights on the device. A push that is being applied ends first. The daemon gives up after
        `timeout_s`, and then it is awake. A sleep has no lease: the caller must wake up the engine.
        """
        fields = {
            "mode": wire_value(types_pb2.PauseMode, mode, "mode"),
            "level": level,
            "tags": tags,
            "timeout": duration(timeout_s, "timeout_s"),
        }
        request = build(control_pb2.SleepRequest, fields)
        call_timeout_s = timeout_s + self._connection.timeouts.pause_slack_s
        response = await self._connection.unary(self._connection.control.Sleep, request, call_timeout_s)
        return EngineState.of(response.state)

    async def wake_up(self, tags: Iterable[SleepTag] = (), *, timeout_s: float = 300.0) -> EngineState:
        """Wakes up these parts, or all. The engine runs when none of its memory is asleep any more.

        After a sleep of level 2 the daemon restores the served version first, unless one was pushed; this takes as long
        as a push. Raises EngineTaintedError if it has no bytes to restore from: push a version then, and repeat.
        """
        request = build(control_pb2.WakeUpRequest, {"tags": tags})
        response = await self._connection.unary(self._connection.control.WakeUp, request, timeout_s)
        return EngineState.of(response.state)

    async def drain(self, *, drain_timeout_s: float | None = None, timeout_s: Timeout = UNSET) -> EngineState:
        """Shuts the daemon down as SIGTERM does: new calls are refused, what runs may finish within `drain_timeout_s`
        (default: the daemon's --drain-timeout), and then its process ends. Returns when that has begun. A router
        shuts itself down, and its replicas go on."""
        request = control_pb2.DrainRequest(drain_timeout=optional_duration(drain_timeout_s, "drain_timeout_s"))
        response = await self._connection.unary(self._connection.control.Drain, request, timeout_s)
        return EngineState.of(response.state)

    async def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Waits until the daemon says that it is serving. The daemon need not be started yet.

        Raises DeadlineError, which names the phase of a daemon that answers, and what it does while it starts. Nobody
        else may wake up a daemon that sleeps.
        """
        connection = self._connection
        answers = False
        try:
            async with asyncio.timeout(connection.grpc_timeout_s(timeout_s, None)):
                while True:
                    watch: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
                    watch = connection.channel.unary_stream(_HEALTH_WATCH)
                    call = watch(_EVERY_SERVICE, metadata=connection.metadata, wait_for_ready=True)
                    try:
                        async with ResponseStream[bytes](call, bytes, connection.typed_errors) as statuses:
                            async for status in statuses:
                                if status == _SERVING:
                                    return
                                answers = True
                    except UnavailableError:
                        pass
                    answers = False  # it went away
                    await asyncio.sleep(_NEXT_WATCH_S)
        except TimeoutError:
            seen = await self._why_not_ready() if answers else ""
            raise DeadlineError(f"no daemon was ready at {connection.target} within {timeout_s:g} s{seen}") from None

    async def _why_not_ready(self) -> str:
        """The reason why a daemon that answers does not serve; "" if unknown."""
        try:
            state = (await self.status(timeout_s=LAST_LOOK_S)).state
        except GenserveError:
            return ""
        if state.phase == "sleeping":
            return ": it is asleep; wake it up (wake_up(), genserve wake-up)"
        doing = "" if state.startup is None else f": {state.startup.described(datetime.now(UTC))}"
        return f": it is {state.phase}{doing}"
