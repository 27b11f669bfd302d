"""Builds what is sent to vLLM's engine process, and checks it with vLLM's own rules and codec."""

import re
from functools import partial
from operator import attrgetter
from typing import Any

import msgspec
from vllm.exceptions import MaxQueuedTokensError, QueueOverflowError, VLLMValidationError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

# internal: vLLM imports these when it checks the first constraint, in a thread that may be interrupted: a lock of an
# import would stay taken, and every later constraint would wait for it.
from vllm.v1.structured_output import (  # noqa: F401
    backend_guidance,
    backend_lm_format_enforcer,
    backend_outlines,
    backend_xgrammar,
)

from genserve.engine.generation import GenerationRequest
from genserve.engine.types import EngineInfo
from genserve.engine.vllm.requests import refusals
from genserve.engine.vllm.requests.refusals import REQUEST_FIELDS, Crossing, bound, request_field
from genserve.engine.vllm.requests.timed_threads import TimedThreads
from genserve.errors import GenserveError, InvalidFieldError, QueueFullError
from genserve.observe import trace

dir(backend_outlines.json_schema)  # which is imported when it is used

_CHECK_LIMIT_S = 10.0
_NUM_CHECK_THREADS = 2
_MAX_INT32 = 2**31 - 1

_TYPES = {f.name: f.type for f in msgspec.structs.fields(SamplingParams)}
_NESTED = {"repetition_detection": frozenset(RepetitionDetectionParams.__dataclass_fields__)}
"""Parameters that are objects -> the names of their fields: the codec drops unknown fields."""
_GETTERS = {name: attrgetter(path) for name, path in REQUEST_FIELDS.items() if path != "constraint"}
"""vLLM's name of a parameter -> its value in a request, None if it is not set."""


class RequestBuilder:
    """Makes vLLM's requests."""

    def __init__(self, llm: AsyncLLM, info: EngineInfo) -> None:
        self._llm = llm
        self._info = info
        self._serving = refusals.Serving.of(llm.vllm_config)
        self.is_traced = llm.observability_config.otlp_traces_endpoint is not None
        """Whether vLLM exports spans."""
        self._crossing = Crossing()
        self._checks = TimedThreads("constraints", _NUM_CHECK_THREADS, _CHECK_LIMIT_S)

    def close(self) -> None:
        """Ends the threads."""
        self._checks.close()

    async def engine_request(
        self, request: GenerationRequest, ids: list[int], lora: LoRARequest | None
    ) -> EngineCoreRequest:
        """The request for EngineCore. Raises InvalidFieldError."""
        try:
            params = sampling_params(request)
            refusals.check(params, self._serving)
            build = partial(
                self._llm.input_processor.process_inputs,
                request.request_id,
                tokens_input(ids, cache_salt=request.cache_salt or None),
                params,
                supported_tasks=await self._llm.get_supported_tasks(),
                lora_request=lora,
                trace_headers=trace.headers() if self.is_traced else None,
                priority=request.priority,
                data_parallel_rank=request.data_parallel_rank,
            )
            # vLLM compiles constraints and tokenises bad words in this call.
            takes_long = request.constraint is not None or request.sampling.bad_words
            built = await self._checks.run(build) if takes_long else build()
            params = built.sampling_params
            if params is None:
                raise TypeError("vLLM made a request for tokens without sampling parameters")
            refusals.check(params, self._serving)  # vLLM has made token ids of words by now
            bound(params, self._info.max_model_len)
        except TimeoutError:
            raise InvalidFieldError.of("constraint", f"was not compiled within {_CHECK_LIMIT_S:g} s") from None
        except Exception as error:
            raise translated(error, request) from error
        self._crossing.check(built)
        return built


