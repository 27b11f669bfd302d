"""The LoRA adapters that workers hold, and the requests that use them.

For vLLM every load is a new adapter, with an id and a name that are never reused. So a replaced name means the new
adapter to later requests and the old one to running ones; and vLLM's prefix cache, which identifies adapters by name,
never uses keys and values of one adapter for another.
"""

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from genserve.aio import Backoff
from genserve.engine.protocol import LoraDirectory
from genserve.engine.types import LoadedLora, UsedAdapter
from genserve.engine.vllm.workers import WorkerError, Workers
from genserve.errors import (
    DeadlineError,
    EngineDeadError,
    FieldViolation,
    LoraNotFoundError,
    ManifestMismatchError,
    PushRolledBackError,
    StagingFullError,
)
from genserve.worker.contract.calls import Ack, AddedLora, AddLora, RemoveLora

REMOVE_TIMEOUT_S = 30.0
# How long a load waits for a removal and its second try: other changes of the engine wait behind it, and a rank may
# fail for good.
PLACE_TIMEOUT_S = 45.0
FIRST_RETRY_S = 1.0
_MAX_RETRY_S = 60.0
# EngineCore may learn of the end of a request a moment after its readers, because vLLM looks for stop strings outside
# of it.
_SETTLE_S = 0.5
_MAX_NAMED = 3

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class HeldLora:
    """An adapter that workers hold. `version`: known when it is loaded. `is_current`: later requests can use it.
    `users`: the requests that use it."""

    lora_id: int
    name: str
    files: LoraDirectory
    version: int = 0
    loaded_at_s: float = 0.0
    is_current: bool = False
    users: set[Hashable] = field(default_factory=set)

    @property
    def unique_name(self) -> str:
        """Its name in vLLM."""
        return f"{self.name}#{self.lora_id}"

    def as_loaded(self) -> LoadedLora:
        """The adapter for other modules."""
        files = self.files
        return LoadedLora(
            self.name,
            self.version,
            files.rank,
            files.size_bytes,
            files.source,
            files.push_id,
            self.loaded_at_s,
            num_requests=len(self.users),
            directory=files.directory,
        )


