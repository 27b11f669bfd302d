"""A driver on grpcio, the generated stubs and the standard library: what a client in a new language has to do.

It reads a scenario from standard input and prints a line of JSON for each step. checkpoint.py reads safetensors and
lays out the bytes of a push, transfers.py resumes, crc32c.py computes checksums.
"""

import json
import queue
import sys
import time
import uuid
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from clients.conformance.drivers.checkpoint import Checkpoint
from clients.conformance.drivers.crc32c import crc32c
from clients.conformance.drivers.transfers import LOOK_UP_TIMEOUT_S, Pulled, Ranges, Resumes, num_bytes, pauses, split
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
OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.service_config", (files("genserve.v1") / "service_config.json").read_text()),
]
STANDS_FOR = {"RESOURCE_EXHAUSTED": "MESSAGE_TOO_LARGE", "UNIMPLEMENTED": "UNSUPPORTED", "CANCELLED": "UNAVAILABLE"}
"""Status codes of gRPC itself, without details, and the reasons of the daemon that say the same."""
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

    def push(self, checkpoint: str, version: int, push_id: str, num_streams: int = 1, **options: Any) -> Result:
        tensors, lora = read(checkpoint, options.get("lora_name"))
        header = weights_pb2.PushHeader(push_id=push_id, weight_version=version, lora=lora, num_streams=num_streams)
        header.attempt = str(uuid.uuid4())
        header.manifest.CopyFrom(tensors.manifest(options.get("partial", False)))
        header.action = weights_pb2.PushAction.Value(f"PUSH_ACTION_{options.get('action', 'apply').upper()}")
        if "expected_version" in options:
            header.expected_version = options["expected_version"]
        is_dry_run = header.action == weights_pb2.PUSH_ACTION_VALIDATE
        everything: Ranges = [] if is_dry_run else [(0, tensors.total_bytes)]
        missing, resumes = everything, Resumes(num_bytes(everything))
        while True:
            try:
                return push_of(self._send(header, tensors, missing))
            except grpc.RpcError as error:
                if not has_broken(error):
                    raise
                missing = self._missing(header, everything)
                if not resumes.wait(num_bytes(missing)):
                    raise

    def push_streams(self, **push: Any) -> Result:
        return self.push(**push)

    def _send(self, header: Any, tensors: Checkpoint, ranges: Ranges) -> Any:
        """The answer, which all streams get. The first stream that fails ends the others."""
        ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        calls = []
        try:
            for part in split(ranges, header.num_streams):
                calls.append(self._call(self._weights.PushWeights.future, frames(header, tensors, part)))
                calls[-1].add_done_callback(ended.put)
            for _ in calls:
                if (call := ended.get()).code() is not grpc.StatusCode.OK:
                    raise call
            return call.result()
        finally:
            for call in calls:
                call.cancel()

    def _missing(self, header: Any, everything: Ranges) -> Ranges:
        """What the daemon lacks of this attempt: everything if it has forgotten the push, or knows another attempt."""
        ends_s, pauses_s = time.monotonic() + LOOK_UP_TIMEOUT_S, pauses()
        request = weights_pb2.GetPushRequest(push_id=header.push_id)
        while True:
            try:
                push = self._call(self._weights.GetPush, request, LOOK_UP_TIMEOUT_S, wait_for_ready=True).push
                is_own = push.attempt == header.attempt
                return [(each.start, each.end) for each in push.missing] if is_own else everything
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.NOT_FOUND:
                    return everything
                if not has_broken(error) or time.monotonic() > ends_s:
                    raise
            time.sleep(next(pauses_s))

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

    def pull(self, version: int | None = None) -> Result:
        pulled = Pulled(version)
        resumes: Resumes | None = None
        while True:
            broken: Result = {"error": {"reason": "PUSH_TRUNCATED"}}  # it has ended, without an end
            try:
                for message in self._call(self._weights.PullWeights, pulled.request()):
                    if message.HasField("end"):
                        return {"version": pulled.version, "sha256": pulled.sha256()}
                    if (wrong := pulled.add(message)) is not None:
                        return {"error": {"reason": wrong}}
            except grpc.RpcError as error:
                if not has_broken(error):
                    raise
                broken = error_of(error)
            if (missing_bytes := pulled.missing_bytes) is None:
                return broken
            if missing_bytes == 0:
                return {"version": pulled.version, "sha256": pulled.sha256()}
            resumes = resumes or Resumes(missing_bytes)
            if not resumes.wait(missing_bytes):
                return broken

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


def has_broken(error: Any) -> bool:
    """Whether a transfer that has failed like this can go on."""
    if details_of(error):
        return bool(error_of(error)["error"]["reason"] == "PUSH_TRUNCATED")
    return error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


def error_of(error: Any) -> Result:
    details = details_of(error)
    code: int = error.code().value[0]
    return error_of_status(status_pb2.Status.FromString(details) if details else status_pb2.Status(code=code))


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
    name = next(each.name for each in grpc.StatusCode if each.value[0] == code)
    return STANDS_FOR.get(name, name)


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
