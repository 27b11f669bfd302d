"""Random trainers: pushes in every way that a trainer may make them, or fail to."""

import asyncio
import os
import random
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

from genserve.client import AsyncClient, PushResult
from genserve.errors import GenserveError
from tests.faults.contents import mixed
from tests.faults.history import START_CONTENT, PushIntent
from tests.faults.recorder import AnswerLost, Recorder
from tests.support.breakable_link import BreakableLink
from tests.support.patience import slow
from tests.support.raw_push import RawPush

_STAGING_TTL_S = 20.0


class VersionBook:
    """Gives out version numbers, each for one content. Some are left out on purpose, to be pushed late."""

    def __init__(self, rng: random.Random, names: Sequence[str]) -> None:
        self._rng = rng
        self._names = names
        self._by_version = {0: START_CONTENT}
        self._left_out: list[int] = []
        self._highest = 0

    def fresh(self, base: int | None = None) -> tuple[int, str]:
        """A version above all others, and its content: any, or that of a partial push onto version `base`."""
        step = self._rng.choice((1, 1, 1, 2, 3))
        self._left_out += range(self._highest + 1, self._highest + step)
        self._highest += step
        if base is not None:
            self._by_version[self._highest] = mixed(self._by_version[base], self._rng.choice(self._names))
        return self._highest, self._content(self._highest)

    def stale(self) -> tuple[int, str]:
        """A version below the highest: one that was left out, or one that another push had."""
        known = [version for version, content in self._by_version.items() if version and "/" not in content]
        version = self._rng.choice(self._left_out or known or [1])
        if version in self._left_out and self._rng.random() < 0.7:
            self._left_out.remove(version)
        self._highest = max(self._highest, version)
        return version, self._content(version)

    def _content(self, version: int) -> str:
        return self._by_version.setdefault(version, self._rng.choice(self._names))


