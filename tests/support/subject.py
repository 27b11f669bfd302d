"""The daemon that faults happen to."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

import grpc.aio
import pytest

from genserve.client import AsyncClient
from genserve.errors import GenserveError, PushNotFoundError
from tests.support import faulty_worker, patience
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.faulty_worker import CENSUS_FILE, FAULTS_VARIABLE, FAULTY_EXTENSION, SLOW_RUN, Fault
from tests.support.oracle import Oracle, OracleError
from tests.support.raw_push import RawPush

# Its pages become resident one by one as blocks are used for the first time: a large one would look like a leak.
_KV_CACHE_BYTES = 32 << 20
_HEALTH_CHECK = "/grpc.health.v1.Health/Check"
_SERVING = b"\x08\x01"


class Subject:
    """A daemon on checkpoint a whose workers fail as ordered, a client of it, and the oracle."""

    def __init__(self, process: DaemonProcess, client: AsyncClient, faults: Path, oracle: Oracle) -> None:
        self.process = process
        self.client = client
        self.faults = faults
        self.oracle = oracle
        self._push_ids: set[str] = set()

    @property
    def pid(self) -> int:
        """Of the daemon."""
        return self.process.process.pid

    @property
    def checkpoints(self) -> Mapping[str, Path]:
        """By name: a, which is served, and b."""
        return self.oracle.checkpoints

    def order(self, *faults: Fault) -> None:
        """Orders these faults and no others. Raises AssertionError if one of those ordered before has not happened."""
        unfired = faulty_worker.unfired(self.faults)
        faulty_worker.order(self.faults, *faults)
        assert not unfired, f"ordered and never happened, so nothing is proven: {unfired}"

    def release(self) -> None:
        """Nothing fails any more, and what hangs goes on. Raises as `order`."""
        self.order()

    @property
    def fired(self) -> int:
        """How many of the ordered faults have happened, all ranks together."""
        return faulty_worker.fired(self.faults)

    async def until_fired(self, count: int = 1) -> None:
        """Waits until so many of the ordered faults have happened."""
        await faulty_worker.until_fired(self.faults, count)

    @asynccontextmanager
    async def refuses(
        self, error: type[GenserveError], *, before: str = "prepare", discards: bool = True
    ) -> AsyncIterator[pytest.ExceptionInfo[Any]]:
        """As `unharmed`, for one thing that is done inside: it raises `error`."""
        async with self.unharmed(before=before, discards=discards):
            with pytest.raises(error) as raised:
                yield raised

    @asynccontextmanager
    async def unharmed(self, *, before: str = "prepare", discards: bool = True) -> AsyncIterator[None]:
        """Whatever is done inside ends before a worker is asked for this step, and then the oracle holds. A push whose
        bytes arrive is prepared already: it is refused before "commit". What has been staged is discarded, or has to
        go by itself."""
        version = await self.oracle.served_version()
        self.order(Fault(before, "slow", seconds=0.0, times=-1))
        yield
        assert self.fired == 0, f"the workers were asked to {before}"
        if discards:
            await self.discard()
        await self.oracle.holds((version, "a"))
        assert self.fired > 0, "no push reaches the workers: the control fails"
        self.release()

    async def push(self, name: str = "b", *, version: int | None = None, **options: Any) -> Any:
        """A push that may be committed; the oracle accepts its version from here on."""
        version = await self.oracle.served_version() + 1 if version is None else version
        self.oracle.committed[version] = name
        self._push_ids.add(options.setdefault("push_id", uuid.uuid4().hex))
        return await self.client.push_weights(
            self.checkpoints[name], version=version, **{"timeout_s": 60.0, "chunk_bytes": 1 << 16, **options}
        )

    async def fails(
        self, error: type[GenserveError], *faults: Fault, fired: int | None = None, **options: Any
    ) -> GenserveError:
        """A push of b that ends with `error` because of these faults, each of which happens once unless `fired` says
        otherwise; SLOW_RUN does not count. What it has staged is discarded."""
        options.setdefault("push_id", uuid.uuid4().hex)
        self.order(*faults)
        with pytest.raises(error) as raised:
            await self.push("b", **options)
        assert self.fired == (sum(fault != SLOW_RUN for fault in faults) if fired is None else fired)
        self.release()
        await self.client.discard_push(options["push_id"])
        return raised.value

    async def raw_push(self, name: str = "b", *, ttl_s: int = 60) -> RawPush:
        """The next version, to be written frame by frame, however slowly."""
        version = await self.oracle.served_version() + 1
        self.oracle.committed[version] = name
        raw = RawPush(self.process.address, self.checkpoints[name], version, uuid.uuid4().hex)
        self._push_ids.add(raw.header.push_id)
        raw.header.staging_ttl.FromSeconds(ttl_s)
        return raw

    async def until_push(self, push_id: str, *, state: str = "", received_bytes: int = 0) -> None:
        """Waits until a push is in this state and has so many bytes. Nothing tells, so it asks."""
        async with asyncio.timeout(patience.STEP_S):
            while True:
                try:
                    push = (await self.client.get_push(push_id)).push
                    if push.received_bytes >= received_bytes and state in ("", push.state):
                        return
                except PushNotFoundError:
                    pass
                await asyncio.sleep(0.02)

    async def is_serving(self) -> bool:
        """What the standard health check says."""
        async with grpc.aio.insecure_channel(self.process.address) as channel:
            check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_HEALTH_CHECK)
            return await check(b"", timeout=60) == _SERVING

    async def discard(self) -> None:
        """Discards what was staged by these tests and not applied."""
        while self._push_ids:
            push_id = self._push_ids.pop()
            with suppress(PushNotFoundError):
                if (await self.client.get_push(push_id)).push.state != "applied":
                    await self.client.discard_push(push_id)

    async def is_sound(self) -> bool:
        """Whether the next test can begin. What one that failed has left staged, paused or broken is mended first."""
        if self.oracle.is_satisfied:
            return True
        try:
            faulty_worker.release(self.faults)
            await self.discard()
            await self.client.resume(force=True)
            await self.oracle.push("a")
            await self.oracle.holds((await self.oracle.served_version(), "a"))
        except (GenserveError, OracleError):
            return False
        return True


@asynccontextmanager
async def started(
    checkpoints: Mapping[str, Path],
    directory: Path,
    *flags: str,
    env: Mapping[str, str] | None = None,
    num_engines: int = 1,
    begins: bool = True,
    cold: bool = False,
) -> AsyncIterator[Subject]:
    """Starts a daemon on checkpoint a; unless told not to, the oracle learns what it has to know. `cold`: as for
    `DaemonProcess`."""
    process = daemon_process(checkpoints["a"], directory, *flags, env=env, cold=cold)
    async with AsyncExitStack() as stack:
        stack.callback(process.end)
        process.wait_serving()
        client = await stack.enter_async_context(AsyncClient(process.address))
        oracle = Oracle(client, process.process.pid, directory / CENSUS_FILE, checkpoints, num_engines)
        if begins:
            await oracle.begin()
            oracle.is_satisfied = True
        stack.callback(faulty_worker.release, directory)
        yield Subject(process, client, directory, oracle)


class Kept:
    """One daemon for many tests, and another one when a test that failed has left it broken."""

    def __init__(self, checkpoints: Mapping[str, Path], directory: Path, *flags: str, **options: Any) -> None:
        """`flags` and `options` as for `started`."""
        self._checkpoints = checkpoints
        self._directory = directory
        self._flags = flags
        self._options = options
        self._stack = AsyncExitStack()
        self._subject: Subject | None = None
        self._num_started = 0

    @asynccontextmanager
    async def for_one_test(self, session: pytest.Session) -> AsyncIterator[Subject]:
        """A daemon that is sound. Raises AssertionError if the test passes and has neither the oracle nor the daemon's
        end at its end, or if a fault that it orders does not happen."""
        num_failed = session.testsfailed
        subject = self._subject
        if subject is None or not await subject.is_sound():
            if subject is not None:
                subject.process.kill()  # its test has failed, and it may not drain
            await self._stack.aclose()
            self._num_started += 1
            directory = self._directory / str(self._num_started)
            starting = started(self._checkpoints, directory, *self._flags, **self._options)
            subject = self._subject = await self._stack.enter_async_context(starting)
        subject.oracle.is_satisfied = False
        yield subject
        subject.release()
        is_over = subject.oracle.is_satisfied or subject.process.has_ended
        assert is_over or session.testsfailed > num_failed, "it did not end with the oracle"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()


def daemon_process(
    checkpoint: Path, directory: Path, *flags: str, env: Mapping[str, str] | None = None, cold: bool = False
) -> DaemonProcess:
    """A daemon whose workers fail as ordered in `directory`; it writes its stderr there too."""
    directory.mkdir(parents=True, exist_ok=True)
    cache = ("--kv-cache-memory-bytes", str(_KV_CACHE_BYTES))
    command = ["--model", str(checkpoint), *SMALL_ENGINE, *cache, "--worker-extension-cls", FAULTY_EXTENSION, *flags]
    return DaemonProcess(command, directory / "stderr", env={FAULTS_VARIABLE: str(directory), **(env or {})}, cold=cold)
