"""vLLM's processing of an engine's outputs, without the engine."""

import time
from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as VllmFinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.outputs import LogprobsLists

from genserve.engine.generation import FinishReason, GenerationRequest, WeightSpan
from genserve.engine.vllm.requests.build import sampling_fields
from genserve.engine.vllm.requests.outputs import StreamedOutputs
from genserve.engine.vllm.requests.stream import VllmStream
from genserve.errors import GenserveError

VOCABULARY = 200
PROMPT = [5, 6, 7]


class Step(NamedTuple):
    """What the engine says of one sequence."""

    index: int
    token_ids: list[int]
    version: str
    finish: VllmFinishReason | None = None
    stop: int | None = None


def logprobs_of(token_ids: list[int], width: int) -> LogprobsLists:
    """As many alternatives as some request of the step asked for; the token itself is the first entry."""
    rows = [[token, *((token + i) % VOCABULARY for i in range(width))] for token in token_ids]
    values = np.array([[-float(entry) - i / 4 for i, entry in enumerate(row)] for row in rows], np.float32)
    return LogprobsLists(np.array(rows, np.int32), values, np.array([1 + t % 9 for t in token_ids], np.int32))


class Processing:
    """vLLM's processing of the outputs of one request, with our states (`lean`) or as it is."""

    def __init__(self, tokenizer: Any, request: GenerationRequest, *, lean: bool) -> None:
        self.processor = (StreamedOutputs if lean else OutputProcessor)(tokenizer, log_stats=False)
        kind = RequestOutputKind.FINAL_ONLY if request.output.stream_interval == 0 else RequestOutputKind.DELTA
        fields = sampling_fields(request)
        params = SamplingParams(output_kind=kind, flat_logprobs=True, **fields)
        core = EngineCoreRequest(
            "r-internal", PROMPT, None, params, None, time.time(), None, None, None, external_req_id=request.request_id
        )
        self.collector = RequestOutputCollector(kind, core.request_id)
        self.ids = [core.request_id]
        self.ended: list[str] = []
        self.served: list[Sequence[WeightSpan]] = []
        if lean:
            self.stream = VllmStream(request, self)
            self.processor.streams[request.request_id] = self.stream
        if params.n == 1:
            self.processor.add_request(core, None, None, 0, self.collector)
        else:
            parent = ParentRequest(core)
            self.ids = []
            for index in range(params.n):
                child = copy(core)
                child.request_id, child.sampling_params = parent.get_child_info(index)
                self.ids.append(child.request_id)
                self.processor.add_request(child, None, parent, index, self.collector)
        if lean:
            del self.processor.streams[request.request_id]
            self.stream.admitted("r-internal", FinishReason.ABORTED)

    # As an intake, for the stream:

    is_dead = False

    async def end(self, stream: VllmStream) -> None:
        self.processor.abort_requests([stream.internal_id], internal=True)

    def forget(self, request_id: str) -> None:
        self.ended.append(request_id)

    def failure(self, error: Exception) -> GenserveError:
        return GenserveError(f"translated: {error}")

    def count_served(self, spans: Sequence[WeightSpan]) -> None:
        self.served.append(spans)

    def step(self, *steps: Step, width: int | None = None) -> None:
        """One step of the engine, whose rows of log-probabilities are so wide; sequences that have ended are not
        there any more."""
        for each in steps:
            output = EngineCoreOutput(
                self.ids[each.index],
                list(each.token_ids),
                new_logprobs=logprobs_of(each.token_ids, width) if each.token_ids and width is not None else None,
                finish_reason=each.finish,
                stop_reason=each.stop,
            )
            self.processor.process_outputs([output], time.monotonic(), None, weight_version=each.version)
