"""A driver on grpcio, the generated stubs and the standard library: what a client in a new language has to do.

It reads a scenario from standard input and prints a line of JSON for each step. checkpoint.py reads safetensors and
makes the frames of a push, crc32c.py computes checksums.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from clients.conformance.drivers.checkpoint import Checkpoint
from clients.conformance.drivers.crc32c import crc32c
from genserve.v1 import (
    control_pb2,
    control_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    types_pb2,
    weights_pb2,
    weights_pb2_grpc,
)

Result = dict[str, Any]
TIMEOUT_S = 50.0
MIN_RESUMES, RESUME_TIMEOUT_S = 5, 30.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 3.2
OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.service_config", (files("genserve.v1") / "service_config.json").read_text()),
]
NOT_IMPLEMENTED: Result = {"error": {"reason": "NOT_IMPLEMENTED"}}


class Steps:
    """One method for each step of a scenario."""

    def __init__(self, channel: grpc.Channel, token: str | None) -> None:
        self._metadata = [("authorization", f"Bearer {token}")] if token else []
        self._generation = generation_pb2_grpc.GenerationServiceStub(channel)
        self._weights = weights_pb2_grpc.WeightServiceStub(channel)
        self._control = control_pb2_grpc.ControlServiceStub(channel)
        self._leases: dict[str, str] = {}

    def _call(self, method: Any, request: Any, timeout_s: float = TIMEOUT_S, **options: Any) -> Any:
        return method(request, timeout=timeout_s, metadata=self._metadata, **options)

    def generate(self, prompt: Result, options: Result) -> Result:
        return self.stream(prompt, options)

    def stream(self, prompt: Result, options: Result, cancel_after_tokens: int | None = None) -> Result:
        timeout_s = options.get("timeout_ms", 1000 * TIMEOUT_S) / 1000
        deltas = self._call(self._generation.Generate, request_of(prompt, options), timeout_s)
        generation = Generation()
        for message in deltas:
            generation.add(message)
            if cancel_after_tokens is not None and generation.num_tokens >= cancel_after_tokens:
                deltas.cancel()
                return {"cancelled": True, "num_tokens": generation.num_tokens}
        return generation.result()

    def generate_many(self, requests: list[Result], form: Any = generation_pb2.GENERATE_MANY_FORM_ITEMS) -> Result:
        messages = []
        for i, request in enumerate(requests):
            message = request_of(request["prompt"], request["options"])
            message.request_id = message.request_id or f"conformance-{i}"
            messages.append(generation_pb2.GenerateManyRequest(generate=message, form=form))
        generations = {message.generate.request_id: Generation() for message in messages}
        errors: dict[str, Result] = {}
        slots: dict[int, tuple[Generation, int]] = {}
        for response in self._call(self._generation.GenerateMany, iter(messages)):
            for columns in response.columns:
                add_columns(slots, columns)
            for item in response.items:
                generation = generations[item.request_id]
                slots.update({slot: (generation, index) for index, slot in enumerate(item.slots)})
                if item.HasField("error"):
                    errors[item.request_id] = error_of_status(item.error)
                else:
                    generation.add(item.response)
        results = {request_id: generation.result() for request_id, generation in generations.items()}
        return {"generations": list({**results, **errors}.values())}

    def generate_columns(self, requests: list[Result]) -> Result:
        return self.generate_many(requests, generation_pb2.GENERATE_MANY_FORM_COLUMNS)

    def push(self, checkpoint: str, version: int, push_id: str, **options: Any) -> Result:
        tensors, lora = read(checkpoint, options.get("lora_name"))
        header = weights_pb2.PushHeader(push_id=push_id, weight_version=version, attempt=push_id, lora=lora)
        header.manifest.CopyFrom(tensors.manifest(options.get("partial", False)))
        header.action = weights_pb2.PushAction.Value(f"PUSH_ACTION_{options.get('action', 'apply').upper()}")
        if "expected_version" in options:
            header.expected_version = options["expected_version"]
        missing, least_bytes = [(0, tensors.total_bytes)], tensors.total_bytes
        num_in_vain, pause_s, ends_s = 0, FIRST_PAUSE_S, time.monotonic() + RESUME_TIMEOUT_S
        while True:
            try:
                return push_of(self._call(self._weights.PushWeights, frames(header, tensors, missing)))
            except grpc.RpcError as error:
                is_broken = error.code() == grpc.StatusCode.UNAVAILABLE and not details_of(error)
                if not is_broken or (num_in_vain >= MIN_RESUMES and time.monotonic() > ends_s):
                    raise
            missing = self._missing(push_id, tensors)
            if (missing_bytes := sum(end - start for start, end in missing)) < least_bytes:
                least_bytes = missing_bytes
                num_in_vain, pause_s, ends_s = 0, FIRST_PAUSE_S, time.monotonic() + RESUME_TIMEOUT_S
            time.sleep(pause_s)
            num_in_vain, pause_s = num_in_vain + 1, min(2 * pause_s, LONGEST_PAUSE_S)

    def _missing(self, push_id: str, tensors: Checkpoint) -> list[tuple[int, int]]:
        """What the daemon lacks of this attempt; everything if it has forgotten the push."""
        ends_s = time.monotonic() + RESUME_TIMEOUT_S
        request = weights_pb2.GetPushRequest(push_id=push_id)
        while True:
            try:
                push = self._call(self._weights.GetPush, request, RESUME_TIMEOUT_S, wait_for_ready=True).push
                return [(each.start, each.end) for each in push.missing]
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.NOT_FOUND:
                    return [(0, tensors.total_bytes)]
                if error.code() != grpc.StatusCode.UNAVAILABLE or time.monotonic() > ends_s:
                    raise
            time.sleep(FIRST_PAUSE_S)

    def commit(self, push_id: str) -> Result:
        return push_of(self._call(self._weights.CommitPush, weights_pb2.CommitPushRequest(push_id=push_id)))

    def get_push(self, push_id: str) -> Result:
        return push_of(self._call(self._weights.GetPush, weights_pb2.GetPushRequest(push_id=push_id)))

    def discard(self, push_id: str) -> Result:
        answer = self._call(self._weights.DiscardPush, weights_pb2.DiscardPushRequest(push_id=push_id))
        return {"state": word(weights_pb2.PushState, answer.push.state)}

    def get_weights(self) -> Result:
        served = self._call(self._weights.GetWeights, weights_pb2.GetWeightsRequest())
        return {"version": served.weight_version, "tensors": len(served.manifest.tensors)}

    def pull(self, version: int) -> Result:
        header, space, is_complete = weights_pb2.PushHeader(), bytearray(), False
        for message in self._call(self._weights.PullWeights, weights_pb2.PullWeightsRequest(weight_version=version)):
            is_complete = message.HasField("end")
            if message.HasField("header"):
                header = message.header
                space = bytearray(header.manifest.total_bytes)
            elif message.HasField("chunk"):
                chunk = message.chunk
                if chunk.HasField("crc32c") and crc32c(chunk.data) != chunk.crc32c:
                    return {"error": {"reason": "CHECKSUM_MISMATCH"}}
                space[chunk.offset : chunk.offset + len(chunk.data)] = chunk.data
        if not is_complete:
            return {"error": {"reason": "PUSH_TRUNCATED"}}
        tensors = header.manifest.tensors
        sha256 = {t.name: hashlib.sha256(space[t.offset : t.offset + t.length]).hexdigest() for t in tensors}
        return {"version": header.weight_version, "sha256": sha256}

    def pause(self, name: str, holder: str, ttl_ms: int) -> Result:
        lease = self._call(self._control.Pause, control_pb2.PauseRequest(holder=holder, ttl=duration(ttl_ms))).lease
        self._leases[name] = lease.lease_id
        return {"holder": lease.holder}

    def renew(self, name: str, ttl_ms: int) -> Result:
        request = control_pb2.RenewPauseRequest(lease_id=self._leases[name], ttl=duration(ttl_ms))
        return {"holder": self._call(self._control.RenewPause, request).lease.holder}

    def resume(self, name: str) -> Result:
        answer = self._call(self._control.Resume, control_pb2.ResumeRequest(lease_id=self._leases[name]))
        return {"lease_expired": answer.lease_expired}

    def status(self) -> Result:
        state = self._call(self._control.GetStatus, control_pb2.GetStatusRequest()).state
        pauses = [lease.holder for lease in state.pauses]
        return {"phase": word(types_pb2.Phase, state.phase), "version": state.weight_version, "pauses": pauses}

    def list_loras(self) -> Result:
        answer = self._call(self._control.ListLoras, control_pb2.ListLorasRequest())
        versions = [lora.lora_version for lora in answer.loras]
        return {"names": [lora.lora_name for lora in answer.loras], "versions": versions}

    def unload_lora(self, lora_name: str) -> Result:
        self._call(self._control.UnloadLora, control_pb2.UnloadLoraRequest(lora_name=lora_name))
        return {}


class Generation:
    """The sum of the deltas of a request."""

    def __init__(self) -> None:
        self._sequences: dict[int, Result] = {}
        self._rest: Result = {}
        self.num_tokens = 0

    def add(self, message: Any) -> None:
        if message.request_id:
            self._rest["request_id"] = message.request_id
        if message.HasField("prompt"):
            self._rest["prompt"] = {"num_tokens": message.prompt.num_tokens}
        if message.HasField("usage"):
            self._rest["prompt_tokens"] = message.usage.num_prompt_tokens
            self._rest["output_tokens"] = message.usage.num_output_tokens
        for delta in message.outputs:
            self.num_tokens += len(delta.token_ids)
            sequence = self._sequences.setdefault(delta.index, {"token_ids": [], "text": "", "weight_spans": []})
            sequence["token_ids"] += delta.token_ids
            sequence["text"] += delta.text
            for span in delta.weight_spans:
                add_span(sequence["weight_spans"], span)
            if delta.HasField("logprobs"):
                values = [round(value, 4) for value in delta.logprobs.sampled]
                sequence["logprobs"] = sequence.get("logprobs", []) + values
            if delta.HasField("finish"):
                sequence["finish"] = word(generation_pb2.FinishReason, delta.finish.reason)
                sequence["num_tokens"] = delta.finish.num_tokens
                if delta.finish.HasField("stop_string"):
                    sequence["stop_string"] = delta.finish.stop_string

    def add_row(self, index: int, row: Result, version: int, lora_version: int) -> None:
        """What a row of columns brings, whose tokens follow those that the sequence had."""
        sequence = self._sequences.setdefault(index, {"token_ids": [], "text": "", "weight_spans": []})
        start = len(sequence["token_ids"])
        self.num_tokens += len(row["token_ids"])
        sequence["token_ids"] += row["token_ids"]
        sequence["text"] += row["text"]
        end = start + len(row["token_ids"])
        span = types_pb2.WeightSpan(version=version, start=start, end=end, lora_version=lora_version)
        if end > start:
            add_span(sequence["weight_spans"], span)
        if "logprobs" in row:
            sequence["logprobs"] = sequence.get("logprobs", []) + row["logprobs"]

    def result(self) -> Result:
        sequences = [sequence for _, sequence in sorted(self._sequences.items())]
        return {"sequences": sequences, **self._rest}


def add_columns(slots: dict[int, tuple[Generation, int]], columns: Any) -> None:
    """Row i is what the sequence in slots[i] gained."""
    start = 0
    for i, slot in enumerate(columns.slots):
        end = start + (columns.num_tokens[i] if columns.num_tokens else 1)
        row: Result = {
            "token_ids": list(columns.token_ids[start:end]),
            "text": columns.texts[i] if columns.texts else "",
        }
        if columns.HasField("logprobs"):
            row["logprobs"] = [round(value, 4) for value in columns.logprobs.sampled[start:end]]
        generation, index = slots[slot]
        generation.add_row(index, row, columns.weight_version, columns.lora_version)
        start = end


def add_span(spans: list[list[int]], new: Any) -> None:
    """Adjacent spans of one version are one. The version of an adapter is there if one has sampled."""
    of_adapter = [new.lora_version] if new.lora_version else []
    if spans and (spans[-1][0], spans[-1][2], spans[-1][3:]) == (new.version, new.start, of_adapter):
        spans[-1][2] = new.end
    else:
        spans.append([new.version, new.start, new.end, *of_adapter])


def request_of(prompt: Result, options: Result) -> Any:
    request = generation_pb2.GenerateRequest()
    if "token_ids" in prompt:
        request.token_ids.ids.extend(prompt["token_ids"])
    elif "text" in prompt:
        request.text = prompt["text"]
    else:
        request.chat.messages.extend(generation_pb2.ChatMessage(**message) for message in prompt["chat"])
    for part, names in (
        (request.sampling, ("temperature", "top_p", "n", "seed")),
        (request.stop, ("max_tokens", "ignore_eos")),
        (request.output, ("logprobs",)),
        (request, ("request_id", "lora_name", "min_weight_version")),
    ):
        for name in names:
            if name in options:
                setattr(part, name, options[name])
    request.stop.strings.extend(options.get("stop", []))
    return request


def read(path: str, lora_name: str | None) -> tuple[Checkpoint, Any]:
    """The tensors of a push, and the adapter of its header."""
    if lora_name is None:
        return Checkpoint(f"{path}/model.safetensors" if not path.endswith(".safetensors") else path), None
    with open(f"{path}/adapter_config.json", encoding="utf-8") as file:
        lora = weights_pb2.LoraAdapter(lora_name=lora_name, config=file.read())
    return Checkpoint(f"{path}/adapter_model.safetensors"), lora


def frames(header: Any, tensors: Checkpoint, ranges: list[tuple[int, int]]) -> Iterator[Any]:
    yield weights_pb2.PushWeightsRequest(header=header)
    for offset, data in tensors.chunks(ranges):
        chunk = weights_pb2.PushChunk(offset=offset, data=data, crc32c=crc32c(data))
        yield weights_pb2.PushWeightsRequest(chunk=chunk)
    yield weights_pb2.PushWeightsRequest(end=weights_pb2.PushEnd())


def push_of(message: Any) -> Result:
    push = message.push
    result = {"state": word(weights_pb2.PushState, push.state), "version": push.weight_version}
    result |= {"received_bytes": push.received_bytes, "total_bytes": push.total_bytes}
    if message.HasField("applied"):
        result["previous_version"] = message.applied.previous_version
        result["active_version"] = message.applied.active_version
    return result


def word(kind: Any, value: int) -> str:
    """The name of an enum value, without what all names of the enum begin with, in lower case. A value that this client
    does not know is its number."""
    if value not in kind.values():
        return f"unknown_{value}"
    prefix = kind.Name(0).removesuffix("UNSPECIFIED")
    return str(kind.Name(value).removeprefix(prefix).lower())


def duration(ms: int) -> Duration:
    return Duration(seconds=ms // 1000, nanos=ms % 1000 * 1_000_000)


def details_of(error: Any) -> bytes:
    trailers = dict(error.trailing_metadata() or ())
    return bytes(trailers.get("grpc-status-details-bin", b""))


def error_of(error: Any) -> Result:
    details = details_of(error)
    return (
        error_of_status(status_pb2.Status.FromString(details)) if details else {"error": {"reason": error.code().name}}
    )


def error_of_status(status: Any) -> Result:
    result: Result = {"reason": grpc_name(status.code)}
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo.FromString(detail.value)
            result["reason"] = info.reason if info.domain == "genserve" else result["reason"]
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            violations = error_details_pb2.BadRequest.FromString(detail.value).field_violations
            result["fields"] = [violation.field for violation in violations]
    return {"error": result}


def grpc_name(code: int) -> str:
    return next(each.name for each in grpc.StatusCode if each.value[0] == code)


def channel_to(scenario: Result) -> grpc.Channel:
    if "ca_file" not in scenario:
        return grpc.insecure_channel(scenario["address"], OPTIONS)
    with open(scenario["ca_file"], "rb") as file:
        return grpc.secure_channel(scenario["address"], grpc.ssl_channel_credentials(file.read()), OPTIONS)


def main() -> None:
    scenario = json.load(sys.stdin)
    with channel_to(scenario) as channel:
        steps = Steps(channel, scenario.get("token"))
        for step in scenario["steps"]:
            arguments = {name: value for name, value in step.items() if name != "do"}
            carry_out = getattr(steps, step["do"], None)
            try:
                result = carry_out(**arguments) if carry_out else NOT_IMPLEMENTED
            except grpc.RpcError as error:
                result = error_of(error)
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
