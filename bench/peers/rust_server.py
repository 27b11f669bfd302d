"""vLLM's server in Rust, in front of the same engine: HTTP, and the gRPC service `vllm.Inference`.

The wheel has the service without its definition. What of it is asked for and read is defined here by its field numbers.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from bench import engines, rust_front_end
from bench.peers.http_calls import HttpCalls
from bench.processes import PeerProcess
from bench.traces import Trace, Work, closed_loop
from tests.support.ports import free_port

_FIELDS: dict[str, tuple[tuple[str, str, int], ...]] = {
    "TokenIds": (("ids", "uint32 repeated", 1),),
    "StoppingCriteria": (("max_new_tokens", "uint32", 1), ("ignore_eos", "bool", 6)),
    "ResponseOptions": (("output_text", "bool", 4), ("output_token_ids", "bool", 5), ("output_logprobs", "bool", 6)),
    "GenerateRequest": (
        ("request_id", "string", 1),
        ("token_ids", "TokenIds", 4),
        ("temperature", "float", 5),
        ("stopping", "StoppingCriteria", 8),
        ("response", "ResponseOptions", 9),
    ),
    "SequenceOutput": (("text", "string", 2), ("token_ids", "uint32 repeated", 4), ("logprobs", "float repeated", 5)),
    "GenerateResponse": (("outputs", "SequenceOutput", 2),),
}
"""Message -> its fields: name, type, number. proto2, so that a zero that is set is sent."""
_PACKAGE = "bench.rust"
_FIELD = descriptor_pb2.FieldDescriptorProto
_TYPES = {
    "string": _FIELD.TYPE_STRING,
    "uint32": _FIELD.TYPE_UINT32,
    "float": _FIELD.TYPE_FLOAT,
    "bool": _FIELD.TYPE_BOOL,
}


class RustServer:
    """`vllm serve` with VLLM_USE_RUST_FRONTEND and --grpc-port."""

    peers: ClassVar[tuple[str, ...]] = (
        "rust_http",
        "rust_http_bare",
        "rust_http_tokens",
        "rust_http_final",
        "rust_grpc",
        "rust_grpc_final",
    )
    without_text: ClassVar[tuple[str, ...]] = ("rust_http_tokens",)
    is_own_client: ClassVar[bool] = False
    pid = 0
    _process: PeerProcess
    _calls: HttpCalls
    _channel: grpc.aio.Channel
    _num_runs = 0

    async def start(self, checkpoint: Path, directory: Path, stack: AsyncExitStack, flags: Sequence[str] = ()) -> None:
        """Starts it, and waits until /health answers."""
        port, grpc_port = free_port(), free_port()
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint), "--host", "127.0.0.1"]
        command += ["--port", str(port), "--grpc-port", str(grpc_port), *engines.flags(), *flags, "--enable-scale-out"]
        environment = {**engines.ENVIRONMENT, **rust_front_end.environment()}
        self._process = PeerProcess("vLLM's Rust front end", command, directory / "rust.log", environment)
        stack.callback(self._process.stop)
        self.pid = self._process.pid
        self._calls = HttpCalls(port, str(checkpoint))
        stack.push_async_callback(self._calls.close)
        self._channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}"))
        await self._process.wait_until(self._calls.is_serving)

    async def generate(self, peer: str, work: Work) -> list[Trace]:
        """One POST, or one call, for each request."""
        if peer.startswith("rust_http"):
            return await self._calls.generate(peer, work)
        messages = messages_of_vllm()
        serialize, parse = messages["GenerateRequest"].SerializeToString, messages["GenerateResponse"].FromString
        path = "/vllm.Inference/GenerateStream"
        method: Any = self._channel.unary_stream(path, request_serializer=serialize, response_deserializer=parse)
        if work.final_only:
            path = "/vllm.Inference/Generate"
            method = self._channel.unary_unary(path, request_serializer=serialize, response_deserializer=parse)
        self._num_runs += 1
        stopping = messages["StoppingCriteria"](max_new_tokens=work.max_tokens, ignore_eos=True)
        response = messages["ResponseOptions"](
            output_text=work.text, output_token_ids=True, output_logprobs=work.logprobs
        )

        async def stream(number: int, prompt: list[int]) -> Trace:
            request = messages["GenerateRequest"](
                request_id=f"{self._num_runs}-{number}",
                token_ids=messages["TokenIds"](ids=prompt),
                temperature=0.0,
                stopping=stopping,
                response=response,
            )
            trace = Trace(time.monotonic())
            call = method(request)
            if work.final_only:
                _add(trace, await call, work)
                return trace
            while (message := await call.read()) is not grpc.aio.EOF:
                _add(trace, message, work)
            return trace

        return await closed_loop(work, stream)


def _add(trace: Trace, message: Any, work: Work) -> None:
    output = message.outputs
    if output.token_ids:
        trace.arrived_at.append(time.monotonic())
        trace.token_ids += output.token_ids
    if work.logprobs:
        trace.logprobs += output.logprobs
    if work.text:
        trace.texts.append(output.text)


@cache
def messages_of_vllm() -> dict[str, Any]:
    """The classes of the messages. In a pool of their own, where they clash with nobody's."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto2")
    for message_name, fields in _FIELDS.items():
        message = file.message_type.add(name=message_name)
        for name, kind, number in fields:
            base, _, repeated = kind.partition(" ")
            label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
            field = message.field.add(name=name, number=number, label=label)
            if base in _TYPES:
                field.type = _TYPES[base]
                field.options.packed = bool(repeated)
            else:
                field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{_PACKAGE}.{base}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _FIELDS}
