"""The engine as vLLM's OpenAI server has it: a client that admits requests and streams their tokens. All else is the
daemon's."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence, Sized
from http import HTTPStatus
from typing import Any, Final

from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM

from genserve.engine.types import EngineInfo
from genserve.engine.vllm.clients.interruption import Watch, of_vllm
from genserve.engine.vllm.clients.join import Joined, join_at_seat
from genserve.engine.vllm.openai.asgi import MAX_MEDIA_BYTES, note
from genserve.engine.vllm.requests import refusals
from genserve.engine.vllm.requests.intake import Tally
from genserve.engine.vllm.requests.refusals import MAX_CACHE_SALT, Crossing, bound
from genserve.engine.vllm.requests.weight_spans import version_of
from genserve.errors import InvalidFieldError

ALLOWED: Final = frozenset(
    {
        "abort",
        "add_request",
        "check_health",
        "do_log_stats",
        "get_supported_tasks",
        "get_weight_version",
        "is_paused",
        "is_sleeping",
        "is_tracing_enabled",
        "notify_kv_transfer_request_rejected",
    }
)
"""Methods of vLLM's client that a server may call besides `generate` and `encode`: they concern its own requests, or
change nothing."""

MAX_ID_BYTES: Final = 1024
"""Of a request's id, which a client may send in X-Request-Id. vLLM adds a few characters, and the table of ids that are
ended with a process has rows of a fixed size."""


class Door:
    """The checks of a request over HTTP before the engine gets it: the same as over gRPC.

    `info`: of the engine; `max_active`: unfinished sequences of all clients, above which new ones are refused;
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


def _refusing(name: str) -> Callable[..., Any]:
    async def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"{name}: only genserve's gRPC services control the engine of this server")

    return refuse


_Controls: Any = type(
    "_Controls",
    (),
    {
        name: _refusing(name)
        for name, each in vars(AsyncLLM).items()
        if inspect.iscoroutinefunction(each) and not name.startswith("_") and name not in ALLOWED
    },
)
"""Refuses every other call of vLLM's client, those too that a newer vLLM adds."""


class ServedLLM(_Controls, AsyncLLM):
    """vLLM's client, which cannot control the engine and whose requests pass a door. Call `guard` first."""

    input_processor: Any

    def guard(self, door: Door) -> None:
        """Requests pass `door` from now on."""
        self._door = door
        self.input_processor = CheckedInputs(self.input_processor, door.complete)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As AsyncLLM.generate. Raises VLLMValidationError at once, while the status of the answer can still tell."""
        self._door.check_early(sampling_params, request_id)
        return _noting_versions(super().generate(prompt, sampling_params, request_id, **kwargs))

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """As AsyncLLM.check_admission, which vLLM calls before an answer begins, and for each request again when it is
        admitted."""
        self._door.check_room(n)
        super().check_admission(n, request_id)

    async def add_request(self, *args: Any, **kwargs: Any) -> Any:
        """As AsyncLLM.add_request."""
        try:
            return await super().add_request(*args, **kwargs)
        finally:
            self._door.count()

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """As AsyncLLM.abort."""
        try:
            await super().abort(request_id, internal)
        finally:
            self._door.count()


async def _noting_versions(outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
    try:
        async for output in outputs:
            for each in output.outputs:  # vLLM knows them when a sequence has ended
                note(version_of(span.version) for span in each.weight_versions or ())
            yield output
    finally:
        await outputs.aclose()  # which aborts the request


class OpenAIEngine:
    """A client of the daemon's engine. Made by `join`."""

    def __init__(self, joined: Joined) -> None:
        self.llm = joined.llm
        """For vLLM's application."""
        has_media = joined.llm.vllm_config.model_config.is_multimodal_model
        self.max_request_bytes = MAX_MEDIA_BYTES if has_media else joined.invitation.info.max_request_bytes
        """Of the body of a request over HTTP."""
        invitation = joined.invitation
        # internal: vLLM's states of unfinished sequences, by the ids that EngineCore knows.
        self._unfinished = joined.llm.output_processor.request_states
        serving, max_active = refusals.Serving.of(joined.llm.vllm_config), invitation.limits.max_active_requests
        self._door = Door(serving, invitation.info, max_active, self._unfinished, joined.tally)
        joined.llm.guard(self._door)
        self._interruptions = joined.row.interruptions
        joined.row.after_step = self._door.count

    @classmethod
    async def join(cls, data: bytes, fds: Sequence[int]) -> "OpenAIEngine":
        """Joins the engine that an invitation is for, with the descriptors of the seat. Raises UnavailableError."""
        return cls(await join_at_seat(data, fds, ServedLLM))

    async def abort(self, request_ids: Sequence[str] | None) -> tuple[list[str], list[str]]:
        """Ends sequences (None = all), which answer with what they have; the ids that ran, and those that did not."""
        wanted = list(self._unfinished) if request_ids is None else list(request_ids)
        running = [each for each in wanted if each in self._unfinished]
        await self.llm.abort(running, internal=True)
        return running, [each for each in wanted if each not in running]

    def pausing(self) -> int:
        """The engine aborts all sequences from now on. How many there are."""
        return self._door.num_unfinished

    def paused(self) -> None:
        """The engine has aborted them."""

    def interrupted(self) -> int:
        """Nothing is scheduled: watches the sequences from now on. Tokens that these have computed."""
        return self._interruptions.begin(Watch(self._unfinished, of_vllm)).num_computed_tokens

    async def longest_wait_s(self) -> float | None:
        """The longest time that one of them was without output, when all have output again or have ended; None if none
        was."""
        return await self._interruptions.longest_wait_s()

    async def wait_idle(self) -> None:
        """Returns when no sequence is left."""
        await self._door.wait_idle()

    def close(self) -> None:
        """Leaves the engine."""
        self.llm.shutdown(0.0)