def sampling_params(request: GenerationRequest) -> SamplingParams:
    """vLLM's parameters. Raises InvalidFieldError for one of engine_params."""
    given = sampling_fields(request)
    if request.engine_params:
        refusals.check_names(request.engine_params)
        given.update({name: _typed(name, value) for name, value in request.engine_params.items()})
    if (constraint := request.constraint) is not None:
        given["structured_outputs"] = StructuredOutputsParams(**{constraint.kind.value: constraint.value})
    kind = RequestOutputKind.FINAL_ONLY if request.output.stream_interval == 0 else RequestOutputKind.DELTA
    return SamplingParams(output_kind=kind, skip_clone=True, **given)


def sampling_fields(request: GenerationRequest) -> dict[str, Any]:
    """Keyword arguments for SamplingParams: those of REQUEST_FIELDS that the request sets."""
    given = {name: value for name, get in _GETTERS.items() if (value := get(request)) is not None}
    # None lets vLLM use the rest of the context; its own default is 16.
    given["max_tokens"] = request.stop.max_tokens
    given["stop"], given["stop_token_ids"] = list(request.stop.strings), list(request.stop.token_ids)
    # Stop strings are matched on text.
    given["detokenize"] = request.output.text or bool(request.stop.strings)
    if given["stream_interval"] <= 1:
        del given["stream_interval"]  # the engine's own, --stream-interval
    return given


def translated(error: Exception, request: GenerationRequest | None = None) -> Exception:
    """Converts an error of vLLM into one for the client; `request` helps to find the field. Returns an error that says
    that the engine has died unchanged: `Liveness` knows the cause."""
    if isinstance(error, (GenserveError, VllmEngineDeadError)):
        return error
    if isinstance(error, (QueueOverflowError, MaxQueuedTokensError)):
        return QueueFullError(error.message, retry_after_s=1.0)
    if isinstance(error, VLLMValidationError):
        return InvalidFieldError.of(_field_of(error, request), error.args[0])
    return InvalidFieldError.of("request", str(error) or type(error).__name__)


def _typed(name: str, value: object) -> Any:
    """The value of one of engine_params with the type that vLLM declares. Raises InvalidFieldError."""
    path = f"engine_params.{name}"
    if isinstance(value, dict) and name in _NESTED and (unknown := value.keys() - _NESTED[name]):
        known = ", ".join(sorted(_NESTED[name]))
        raise InvalidFieldError.of(f"{path}.{min(unknown)}", f"is unknown; known are {known}")
    _check_integers(path, value)
    try:
        return msgspec.convert(value, _TYPES[name])
    except msgspec.ValidationError as error:
        raise InvalidFieldError.of(path, str(error)) from error
    except VLLMValidationError as error:
        raise InvalidFieldError.of(path, error.args[0]) from error


def _check_integers(path: str, value: object) -> None:
    """Checks that numbers fit: workers store every number of a request in 32 or 64 bits."""
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, dict):
            pending += each.values()
        elif isinstance(each, list):
            pending += each
        elif isinstance(each, int) and not -_MAX_INT32 <= each <= _MAX_INT32:
            raise InvalidFieldError.of(path, "contains a number that exceeds 32 bits")


def _field_of(error: VLLMValidationError, request: GenerationRequest | None) -> str:
    """Path of the field that vLLM's error is about; many of vLLM's errors only mention it, or the subject."""
    if error.parameter is not None:
        return request_field(error.parameter)
    text = str(error).lower()
    if "data_parallel_rank" in text:
        return "data_parallel_rank"
    if any(word in text for word in ("grammar", "json", "regex", "choice", "structur")):
        return "constraint"
    named = [word for word in re.findall(r"\w+", text) if word in _TYPES]
    asked = set() if request is None else _asked_for(request)
    # "n" and "stop" are words of English too.
    return request_field(next((each for each in named if each in asked or (not asked and "_" in each)), None))


def _asked_for(request: GenerationRequest) -> set[str]:
    """Names of the parameters that a request sets to something else than what holds without it."""
    default = sampling_fields(GenerationRequest(request.request_id, request.prompt))
    given = {**sampling_fields(request), **request.engine_params}
    return {name for name, value in given.items() if default.get(name) != value}
