"""Loads LoRA adapters from pushed tensors or a directory, so that requests can name them."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from genserve.control.conditions import check_weights
from genserve.control.pause import PauseController
from genserve.control.state import StateBoard
from genserve.control.turn import uninterrupted
from genserve.engine.protocol import Engine
from genserve.engine.types import LoadedLora
from genserve.errors import DeadlineError, InvalidFieldError, ManifestMismatchError, UnsupportedError
from genserve.weights.checkpoint.index import CheckpointIndex
from genserve.weights.lora.config import LoraConfig, check_lora_name
from genserve.weights.lora.files import LoraFiles
from genserve.weights.push.live_push import LivePush
from genserve.weights.push.types import MAX_VERSION, Applied, LoraAdapter

_MIN_TIMEOUT_S = 0.001


class LoraLoader:
    """Loads adapters into the engine while it runs. A replaced or unloaded adapter serves its requests to their end: no
    request sees two adapters. All methods raise UnsupportedError without --enable-lora, and the errors of
    `Engine.loras`."""

    def __init__(
        self, engine: Engine, board: StateBoard, pauses: PauseController, checkpoint: CheckpointIndex | None
    ) -> None:
        self._engine = engine
        self._pauses = pauses
        self._board = board
        self._checkpoint = checkpoint
        # One at a time of each: a load has a copy of the bytes, and a directory on a host that is gone keeps a thread.
        self._pushes, self._directories = asyncio.Lock(), asyncio.Lock()

    def check(self, lora: LoraAdapter) -> LoraConfig:
        """Returns the adapter's configuration. Also raises InvalidFieldError."""
        self._require_enabled()
        return LoraConfig.parse(lora.config, self._engine.info.max_lora_rank, "header.lora.config")

    def loaded(self, name: str) -> LoadedLora | None:
        """The adapter that is loaded under a name."""
        return next((each for each in self._engine.loras.loaded() if each.name == name), None)

    def push_ids(self) -> set[str]:
        """Of the pushes that brought the adapters that are loaded."""
        return {each.push_id for each in self._engine.loras.loaded()}

    def version(self, name: str) -> int:
        """Its version; 0 if none is loaded."""
        loaded = self.loaded(name)
        return 0 if loaded is None else loaded.version

    async def apply(self, push: LivePush, lora: LoraAdapter, version: Callable[[], int]) -> Applied:
        """Loads the adapter that a push has brought, within the header's `apply.timeout_s`, under the version that
        `version` returns. From then on the header has its version. Raises what `version` raises."""
        config = self.check(lora)
        make = partial(LoraFiles.of_push, config, push.staging.weights, push.staging.arena, push.push_id)
        began_s, header = time.perf_counter(), push.header
        async with _alone(self._pushes, header.apply.timeout_s) as left_s:
            push.wait_s = time.perf_counter() - began_s
            loaded, prepare_s, wait_s = await self._load(lora.lora_name, make, left_s, version)
        push.wait_s += wait_s
        push.header = replace(header, weight_version=loaded.version)
        commit_s = time.perf_counter() - began_s - prepare_s - push.wait_s
        served = self._engine.weights.version
        step_s = {**push.steps_before_prepare, "prepare": prepare_s, "commit": commit_s}
        return Applied(
            served,
            served,
            step_s,
            paused_s=0.0,
            requests_kept=0,
            requests_aborted=0,
            recomputed_tokens=0,  # requests keep the adapter that they began with
        )

    async def load_directory(self, name: str, path: str, timeout_s: float) -> LoadedLora:
        """Loads an adapter that PEFT saved on this host."""
        self._require_enabled()
        check_lora_name(name, "lora_name")
        check_weights(self._board)
        make = partial(LoraFiles.of_directory, Path(path), self._engine.info.max_lora_rank, self._checkpoint)
        try:
            async with _alone(self._directories, timeout_s) as left_s:
                loaded, _, _ = await uninterrupted(self._load(name, make, left_s))
        except ManifestMismatchError as error:  # of a push; what does not match lies at the path here
            raise InvalidFieldError.of("path", error.message) from error
        return loaded

    def unload(self, name: str) -> LoadedLora:
        """Removes an adapter and returns it. Raises LoraNotFoundError."""
        self._require_enabled()
        check_weights(self._board)
        return self._engine.loras.unload(name)

    async def _load(
        self, name: str, make: Callable[[], LoraFiles], timeout_s: float, version: Callable[[], int] = lambda: 0
    ) -> tuple[LoadedLora, float, float]:
        """Loads the adapter under the version that `version` returns or raises for; 0 = the next one. It is asked
        before the files are made, and again when nothing else can be loaded any more. Also returns the seconds for
        making the files, and those until other calls to the engine had ended."""
        deadline_s = time.monotonic() + timeout_s
        self._check_next(name, version())
        began_s = time.perf_counter()
        files = await asyncio.to_thread(make)
        made_s = time.perf_counter()
        is_loading = False
        try:
            # The engine may have fallen asleep meanwhile, and must not while an adapter is loaded.
            async with self._pauses.undisturbed(
                max(deadline_s - time.monotonic(), _MIN_TIMEOUT_S), "the load of an adapter"
            ):
                waited_s = time.perf_counter() - made_s
                number = version()
                self._check_next(name, number)
                is_loading = True
                remaining_s = max(deadline_s - time.monotonic(), 0.0)
                loaded = await self._engine.loras.load(name, files, remaining_s, number)
                return loaded, made_s - began_s, waited_s
        except BaseException:
            if not is_loading:
                await asyncio.to_thread(files.close)
            raise

    def _check_next(self, name: str, version: int) -> None:
        if not version and self.version(name) == MAX_VERSION:
            raise InvalidFieldError.of(
                "lora_name", f"there is no version after {MAX_VERSION}: unload the adapter first"
            )

    def _require_enabled(self) -> None:
        if not self._engine.info.max_loras:
            raise UnsupportedError("the daemon was started without --enable-lora")


@asynccontextmanager
async def _alone(turn: asyncio.Lock, timeout_s: float) -> AsyncIterator[float]:
    """Has the turn in the block. Yields the seconds that are left."""
    deadline_s = time.monotonic() + timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            await turn.acquire()
    except TimeoutError:
        raise DeadlineError(
            f"another adapter was still being read or loaded after {timeout_s:g} s, and nothing changed"
        ) from None
    try:
        yield deadline_s - time.monotonic()
    finally:
        turn.release()
