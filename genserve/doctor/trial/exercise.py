"""The trial itself: serve, push under load, send what must be refused, and stop."""

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from genserve.client import AsyncClient, Generation, PushResult
from genserve.doctor.children import Children
from genserve.doctor.trial.findings import MustFail, PushFound, Snapshot, WayFound, held_weights
from genserve.doctor.trial.load import NUM_STREAMS, LoadLimits, live_load, retry_after_s
from genserve.doctor.trial.tiny_model import Checkpoint
from genserve.errors import GenserveError, InvalidFieldError, QueueFullError, UnsupportedError
from genserve.launcher.daemon_process import DaemonFailedError, DaemonProcess, access_to
from genserve.launcher.output import LogFile, last_words
from genserve.process.signals import ending

_PROMPTS: Final = ([5, 6, 7, 8], [100, 200, 300], list(range(10, 40)))
_MAX_TOKENS: Final = 24
_IDLE_S: Final = 0.5
_LATE_SHARE: Final = 0.25
"""Share of the previous preparation times that a push gets if it must run out of time."""

_STOP_TIMEOUT_S: Final = 30.0
_DRAIN_TIMEOUT_S: Final = 10.0
_OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
MAX_SOCKET_PATH_BYTES: Final = 107  # of Linux
_SOCKET_NAME_BYTES: Final = 36  # vLLM's are UUIDs


@dataclass(frozen=True, slots=True)
class Subject:
    """What to serve and push: checkpoints by name, the directories of those that a daemon can start on, and flags.
    `num_pushes` pushes alternate between them. `max_requests` is the daemon's limit by these flags, or None."""

    tensors: Mapping[str, Checkpoint]
    directories: Mapping[str, Path]
    flags: Sequence[str]
    num_pushes: int
    digests_always: bool
    max_requests: int | None = None


async def exercise(
    subject: Subject, way: str, started_on: str, children: Children, scratch: Path, timeout_s: float
) -> WayFound:
    """Runs the whole trial. Each step ends within `timeout_s`. An error is recorded, and ends the daemon."""
    found = WayFound(way, started_on)
    flags = [*subject.flags, *(("--weight-update", way) if way else ())]
    log = scratch / f"{way or 'cold'}.log"
    began_s = time.monotonic()
    try:
        async with daemon(children, subject.directories[started_on], flags, log, timeout_s) as child:
            found.start_s = time.monotonic() - began_s
            async with AsyncClient(child.address, **access_to(flags)) as client:
                try:
                    await _Exercise(client, subject, found, timeout_s).run(pushes=way != "")
                except GenserveError as error:
                    reason = error.metadata.get("reason", error.reason)
                    found.error = f"{reason}: {' '.join(error.message.split())}{child.last_words()}"
            found.stopped = await child.stop()
    except (DaemonFailedError, _StepTimeoutError, OSError) as error:
        found.error = found.error or " ".join(str(error).split())
    return found


class _StepTimeoutError(Exception):
    """A step took too long."""


