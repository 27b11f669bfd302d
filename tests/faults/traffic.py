"""Random clients of a real daemon, one life of it after the other. Every choice comes from one seed.

Trainers are in `trainers`. Nothing here judges: `recorder` writes down what happened, `history_model` checks it.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from genserve.client import AsyncClient, KvPolicy, PauseMode
from genserve.process.supervisor import MAX_DEATHS
from tests.faults.history import ANY_LINK, FRONTEND_LINK
from tests.faults.http_generator import HttpGenerator
from tests.faults.recorder import Recorder
from tests.faults.trainers import Trainer, VersionBook
from tests.support import faulty_worker
from tests.support.daemon_process import DaemonProcess
from tests.support.faulty_worker import Fault
from tests.support.frontends import PortClient, everywhere_of, on_port
from tests.support.patience import slow

_NUM_GENERATORS = 6
_NUM_TRAINERS = 2
_NUM_HTTP_GENERATORS = 2
_LINK = "tokens"
_MAX_FRONTEND_KILLS = MAX_DEATHS - 1
"""In one life of the daemon: at the next one a front end may stay down."""
_PAUSE_MODES: tuple[PauseMode, ...] = ("keep", "keep", "keep", "abort", "wait")
_KV_POLICIES: tuple[KvPolicy, ...] = ("reuse", "recompute")


class Traffic:
    """Clients of one life of `daemon`. `faults` is the directory in which faults are ordered."""

    def __init__(self, recorder: Recorder, daemon: DaemonProcess, seed: str, faults: Path, num_frontends: int) -> None:
        self._recorder = recorder
        self._daemon = daemon
        self._address = daemon.address
        self._seed = seed
        self._faults = faults
        self._num_frontends = num_frontends
        self._frontends: dict[str, PortClient] = {}
        self.num_faults = 0
        """Faults that have happened."""

    async def __aenter__(self) -> Self:
        """Sets all clients to work."""
        async with AsyncExitStack() as stack:
            own, *others = await stack.enter_async_context(everywhere_of(self._address, self._num_frontends))
            self._frontends = {f"{FRONTEND_LINK} {number}": client for number, client in enumerate(others)}
            self._tokens_of = {_LINK: own, **self._frontends}
            self._control = await stack.enter_async_context(AsyncClient(self._address))
            if self._frontends:
                await self._control.wait_ready()  # it spreads its requests then
                self._tokens_of[ANY_LINK] = self._control
            openai_port = (await self._control.server_info()).openai_port
            self._ordering = asyncio.create_task(self._order_faults(self._rng("faults")), name="faults")
            self._tasks = [
                self._ordering,
                asyncio.create_task(self._probe(own), name="prober"),
                *(
                    asyncio.create_task(self._probe_frontend(link), name=f"prober of {link}")
                    for link in self._frontends
                ),
                asyncio.create_task(self._hurt_frontends(self._rng("front ends")), name="front ends"),
                asyncio.create_task(self._pause(self._rng("pauser")), name="pauser"),
                asyncio.create_task(self._pull(self._rng("puller")), name="puller"),
                *(asyncio.create_task(self._generate(i), name=f"generator {i}") for i in range(_NUM_GENERATORS)),
                *(asyncio.create_task(trainer.run(), name="trainer") for trainer in self._trainers()),
                *(asyncio.create_task(each.run(), name="HTTP") for each in self._http_generators(openai_port)),
            ]
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Cancels whatever is under way. Raises what ended a client early."""
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()
        self._count_faults()
        for result in results:
            if isinstance(result, Exception) and exc is None:
                raise result

    def order_death(self, rng: random.Random) -> None:
        """The engine dies amid the next commit; no other fault is ordered any more."""
        self._ordering.cancel()
        self._count_faults()
        faulty_worker.order(self._faults, Fault("commit", "kill", after=rng.choice((-1, 0, 3, 12))))

    def _rng(self, name: str) -> random.Random:
        return random.Random(f"{self._seed}/{name}")

    def _trainers(self) -> list[Trainer]:
        book = VersionBook(self._rng("versions"), self._recorder.contents.names)
        return [
            Trainer(name, self._recorder, self._address, self._rng(name), book)
            for name in (f"trainer{i}" for i in range(_NUM_TRAINERS))
        ]

    def _http_generators(self, port: int) -> list[HttpGenerator]:
        names = [f"http{i}" for i in range(_NUM_HTTP_GENERATORS if port else 0)]
        return [HttpGenerator(name, self._recorder, port, self._rng(name)) for name in names]

    async def _probe(self, own: AsyncClient) -> None:
        """Asks for the status on the streams' own connection all the time: that bounds when tokens were sampled."""
        while True:
            await self._recorder.call(own.status(), "status", "prober", link=_LINK)
            await slow(0.005)

    async def _probe_frontend(self, link: str) -> None:
        """The same on the connection to a front end, which has no status."""
        while True:
            await self._recorder.call(self._frontends[link].tokenize("a"), "tokenize", "prober", link=link)
            await slow(0.02)

    async def _hurt_frontends(self, rng: random.Random) -> None:
        """Stops one for a moment, or kills it."""
        num_kills: Counter[str] = Counter()
        while self._frontends:
            await slow(rng.uniform(1.0, 5.0))
            link, dies, stop_s = rng.choice(list(self._frontends)), rng.random() < 0.4, rng.uniform(0.0, 1.0)
            with suppress(psutil.NoSuchProcess, AssertionError):  # it is being started again
                process = await asyncio.to_thread(on_port, self._daemon, self._frontends[link].port)
                if dies and num_kills[link] < _MAX_FRONTEND_KILLS:
                    num_kills[link] += 1
                    before_s = time.monotonic()
                    process.kill()
                    kill = (self._recorder.life, link, before_s, time.monotonic())
                    self._recorder.history.frontend_kills.append(kill)
                    continue
                process.suspend()
                try:
                    await slow(stop_s)
                finally:
                    process.resume()

    async def _pull(self, rng: random.Random) -> None:
        """Reads the served bytes out again."""
        while True:
            await slow(rng.uniform(0.5, 3.0))
            await self._recorder.call(self._control.pull_weights(timeout_s=20.0), "pull", "puller")

    async def _generate(self, number: int) -> None:
        rng, name = self._rng(f"generator{number}"), f"generator{number}"

        async def dawdle() -> None:
            await slow(rng.uniform(0.0, 0.2))

        while True:
            prompt = [rng.randrange(3, 500) for _ in range(rng.choice((2, 5, 20, 60)))]
            num_tokens = rng.choice((1, 3, 30, 100, 200, 400, 700))
            interval = rng.choice((1, 1, 1, 1, 4, 0))
            link = rng.choice(list(self._tokens_of))
            reading = self._recorder.generate(
                self._tokens_of[link],
                name,
                prompt,
                link=link,
                interval=interval,
                pace=dawdle if rng.random() < 0.1 else None,
                max_tokens=num_tokens,
                ignore_eos=rng.random() < 0.8,
            )
            if rng.random() < 0.15:
                await self._cut_short(reading, rng.uniform(0.0, 1.5))
            elif not (await reading).tokens:
                await slow(0.2)  # refused: the weights are in doubt, or the daemon has died

    async def _pause(self, rng: random.Random) -> None:
        """Pauses of every kind, given back by their holder, by others, twice, or never."""
        client, name = self._control, "pauser"
        while True:
            await slow(rng.uniform(0.2, 2.5))
            ttl_s = rng.choice((0.3, 0.8, 2.0))
            mode: PauseMode = rng.choice(_PAUSE_MODES)
            kv_policy: KvPolicy = rng.choice(_KV_POLICIES)
            call = client.pause(mode, kv_policy, ttl_s=ttl_s, holder=name, timeout_s=rng.choice((0.5, 5.0)))
            if rng.random() < 0.1:
                await self._cut_short(self._recorder.call(call, "pause", name, ttl_s=ttl_s), rng.uniform(0.0, 0.05))
                continue
            paused = await self._recorder.call(call, "pause", name, ttl_s=ttl_s)
            if paused is None:
                continue
            lease_id = paused.lease.lease_id
            if rng.random() < 0.3:
                await slow(rng.uniform(0.0, ttl_s))
                renewal = client.renew_pause(lease_id, ttl_s=ttl_s)
                await self._recorder.call(renewal, "renew", name, lease_id=lease_id, ttl_s=ttl_s)
            await slow(rng.uniform(0.0, 0.8))
            match rng.choice(("resume", "resume", "resume twice", "stranger", "force", "expire")):
                case "resume":
                    await self._resume(lease_id)
                case "resume twice":
                    await self._resume(lease_id)
                    await self._resume(lease_id)
                case "stranger":
                    await self._resume("nobody's")
                    await slow(rng.uniform(0.0, 0.5))
                    await self._resume(lease_id)
                case "force":
                    await self._recorder.call(client.resume(force=True), "resume", name, force=True)

    async def _resume(self, lease_id: str) -> None:
        await self._recorder.call(self._control.resume(lease_id), "resume", "pauser", lease_id=lease_id)

    async def _order_faults(self, rng: random.Random) -> None:
        while True:
            await slow(rng.uniform(0.2, 2.0))
            self._count_faults()
            faulty_worker.order(self._faults, *random_faults(rng))

    def _count_faults(self) -> None:
        self.num_faults += faulty_worker.fired(self._faults)
        faulty_worker.release(self._faults)

    async def _cut_short(self, call: Awaitable[object], after_s: float) -> None:
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait({task}, timeout=after_s)
        finally:
            task.cancel()
            await asyncio.wait({task})


def random_faults(rng: random.Random) -> list[Fault]:
    """What shall go wrong with the next push: it fails; it cannot be undone, and the resident bytes heal the engine, or
    not even they do; it takes its time."""
    entry = rng.choice((-1, 0, 1, 5, 12))
    kinds: list[tuple[int, Callable[[], list[Fault]]]] = [
        (2, lambda: [Fault("prepare")]),
        (2, lambda: [Fault("load", after=entry)]),
        (3, lambda: [Fault("commit", after=entry)]),
        (2, lambda: [Fault("commit", after=entry), Fault("rollback", after=max(entry, 0) // 2)]),
        (1, lambda: [Fault("commit", after=entry, times=2), Fault("rollback", after=max(entry, 0) // 2)]),
        (2, lambda: [Fault("commit", "slow", after=entry, seconds=0.3)]),
        (2, lambda: [Fault("load", "slow", after=entry, seconds=0.5)]),
        (1, lambda: [Fault("discard")]),
    ]
    (chosen,) = rng.choices([make for _, make in kinds], [weight for weight, _ in kinds])
    return chosen()
