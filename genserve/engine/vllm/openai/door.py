"""The checks of a request over HTTP before the engine gets it: the same as over gRPC."""

import asyncio
from collections.abc import Callable, Sized
from http import HTTPStatus
from typing import Any, Final

from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from genserve.engine.types import EngineInfo
from genserve.engine.vllm.requests import refusals
from genserve.engine.vllm.requests.crossing import MAX_CACHE_SALT, Crossing, bound
from genserve.engine.vllm.requests.running import Tally
from genserve.errors import InvalidFieldError

MAX_ID_BYTES: Final = 1024
"""Of a request's id, which a client may send in X-Request-Id. vLLM adds a few characters, and the table of ids that are
ended with a process has rows of a fixed size."""


class Door:
    """`info`: of the engine; `max_active`: unfinished sequences of all clients, above which new ones are refused;
    `unfinished`: vLLM's of this client; `tally`: what all clients have admitted."""

    def __init__(
        self, serving: refusals.Serving, info: EngineInfo, max_active: int, unfinished: Sized, tally: Tally
    ) -> None:
        self._serving = serving
        self._info = info
        self._max_active = max_active
        self._unfinished = unfinished
        self._tally = tally
        self._crossing = Crossing()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_unfinished(self) -> int:
        """Sequences of this client that are admitted and unfinished."""
        return len(self._unfinished)

    def check_early(self, params: SamplingParams, request_id: str) -> None:
        """The checks that are possible before vLLM completes a request, while the status of an answer can still tell.
        Raises VLLMValidationError."""
        self._check_id(request_id)
        self._check_params(params)

    def check_room(self, num_sequences: int) -> None:
        """Raises GracefulHTTPError if there is no room for so many more sequences now, and
        VLLMValidationError if there never is."""
        if num_sequences > (max_n := self._info.max_n):  # vLLM's own check names a variable that does not count here
            raise VLLMValidationError(f"n must be at most {max_n} (--max-n), is {num_sequences}", parameter="n")
        num_active = self.num_unfinished + self._tally.num_elsewhere
        if num_active + num_sequences > self._max_active:
            raise GracefulHTTPError(
                f"{num_active} sequences are running or waiting, of {self._max_active} at most: try again later",
                HTTPStatus.SERVICE_UNAVAILABLE,
            )

    def complete(self, built: EngineCoreRequest) -> None:
        """The checks of what vLLM has made of a request. Raises VLLMValidationError."""
        self._check_id(built.request_id)
        if built.lora_request is not None:
            raise VLLMValidationError("an adapter cannot be named over HTTP: only genserve loads these")
        if len(built.cache_salt or "") > MAX_CACHE_SALT:
            raise VLLMValidationError(
                f"cache_salt must be at most {MAX_CACHE_SALT} characters long", parameter="cache_salt"
            )
        params = built.sampling_params
        if params is not None:  # None: not a request for tokens
            self._check_params(params)
            bound(params, self._info.max_model_len)
        try:
            self._crossing.check(built)
        except InvalidFieldError as error:
            raise VLLMValidationError(error.message) from error

    def count(self) -> None:
        """Reports the number of unfinished sequences to the other clients. Call when it may have changed."""
        num_unfinished = self.num_unfinished
        self._tally.publish(num_unfinished, num_unfinished)
        if num_unfinished:
            self._idle.clear()
        else:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Returns when nothing is unfinished."""
        await self._idle.wait()

    @staticmethod
    def _check_id(request_id: str) -> None:
        if len(request_id.encode()) > MAX_ID_BYTES:
            raise VLLMValidationError(f"request_id must be at most {MAX_ID_BYTES} bytes long", parameter="request_id")

    def _check_params(self, params: SamplingParams) -> None:
        for row in refusals.refused(params, self._serving):
            raise VLLMValidationError(f"{row.parameter} {row.message}", parameter=row.parameter)


class CheckedInputs:
    """All of vLLM's InputProcessor, with a `check` of each request that it makes."""

    def __init__(self, inputs: Any, check: Callable[[EngineCoreRequest], None]) -> None:
        self._inputs = inputs
        self._check = check

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inputs, name)

    def process_inputs(self, *args: Any, **kwargs: Any) -> EngineCoreRequest:
        """As InputProcessor.process_inputs."""
        built = self._inputs.process_inputs(*args, **kwargs)
        self._check(built)
        return built

    async def process_inputs_async(self, *args: Any, **kwargs: Any) -> EngineCoreRequest:
        """As InputProcessor.process_inputs_async."""
        built = await self._inputs.process_inputs_async(*args, **kwargs)
        self._check(built)
        return built