class Trainer:
    """Pushes over a link of its own that can be cut."""

    def __init__(
        self,
        name: str,
        recorder: Recorder,
        address: str,
        rng: random.Random,
        book: VersionBook,
    ) -> None:
        self._name = name
        self._recorder = recorder
        self._address = address
        self._rng = rng
        self._book = book
        self._contents = recorder.contents
        self._num_pushes = 0
        self._pushed: list[PushIntent] = []

    async def run(self) -> None:
        """Pushes until it is cancelled."""
        weights: dict[Callable[[], Awaitable[None]], int] = {
            self._push_once: 8,
            self._push_stale: 2,
            self._push_expecting: 3,
            self._push_part: 3,
            self._push_forced: 1,
            self._stage: 8,
            self._cancel: 3,
            self._break: 4,
            self._kill_process: 1,
            self._repeat: 2,
            self._start_again: 3,
            self._disagree: 2,
            self._push_under_lease: 2,
            self._validate: 1,
        }
        async with AsyncExitStack() as stack:
            self._link = await stack.enter_async_context(BreakableLink(self._address))
            self._client = await stack.enter_async_context(AsyncClient(self._link.address))
            while True:
                (action,) = self._rng.choices(list(weights), list(weights.values()))
                await action()
                await slow(self._rng.choice((0.0, 0.05, 0.3, 0.8)))

    def _intent(self, version_and_content: tuple[int, str], **fields: Any) -> PushIntent:
        self._num_pushes += 1
        intent = PushIntent(f"{self._name}-{self._num_pushes}", *version_and_content, **fields)
        self._pushed.append(intent)
        return intent

    async def _push(self, intent: PushIntent, action: str = "apply", **options: Any) -> PushResult | None:
        part = intent.content.rpartition("/")[2]
        call = self._client.push_weights(
            self._contents.part(part) if intent.partial else self._contents.whole(intent.content),
            partial=intent.partial,
            version=intent.version,
            expected_version=intent.expected_version,
            push_id=intent.push_id,
            force=intent.force,
            action=action,  # type: ignore[arg-type]
            chunk_bytes=self._rng.choice((16 << 10, 64 << 10, 1 << 20)),
            staging_ttl_s=_STAGING_TTL_S,
            **options,
        )
        kind = {"apply": "push"}.get(action, action)
        return await self._recorder.call(call, kind, self._name, push=intent)

    async def _push_once(self) -> None:
        await self._push(
            self._intent(self._book.fresh()), pause_mode=self._rng.choice(("keep", "keep", "keep", "abort"))
        )

    async def _push_stale(self) -> None:
        await self._push(self._intent(self._book.stale()))

    async def _push_expecting(self) -> None:
        served = await self._recorder.call(self._client.get_weights(), "weights", self._name)
        expected = served.weight_version if served is not None else 0
        if self._rng.random() < 0.4:
            expected = max(0, expected + self._rng.choice((-1, 1, 7)))
        await self._push(self._intent(self._book.fresh(), expected_version=expected))

    async def _push_part(self) -> None:
        await self._push(await self._partial())

    async def _partial(self) -> PushIntent:
        """Some tensors, for the version that is served now alone: what becomes of another would not be known."""
        served = await self._recorder.call(self._client.get_weights(), "weights", self._name)
        base = served.weight_version if served is not None else 0
        return self._intent(self._book.fresh(base), expected_version=base, partial=True)

    async def _push_forced(self) -> None:
        await self._push(self._intent(self._book.stale(), force=True))

    async def _stage(self) -> None:
        intent = await self._partial() if self._rng.random() < 0.2 else self._intent(self._book.fresh())
        if await self._push(intent, "stage") is None:
            return
        for _ in range(self._rng.choice((1, 1, 2))):
            await slow(self._rng.choice((0.0, 0.1, 0.6, 1.5)))
            ways = ("commit", "commit", "commit", "discard", "push", "leave", "cancelled commit")
            match self._rng.choice(ways):
                case "commit":
                    await self._recorder.call(
                        self._client.commit_push(intent.push_id), "commit", self._name, push=intent
                    )
                case "discard":
                    await self._recorder.call(
                        self._client.discard_push(intent.push_id), "discard", self._name, push=intent
                    )
                case "push":
                    await self._push(intent)
                case "cancelled commit":
                    call = self._client.commit_push(intent.push_id)
                    await self._cut_short(self._recorder.call(call, "commit", self._name, push=intent))

    async def _cancel(self) -> None:
        intent = self._intent(self._book.fresh())
        await self._cut_short(self._push(intent))
        await self._follow_up(intent)

    async def _break(self) -> None:
        """The connection is reset, once or a few times: what the client does then is part of the test."""
        intent = self._intent(self._book.fresh())
        push = asyncio.create_task(self._push(intent, timeout_s=8.0))
        try:
            for _ in range(self._rng.choice((1, 1, 3))):
                await asyncio.wait({push}, timeout=self._rng.uniform(0.0, 0.15))
                self._link.cut()
            if self._rng.random() < 0.3:
                push.cancel()
            await asyncio.wait({push})
        finally:
            push.cancel()
        await self._follow_up(intent)

    async def _follow_up(self, intent: PushIntent) -> None:
        """What a trainer does that has not heard what came of a push."""
        await slow(self._rng.choice((0.0, 0.2)))
        match self._rng.choice(("repeat", "look", "leave")):
            case "repeat":
                await self._push(intent)
            case "look":
                await self._recorder.call(self._client.get_push(intent.push_id), "look", self._name)

    async def _repeat(self) -> None:
        if self._pushed:
            await self._push(self._rng.choice(self._pushed[-6:]))

    async def _start_again(self) -> None:
        """A first start of the trainer has sent a part of other weights under the same id, and died. Whatever the
        second is told, what goes live is what it meant, whole."""
        intent = self._intent(self._book.fresh())
        raw = self._raw_push(intent.push_id, intent.version, self._other(intent.content))
        raw.header.attempt = self._rng.choice(("", "first"))
        end = self._rng.randrange(1, len(raw.data))
        with suppress(GenserveError):
            await raw.send(raw.frames((0, end)), end=False)
        for _ in range(2):
            await self._push(intent)

    async def _disagree(self) -> None:
        """Two ranks bring halves of different weights under one id, each ending its stream: a version that nobody
        meant, so that a token or an answer that names it is a violation."""
        version, content = self._book.fresh()
        self._num_pushes += 1
        push_id, halves = f"{self._name}-torn-{self._num_pushes}", []
        attempts = self._rng.choice((("x", "y"), ("x", "x"), ("", "")))
        for half, (attempt, part) in enumerate(zip(attempts, (content, self._other(content)), strict=True)):
            raw = self._raw_push(push_id, version, part)
            raw.header.attempt, raw.header.num_streams = attempt, 2
            middle = len(raw.data) // 2
            # With one name, or none, the halves overlap: only the bytes can tell that they are of two versions.
            overlap = 0 if attempts[0] != attempts[1] else len(raw.data) // 4
            halves.append(raw.frames((0, middle + overlap) if half == 0 else (middle - overlap, len(raw.data))))
        sending = [asyncio.ensure_future(raw.send(frames)) for frames in halves]
        try:
            await asyncio.wait(sending, timeout=5.0)
        finally:
            for each in sending:
                each.cancel()
            await asyncio.gather(*sending, return_exceptions=True)
        with suppress(GenserveError):
            await self._client.discard_push(push_id, force=True)

    def _other(self, content: str) -> str:
        return self._rng.choice([name for name in self._contents.names if name != content.partition("/")[0]])

    def _raw_push(self, push_id: str, version: int, content: str) -> RawPush:
        raw = RawPush(self._address, self._contents.directories[content], version, push_id)
        raw.header.staging_ttl.FromSeconds(int(_STAGING_TTL_S))
        return raw

    async def _validate(self) -> None:
        await self._push(self._intent(self._book.fresh()), "validate")

    async def _push_under_lease(self) -> None:
        ttl_s = self._rng.choice((0.5, 3.0))
        pause = self._client.pause(ttl_s=ttl_s, holder=self._name, timeout_s=10.0)
        paused = await self._recorder.call(pause, "pause", self._name, ttl_s=ttl_s)
        if paused is None:
            return
        lease_id = paused.lease.lease_id
        await self._push(self._intent(self._book.fresh()), pause_lease_id=lease_id)
        await self._recorder.call(self._client.resume(lease_id), "resume", self._name, lease_id=lease_id)

    async def _kill_process(self) -> None:
        """A trainer in a process of its own, killed at some point of its push, perhaps after it."""
        intent = self._intent(self._book.fresh())
        self._pushed.remove(intent)  # the daemon gives it another id
        program = ["-m", "genserve", "push", str(self._contents.directories[intent.content])]
        program += ["--version", str(intent.version), "--target", self._address]
        await self._recorder.call(self._run_and_kill(program), "push", self._name, push=intent)

    async def _run_and_kill(self, program: list[str]) -> None:
        quiet = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(sys.executable, *program, stdout=quiet, stderr=quiet)
        try:
            async with asyncio.timeout(self._rng.uniform(0.4, 2.5)):
                await process.wait()
        except TimeoutError:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            await process.wait()
        raise AnswerLost  # even if it had one: whoever loses a trainer does not know

    async def _cut_short(self, call: Awaitable[object]) -> None:
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait({task}, timeout=self._rng.choice((0.0, 0.02, 0.05, 0.1, 0.3)))
        finally:
            task.cancel()
            await asyncio.wait({task})
