"""vLLM's AsyncLLM behind the Engine protocol. The only file, with `genserve.worker`, that imports vllm.

What vLLM does not offer in public is used in few places, each marked "internal": tests/engine/test_internals.py fails
when a new vLLM moves one.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.envs import enable_envs_cache
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

from genserve.engine import vllm_config
from genserve.engine.base import (
    ArenaRef,
    EngineInfo,
    KvPolicy,
    Load,
    PauseCounts,
    PauseMode,
    StagedTensor,
    WeightDigest,
)
from genserve.engine.generation import ChatPrompt, FinishReason, GenerationRequest, TextPrompt
from genserve.engine.liveness import Liveness
from genserve.engine.load import LoadMeter
from genserve.engine.loras import LiveLoras
from genserve.engine.prompts import PromptCodec
from genserve.engine.sampling import request_field, sampling_fields
from genserve.engine.stream import VllmStream
from genserve.engine.weights import LiveTransfer, LiveWeights
from genserve.engine.workers import Workers
from genserve.errors import (
    EngineDeadError,
    GenserveError,
    InvalidFieldError,
    PromptTooLongError,
    QueueFullError,
    RequestIdInUseError,
    UnsupportedError,
    WeightVersionMismatchError,
)

_ATTACH_TIMEOUT_S = 120.0
_UNDO_TIMEOUT_S = 30.0
_SHUTDOWN_TIMEOUT_S = 10.0
_PARAMETERS = frozenset(f.name for f in msgspec.structs.fields(SamplingParams) if not f.name.startswith("_"))


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """`max_active_requests`: requests admitted and unfinished, above which new ones are refused; `weight_update`: auto,
    beside or inplace."""

    max_active_requests: int
    weight_update: str = "auto"


class VllmEngine:
    """AsyncLLM, its requests and its workers. Made by `start`."""

    def __init__(self, llm: AsyncLLM, meter: LoadMeter, options: EngineOptions) -> None:
        config = llm.vllm_config
        parallel = config.parallel_config
        self._llm = llm
        self._meter = meter
        self._options = options
        # internal: ends the streams as vLLM does when its engine has died.
        self._liveness = Liveness(lambda: llm.output_processor.propagate_error(VllmEngineDeadError()))
        self._prompts = PromptCodec(llm.get_tokenizer())
        self._streams: dict[str, VllmStream | None] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._info = vllm_config.info(config)
        workers = Workers(llm.engine_core, self._liveness, parallel.world_size * parallel.data_parallel_size)
        self._weights = LiveWeights(llm, self._liveness, workers)
        self.transfer = LiveTransfer(self._weights)
        self.loras = LiveLoras(workers, self._info.max_loras)

    @classmethod
    async def start(cls, args: AsyncEngineArgs, options: EngineOptions) -> "VllmEngine":
        """Starts the engine processes and makes every worker ready for pushes. Call before any gRPC object exists."""
        meter = LoadMeter()
        llm = AsyncLLM.from_engine_args(vllm_config.adapted(args), stat_loggers=[meter])
        engine = cls(llm, meter, options)
        try:
            assert llm.output_handler is not None  # internal: the task that ends when EngineCore dies
            llm.output_handler.add_done_callback(lambda _: engine._liveness.declare_dead())
            chosen = await engine._weights.attach(options.weight_update, _ATTACH_TIMEOUT_S)
            engine._info = replace(engine._info, weight_update=chosen)
            # vLLM asks the environment about something for every token, in this process only.
            enable_envs_cache()
        except BaseException:
            await engine.stop()
            raise
        return engine

    async def stop(self) -> None:
        """Ends the engine processes."""
        self._weights.close()
        self.loras.close()
        self._prompts.close()
        await asyncio.to_thread(self._llm.shutdown, _SHUTDOWN_TIMEOUT_S)

    @property
    def info(self) -> EngineInfo:
        """What it serves."""
        return self._info

    @property
    def weight_version(self) -> int:
        """Version of the weights served."""
        return self._weights.version

    @property
    def checkpoint_directory(self) -> Path | None:
        """Where the checkpoint's files lie, if they lie on this machine."""
        return vllm_config.checkpoint_directory(self._llm.vllm_config)

    async def wait_dead(self) -> None:
        """Returns when the engine has died."""
        await self._liveness.wait_dead()

    def load(self) -> Load:
        """What it has to do now."""
        return self._meter.load(self._llm.get_num_unfinished_requests())

    async def submit(self, request: GenerationRequest) -> VllmStream:
        """Admits a request."""
        if self._liveness.dead:
            raise EngineDeadError("the engine has died")
        if request.min_weight_version is not None and self.weight_version < request.min_weight_version:
            raise WeightVersionMismatchError(
                f"version {self.weight_version} is served, the request needs {request.min_weight_version}",
                metadata={"weight_version": str(self.weight_version)},
            )
        if request.request_id in self._streams:
            raise RequestIdInUseError(f"a request {request.request_id!r} is running")
        if len(self._streams) >= self._options.max_active_requests:
            raise QueueFullError(
                f"{len(self._streams)} requests are running or waiting, which is the limit", retry_after_s=1.0
            )
        self._streams[request.request_id] = None  # the id is taken from here on
        self._idle.clear()
        try:
            stream = self._streams[request.request_id] = await self._admit(request)
        except BaseException:
            self._forget(request.request_id)
            raise
        return stream

    async def _admit(self, request: GenerationRequest) -> VllmStream:
        ids = await self._prompts.encode(request.prompt)
        if len(ids) >= self._info.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {len(ids)} tokens; with at least one token of output the context holds "
                f"{self._info.max_model_len}",
                metadata={"num_tokens": str(len(ids)), "max_model_len": str(self._info.max_model_len)},
            )
        try:
            params = self._sampling_params(request)
            collector = await self._llm.add_request(
                request.request_id,
                tokens_input(ids, cache_salt=request.cache_salt or None),
                params,
                lora_request=self._lora(request),
                priority=request.priority,
                data_parallel_rank=request.data_parallel_rank,
            )
        except VLLMValidationError as error:
            raise InvalidFieldError.of(_field_of(error), error.args[0]) from error
        except (VllmEngineDeadError, VLLMClientError, ValueError, TypeError, OverflowError) as error:
            raise _translated(error) from error
        except asyncio.CancelledError:
            await asyncio.shield(self._llm.abort(request.request_id))
            raise
        # internal: vLLM's states by sequence, for the live starts of the weight spans.
        processor = self._llm.output_processor
        internal_ids = processor.external_req_ids.get(request.request_id, ())
        states = [processor.request_states[i] for i in internal_ids if i in processor.request_states]
        by_index = {state.request_index: state for state in states}
        return VllmStream(request, collector, by_index, self._abort_stream, self._forget, _failure)

    def _sampling_params(self, request: GenerationRequest) -> SamplingParams:
        fields = sampling_fields(request, _PARAMETERS)
        chunked = self._llm.vllm_config.scheduler_config.enable_chunked_prefill
        if "seed" in fields and chunked and self._info.device == "cpu":
            # See vllm_config.adapted: it would kill the engine.
            raise InvalidFieldError.of("sampling.seed", "cannot be used on the CPU with --enable-chunked-prefill")
        if request.output.prompt_logprobs is not None and self._info.max_loras and self._info.device == "cpu":
            # vLLM 0.32 kills its engine: on the CPU its LoRA layers take the prompt's tokens for the batch's requests.
            raise InvalidFieldError.of("output.prompt_logprobs", "cannot be had on the CPU with --enable-lora")
        if request.constraint is not None:
            fields["structured_outputs"] = StructuredOutputsParams(
                **{request.constraint.kind.value: request.constraint.value}
            )
        interval = request.output.stream_interval
        kind = RequestOutputKind.FINAL_ONLY if interval == 0 else RequestOutputKind.DELTA
        return SamplingParams(output_kind=kind, skip_clone=True, **fields)

    def _lora(self, request: GenerationRequest) -> LoRARequest | None:
        if not request.lora_name:
            return None
        lora = self.loras.use(request.lora_name, request.request_id)
        return LoRARequest(lora.unique_name, lora.lora_id, lora.files.directory)

    async def _abort_stream(self, stream: VllmStream) -> None:
        if not self._liveness.dead:
            await self._llm.abort(stream.collector.request_id, internal=True)

    def _forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        self.loras.release(request_id)
        if not self._streams:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Returns when no request is left."""
        await self._idle.wait()

    async def abort(self, request_ids: Sequence[str] | None) -> tuple[list[str], list[str]]:
        """Ends requests with reason ABORTED."""
        wanted = list(self._streams) if request_ids is None else list(request_ids)
        running = {i: stream for i in wanted if (stream := self._streams.get(i)) is not None}
        for stream in running.values():
            stream.end_soon(FinishReason.ABORTED)
        return list(running), [i for i in wanted if i not in running]

    async def tokenize(self, prompt: TextPrompt | ChatPrompt, add_special_tokens: bool) -> list[int]:
        """Token ids of a prompt."""
        return await self._prompts.encode(prompt, add_special_tokens=add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of token ids."""
        return await self._prompts.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def pause(self, mode: PauseMode, kv_policy: KvPolicy, timeout_s: float) -> PauseCounts:
        """Stops scheduling."""
        before = [stream for stream in self._streams.values() if stream is not None]
        if mode is PauseMode.ABORT:
            for stream in before:
                stream.reason_if_aborted(FinishReason.PAUSED)
        # internal: AsyncLLM.pause_generation does just this and then sleeps for 20 ms.
        await self._liveness.call(
            self._llm.engine_core.pause_scheduler_async(mode.value, kv_policy is KvPolicy.RECOMPUTE),
            what="pause",
            timeout_s=timeout_s,
        )
        kept = sum(stream is not None for stream in self._streams.values()) if mode is not PauseMode.ABORT else 0
        return PauseCounts(kept=kept, aborted=len(before) if mode is PauseMode.ABORT else 0)

    async def resume(self, timeout_s: float) -> None:
        """Schedules again."""
        await self._liveness.call(self._llm.resume_generation(), what="resume", timeout_s=timeout_s)

    async def sleep(self, mode: PauseMode, timeout_s: float) -> None:
        """Gives the device's memory back."""
        if self._info.device != "cpu" and not self._llm.vllm_config.model_config.enable_sleep_mode:
            raise UnsupportedError("the daemon was started without --enable-sleep-mode")
        try:
            # Level 2 would throw the weights away.
            await self._liveness.call(self._llm.sleep(level=1, mode=mode.value), what="sleep", timeout_s=timeout_s)
        except BaseException:
            if not self._liveness.dead:
                await asyncio.shield(self.wake_up(_UNDO_TIMEOUT_S))
            raise

    async def wake_up(self, timeout_s: float) -> None:
        """Takes the memory again, and schedules."""
        await self._liveness.call(self._llm.wake_up(), what="wake-up", timeout_s=timeout_s)

    async def reset_prefix_cache(self, reset_running_requests: bool, timeout_s: float) -> bool:
        """Drops the prefix cache."""
        return await self._liveness.call(
            self._llm.reset_prefix_cache(reset_running_requests=reset_running_requests),
            what="reset of the prefix cache",
            timeout_s=timeout_s,
        )

    async def prepare_weights(
        self, nonce: str, arena: ArenaRef, tensors: Sequence[StagedTensor], timeout_s: float
    ) -> None:
        """Builds a version beside the live one on every rank."""
        await self._weights.prepare(nonce, arena, tensors, timeout_s)

    async def commit_weights(self, nonce: str, version: int, timeout_s: float) -> None:
        """Exchanges live and prepared weights on every rank and labels later tokens."""
        await self._weights.commit(nonce, version, timeout_s)

    async def discard_weights(self, nonce: str, timeout_s: float) -> None:
        """Frees the version that is not live."""
        await self._weights.discard(nonce, timeout_s)

    async def weight_digests(self, timeout_s: float) -> list[WeightDigest]:
        """Digests of every live tensor on every rank."""
        return await self._weights.digests(timeout_s)


def _failure(error: Exception) -> GenserveError:
    """What ended a stream that had begun."""
    if isinstance(error, VllmEngineDeadError):
        return EngineDeadError("the engine has died")
    return GenserveError(f"the engine failed: {type(error).__name__}: {error}")


def _field_of(error: VLLMValidationError) -> str:
    """Path of the field that vLLM complains about; for some it says only what it is about."""
    text = str(error).lower()
    if error.parameter is None and "data_parallel_rank" in text:
        return "data_parallel_rank"
    if error.parameter is None and any(word in text for word in ("grammar", "json", "regex", "choice", "structur")):
        return "constraint"
    return request_field(error.parameter)


def _translated(error: Exception) -> GenserveError:
    if isinstance(error, VllmEngineDeadError):
        return EngineDeadError("the engine has died")
    return InvalidFieldError.of("request", str(error))
