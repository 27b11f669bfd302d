"""Who uses the daemon as it is meant: streams of tokens, and pushes. Some of both over a link that fails."""

import asyncio
import random
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack

from bench.soak.report import Latencies, Report
from genserve.aio import is_cancelled
from genserve.client import AsyncClient, Generation
from genserve.errors import ApplyInProgressError, DeadlineError, GenserveError, UnavailableError, VersionNotNewerError
from tests.support.oracle import Oracle

NUM_CONNECTIONS = 8
SHARE_OVER_LINK = 0.25
SHARE_CANCELLED = 0.05
CALL_TIMEOUT_S = 300.0
LINK_ERRORS = (UnavailableError, DeadlineError)
"""What a link that is reset may cost."""


class Streams:
    """So many requests at a time, each followed by another. Those that do not go over the link must succeed, and every
    token must be of a version that was pushed, none older than the one before."""

    def __init__(
        self,
        address: str,
        link_address: str,
        committed: Mapping[int, str],
        report: Report,
        latencies: Latencies,
        rng: random.Random,
    ) -> None:
        self._address = address
        self._link_address = link_address
        self._committed = committed
        self._report = report
        self._latencies = latencies
        self._rng = rng

    async def run(self, num_streams: int) -> None:
        """Until it is cancelled."""
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            clients = [await stack.enter_async_context(AsyncClient(self._address)) for _ in range(NUM_CONNECTIONS)]
            linked = await stack.enter_async_context(AsyncClient(self._link_address))
            num_linked = round(SHARE_OVER_LINK * num_streams)
            for number in range(num_streams):
                over_link = number < num_linked
                client = linked if over_link else clients[number % NUM_CONNECTIONS]
                group.create_task(self._one_after_another(client, over_link=over_link))

    async def _one_after_another(self, client: AsyncClient, *, over_link: bool) -> None:
        where = "over the link" if over_link else "direct"
        while True:
            began_s = time.monotonic()
            request = asyncio.create_task(self._generate(client))
            try:
                if self._rng.random() < SHARE_CANCELLED:
                    await asyncio.wait([request], timeout=self._rng.uniform(0.0, 1.0))
                    request.cancel()
                self._check(await request)
            except asyncio.CancelledError:
                if not request.cancelled() or is_cancelled():
                    request.cancel()
                    await asyncio.gather(request, return_exceptions=True)
                    raise
                self._report.outcomes["stream, cancelled"] += 1
            except GenserveError as error:
                self._report.outcomes[f"stream {where}, {type(error).__name__}"] += 1
                if not (over_link and isinstance(error, LINK_ERRORS)):
                    self._report.is_wrong(f"a stream {where} ended with {error!r}")
                await asyncio.sleep(0.5)
            else:
                self._report.outcomes[f"stream {where}, ended"] += 1
                self._latencies.note(time.monotonic() - began_s)

    async def _generate(self, client: AsyncClient) -> Generation:
        prompt = [self._rng.randrange(1, 400) for _ in range(self._rng.randrange(1, 40))]
        max_tokens = self._rng.choice((8, 32, 128, 400))
        return await client.generate(prompt, max_tokens=max_tokens, ignore_eos=True, timeout_s=CALL_TIMEOUT_S)

    def _check(self, generation: Generation) -> None:
        versions = [span.version for sequence in generation.sequences for span in sequence.weight_spans]
        unknown = [version for version in versions if version not in self._committed]
        if unknown:
            self._report.is_wrong(f"tokens are labelled with {unknown}, which nobody pushed")
        if versions != sorted(versions):
            self._report.is_wrong(f"versions went back: {versions}")


class Pushes:
    """Versions with numbers of their own, of two checkpoints in turn."""

    def __init__(self, address: str, link_address: str, oracle: Oracle, report: Report, rng: random.Random) -> None:
        self._address = address
        self._link_address = link_address
        self._oracle = oracle
        self._report = report
        self._rng = rng

    def next(self) -> tuple[int, str]:
        """A version above all others, and its checkpoint. It may be served from now on."""
        version = max(self._oracle.committed) + 1
        name = "ab"[version % 2]
        self._oracle.committed[version] = name
        return version, name

    async def run(self, every_s: float) -> None:
        """Until it is cancelled."""
        async with AsyncClient(self._address) as direct, AsyncClient(self._link_address) as linked:
            while True:
                await asyncio.sleep(every_s)
                over_link = self._rng.random() < SHARE_OVER_LINK
                version, name = self.next()
                began_s = time.monotonic()
                try:
                    client = linked if over_link else direct
                    await client.push_weights(self._oracle.checkpoints[name], version=version, timeout_s=120.0)
                except GenserveError as error:
                    self._report.outcomes[f"push, {type(error).__name__}"] += 1
                    meets_other = isinstance(error, (ApplyInProgressError, VersionNotNewerError))  # of a killed trainer
                    if not meets_other and not (over_link and isinstance(error, LINK_ERRORS)):
                        self._report.is_wrong(f"a push ended with {error!r}")
                else:
                    self._report.outcomes["push, applied"] += 1
                    self._report.push_s.append(round(time.monotonic() - began_s, 3))