class LiveLoras:
    """See `engine.protocol.Loras`. `capacity`: how many adapters workers can hold, so that vLLM never drops one by
    itself."""

    def __init__(self, workers: Workers, capacity: int) -> None:
        self._workers = workers
        self._capacity = capacity
        self._ids = itertools.count(1)
        self._current: dict[str, HeldLora] = {}
        self._held: set[HeldLora] = set()
        self._by_request: dict[Hashable, HeldLora] = {}
        self._removals: set[asyncio.Task[None]] = set()

    async def load(self, name: str, files: LoraDirectory, timeout_s: float, version: int = 0) -> LoadedLora:
        """Loads an adapter on every rank, and refuses one of which a part reached no layer on any of them: vLLM would
        leave it out without a word."""
        lora = HeldLora(next(self._ids), name, files)
        deadline_s = time.monotonic() + timeout_s
        free_by_s = min(deadline_s, time.monotonic() + PLACE_TIMEOUT_S)
        while len(self._held) >= self._capacity and self._removals and time.monotonic() < free_by_s:
            await asyncio.wait(self._removals, timeout=_SETTLE_S, return_when=asyncio.FIRST_COMPLETED)
        if len(self._held) >= self._capacity:
            held = ", ".join(sorted(each.name if each.is_current else f"{each.name} (old)" for each in self._held))
            if self._removals:
                held += "; some are being removed: load again later"
            full = StagingFullError(
                f"the workers hold {len(self._held)} adapters, the limit of --max-cpu-loras: {held}",
                metadata={"max_loras": str(self._capacity)},
            )
            await asyncio.to_thread(files.close)
            raise full
        self._held.add(lora)
        request = AddLora(uuid.uuid4().hex, lora.lora_id, lora.unique_name, files.directory)
        try:
            remaining_s = max(0.0, deadline_s - time.monotonic())
            added = await self._workers.acks(AddedLora, "genserve_add_lora", request.to_wire(), timeout_s=remaining_s)
            _refuse_unused(name, added)
        except BaseException as error:
            self._start_removal(lora)  # some ranks may have it, or may still load it
            if isinstance(error, WorkerError):
                raise PushRolledBackError(f"adapter {name!r} could not be loaded; nothing changed: {error}") from error
            raise
        previous = self._current.get(name)
        lora.version = version or (1 if previous is None else previous.version + 1)
        lora.loaded_at_s, lora.is_current = time.time(), True
        self._current[name] = lora
        if previous is not None:
            self._retire(previous)
        return lora.as_loaded()

    def unload(self, name: str) -> LoadedLora:
        """Makes an adapter unavailable to later requests."""
        lora = self._require(name)
        del self._current[name]
        self._retire(lora)
        return lora.as_loaded()

    def loaded(self) -> list[LoadedLora]:
        """The adapters that later requests can use."""
        return [lora.as_loaded() for _, lora in sorted(self._current.items())]

    async def use(self, name: str, request: Hashable) -> UsedAdapter:
        """The adapter of a request, until `release`: by its id, or by that and its front end. Raises
        LoraNotFoundError."""
        lora = self._by_request[request] = self._require(name)
        lora.users.add(request)
        return UsedAdapter(lora.unique_name, lora.lora_id, lora.files.directory, lora.version)

    def release(self, request: Hashable) -> None:
        """Records that the request has ended."""
        lora = self._by_request.pop(request, None)
        if lora is not None:
            lora.users.discard(request)
            self._remove_if_unused(lora)

    def close(self) -> None:
        """Called before the engine ends."""
        for removal in self._removals:
            removal.cancel()
        for lora in self._held:
            lora.files.close()

    def _require(self, name: str) -> HeldLora:
        if name not in self._current:
            loaded = f"loaded are {', '.join(sorted(self._current))}" if self._current else "none is"
            if not self._capacity:
                loaded = "the daemon was started without --enable-lora"
            raise LoraNotFoundError(f"no adapter {name!r} is loaded; {loaded}", metadata={"lora_name": name})
        return self._current[name]

    def _retire(self, lora: HeldLora) -> None:
        lora.is_current = False
        self._remove_if_unused(lora)

    def _remove_if_unused(self, lora: HeldLora) -> None:
        if not lora.is_current and not lora.users:
            self._start_removal(lora)

    def _start_removal(self, lora: HeldLora) -> None:
        removal = asyncio.create_task(self._remove(lora), name=f"removal of {lora.unique_name}")
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    async def _remove(self, lora: HeldLora) -> None:
        await asyncio.sleep(_SETTLE_S)
        with suppress(EngineDeadError):  # its memory is freed with the engine
            await self._remove_from_workers(lora)
        self._held.discard(lora)
        await asyncio.to_thread(lora.files.close)

    async def _remove_from_workers(self, lora: HeldLora) -> None:
        """Asks again until every rank has removed it: one that is held for good takes a place that no load gets. The
        engine may be busy for long, with an update of the weights for example; a second removal changes nothing."""
        backoff = Backoff(FIRST_RETRY_S, _MAX_RETRY_S)
        while True:
            request = RemoveLora(uuid.uuid4().hex, lora.lora_id)
            try:
                await self._workers.acks(Ack, "genserve_remove_lora", request.to_wire(), timeout_s=REMOVE_TIMEOUT_S)
                return
            except (DeadlineError, WorkerError) as error:
                log.warning("adapter %r is held on, because it could not be removed: %s", lora.unique_name, error)
                await asyncio.sleep(backoff.next_s())


def _refuse_unused(name: str, added: Sequence[AddedLora]) -> None:
    """Raises ManifestMismatchError for modules that no layer of any rank takes. A rank of pipeline parallelism has some
    of the layers."""
    unused = sorted(set.intersection(*(set(each.without_layer) for each in added)))
    if not unused:
        return
    more = f" and {len(unused) - _MAX_NAMED} more" if len(unused) > _MAX_NAMED else ""
    description = (
        f"no layer of the served model takes an adapter of {', '.join(map(repr, unused[:_MAX_NAMED]))}{more}: name its "
        "tensors as PEFT does for the served checkpoint, and leave out modules that vLLM has no adapters for"
    )
    raise ManifestMismatchError(
        f"adapter {name!r} does not match the model: {description}",
        violations=[FieldViolation("header.manifest", description)],
    )
