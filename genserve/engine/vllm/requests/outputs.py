"""vLLM's client, and its processing of outputs, which go to the streams of requests.

vLLM makes a RequestOutput and a CompletionOutput for each token of each request, keeps all tokens and log-probabilities
of a request until it ends, and copies its text for every token. `StreamedOutputs` keeps a `StreamedSequence` instead of
vLLM's state of a sequence, from before it has any output. Whatever else vLLM does with its outputs stays vLLM's.
"""

from typing import Any

from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor

from genserve.engine.vllm.requests.stream import StreamedSequence, VllmStream


class StreamedOutputs(OutputProcessor):
    """Gives the outputs of requests in `streams` to these."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.streams: dict[str, VllmStream] = {}
        """Of the requests that are being added, by our ids."""

    def add_request(self, request: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
        """As vLLM's, for each sequence of a request before EngineCore gets it."""
        super().add_request(request, *args, **kwargs)
        if (stream := self.streams.get(request.external_req_id or "")) is not None:
            states = self.request_states
            states[request.request_id] = StreamedSequence(states[request.request_id], stream)


class StreamingLLM(AsyncLLM):
    """AsyncLLM with StreamedOutputs. Its constructor takes no processor of outputs, and may start the task that gives
    them to the one that it has made: so ours takes the place of that one when it is set."""

    @property
    def output_processor(self) -> StreamedOutputs:
        """Of all outputs that come to this client."""
        return self._streamed

    @output_processor.setter
    def output_processor(self, made: OutputProcessor) -> None:
        self._streamed = StreamedOutputs(
            made.tokenizer,
            log_stats=made.log_stats,
            stream_interval=made.stream_interval,
            tracing_enabled=made.tracing_enabled,
            admission_stats=made.admission_stats,
        )