class _Exercise:
    """The state of a trial. `found` grows while it runs."""

    def __init__(self, client: AsyncClient, subject: Subject, found: WayFound, timeout_s: float) -> None:
        self._client = client
        self._subject = subject
        self._found = found
        self._timeout_s = timeout_s
        self._version = 0
        self._served = found.started_on
        self._limits = LoadLimits(0, 0)

    async def run(self, *, pushes: bool) -> None:
        """Runs all steps. Raises GenserveError and _StepTimeoutError."""
        async with self._step("asking the daemon what it serves"):
            info = await self._client.server_info()
        asked = NUM_STREAMS if self._subject.max_requests is None else self._subject.max_requests
        self._limits = LoadLimits(info.limits.max_model_len, min(asked, info.limits.max_num_seqs))
        self._found.info = {name: value for name, value in asdict(info).items() if name != "state"}
        self._found.cold = await self._snapshot(digests=True)
        if not pushes:
            return
        for number in range(self._subject.num_pushes):
            self._found.pushes.append(await self._push(shared_memory=number % 2 == 1))
            first_or_last = number in (0, self._subject.num_pushes - 1)
            self._found.pushed.append(await self._snapshot(digests=self._subject.digests_always or first_or_last))
        self._found.misshapen = await self._push_misshapen()
        self._found.late = await self._push_late()

    async def _push(self, *, shared_memory: bool) -> PushFound:
        name = self._other()
        async with self._step(f"a push of {name} under load"), live_load(self._client, self._limits) as load:
            idle_from = time.monotonic()
            await asyncio.sleep(_IDLE_S)
            began_at = time.monotonic()
            result, shared = await self._push_shared(name) if shared_memory else (await self._send(name), None)
            ended_at = time.monotonic()
            self._served_now(name)
            lost = await load.wait_all(ended_at, num_tokens=2)
            labels_ok = load.labels_are(self._version)
        applied = result.applied
        if applied is None:
            raise GenserveError(f"the daemon says that a push is {result.push.state}, and not applied")
        before_pause_s = applied.step_s.get("receive", 0.0) + applied.step_s.get("prepare", 0.0)
        return PushFound(
            name=name,
            step_s=applied.step_s,
            paused_s=applied.paused_s if applied.paused_s is not None else 0.0,
            requests_kept=applied.requests_kept,
            requests_aborted=applied.requests_aborted,
            waits_s=load.waits_s(began_at, min(began_at + before_pause_s, ended_at)),
            idle_waits_s=load.waits_s(idle_from, began_at),
            shared=shared,
            lost=lost,
            labels_ok=labels_ok,
        )

    async def _push_shared(self, name: str) -> tuple[PushResult, str]:
        """Pushes through shared memory, or without it if it is not available."""
        try:
            return await self._send(name, shared_memory=True), ""
        except (UnsupportedError, InvalidFieldError) as error:
            return await self._send(name), error.message

    async def _send(self, name: str, *, shared_memory: bool | None = None) -> PushResult:
        return await self._client.push_weights(
            self._subject.tensors[name],
            version=self._version + 1,
            shared_memory=shared_memory,
            timeout_s=self._timeout_s,
        )

    async def _push_misshapen(self) -> MustFail:
        """Pushes the other checkpoint, with one tensor a row too short."""
        tensors = dict(self._subject.tensors[self._other()])
        whole = max(tensors.values(), key=lambda tensor: len(tensor.shape))
        row_bytes = len(whole.data) // whole.shape[0]
        shape = (whole.shape[0] - 1, *whole.shape[1:])
        tensors[whole.name] = replace(whole, shape=shape, data=whole.data[:-row_bytes])
        return await self._refused(tensors, f"a push with {whole.name} misshapen", None)

    async def _push_late(self) -> MustFail:
        """Pushes the other checkpoint with so little time that it must end while it is prepared, after every byte has
        arrived."""
        prepare_s = min(push.step_s.get("prepare", 0.0) for push in self._found.pushes)
        limit_s = max(_LATE_SHARE * prepare_s, 1e-6)
        return await self._refused(self._subject.tensors[self._other()], "a push that ends late", limit_s)

    async def _refused(self, tensors: Checkpoint, what: str, apply_timeout_s: float | None) -> MustFail:
        before = self._found.pushed[-1]
        reason, message = "", ""
        push_id = str(uuid.uuid4())
        async with self._step(what):
            try:
                await self._client.push_weights(
                    tensors, version=self._version + 1, push_id=push_id, apply_timeout_s=apply_timeout_s
                )
                self._served_now(self._other())
            except GenserveError as error:
                reason, message = error.reason, error.message
                with suppress(GenserveError):  # nothing of it may be left
                    await self._client.discard_push(push_id)
        return MustFail(reason, message, before, await self._snapshot(digests=bool(before.digests)))

    async def _snapshot(self, *, digests: bool) -> Snapshot:
        """Generates one prompt at a time, without the prefix cache, so that only the weights make a difference."""
        tokens, labelled = [], True
        async with self._step(f"greedy tokens of {self._served}"):
            for prompt in _PROMPTS:
                generation = await self._greedy(*self._limits.fitted(prompt, _MAX_TOKENS))
                spans = generation.sequences[0].weight_spans
                labelled &= {span.version for span in spans} == {self._version}
                tokens.append(tuple(generation.token_ids))
        async with self._step(f"digests of {self._served}"):
            held = await held_weights(self._client, self._timeout_s) if digests else {}
        return Snapshot(self._served, tuple(tokens), labelled, held)

    async def _greedy(self, prompt: list[int], max_tokens: int) -> Generation:
        while True:
            try:
                return await self._client.generate(
                    prompt, temperature=0.0, max_tokens=max_tokens, ignore_eos=True, text=False,
                    cache_salt=str(uuid.uuid4()),
                )  # fmt: skip
            except QueueFullError as error:  # ended requests count for a moment
                await asyncio.sleep(retry_after_s(error))

    def _other(self) -> str:
        return next(name for name in self._subject.tensors if name != self._served)

    def _served_now(self, name: str) -> None:
        self._served, self._version = name, self._version + 1

    @asynccontextmanager
    async def _step(self, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError:
            raise _StepTimeoutError(f"{what} did not end within {self._timeout_s:g} s (--timeout)") from None


class _StderrFile(LogFile):
    """Only stderr, whose last line says why a daemon ended, in a file that is removed with the trial."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.hint = ""

    def write(self, chunk: bytes) -> object:
        """Drops stdout."""
        return None


class DaemonChild:
    """A daemon that serves at `address`. `stop` may be called once; leaving the context kills what is left."""

    def __init__(self, process: DaemonProcess, address: str) -> None:
        self.address = address
        self._process = process

    async def stop(self) -> str:
        """Ends the daemon by a signal. Returns what was wrong with its end, "" if nothing."""
        self._process.stop(_STOP_TIMEOUT_S)
        was_killed = await asyncio.wrap_future(self._process.ended)
        status = self._process.exit_status
        if was_killed or status is None:
            return f"it, or a process of it, had to be killed {_STOP_TIMEOUT_S:g} s after SIGTERM"
        return "" if status == 0 else f"it {ending(status)}{self.last_words()}"

    def last_words(self) -> str:
        """As `launcher.output.last_words`."""
        return last_words(self._process.log)


@asynccontextmanager
async def daemon(
    children: Children, model: Path, flags: Sequence[str], log: Path, timeout_s: float
) -> AsyncIterator[DaemonChild]:
    """A daemon that serves `model`, with its stderr in the file `log`. Raises DaemonFailedError."""
    flags = ["--model", str(model), "--drain-timeout", str(_DRAIN_TIMEOUT_S), *flags]
    process = DaemonProcess(flags, _StderrFile(log), environment(log.parent))
    group = process.process.pid
    children.add(group)
    try:
        try:
            async with asyncio.timeout(timeout_s):
                serving = await asyncio.wrap_future(process.serving)
        except TimeoutError:
            raise process.failure(f"the daemon did not serve within {timeout_s:g} s (--timeout)") from None
        yield DaemonChild(process, serving.address)
    finally:
        process.kill()
        await asyncio.wrap_future(process.ended)
        children.discard(group)


def environment(scratch: Path) -> Mapping[str, str]:
    """The user's environment, because it may cause the fault, except for temporary files, which killed processes leave
    behind: those go to `scratch`, if a socket's path is not too long there. The model is a directory, so no hub is
    used."""
    fits = len(os.fsencode(scratch / ("x" * _SOCKET_NAME_BYTES))) <= MAX_SOCKET_PATH_BYTES
    return {**os.environ, **_OFFLINE, **({"TMPDIR": str(scratch)} if fits else {})}
