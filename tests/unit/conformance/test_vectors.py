"""The golden vectors: they are what their generator makes, and the client and the daemon hold to them."""

import json
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict, Parse
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.symbol_database import Default
from google.rpc import status_pb2

from clients.conformance.vectors import generate
from genserve.client import Generation
from genserve.client.generation.results import Delta
from genserve.client.weights.upload import END_FRAME
from genserve.tensors.checksum import crc32c_of
from genserve.tensors.chunk_frame import chunk_frame
from genserve.tensors.content import content_digest, tensor_digest
from genserve.tensors.manifest import Manifest
from genserve.transport.errors import error_of_status
from genserve.v1 import control_pb2, generation_pb2, weights_pb2

assert control_pb2 and weights_pb2  # whose messages are found by name below


def vectors(name: str) -> Any:
    """One file, as parameters of a test."""
    found = json.loads((generate.DIRECTORY / name).read_text())
    return pytest.mark.parametrize("vector", found, ids=[each.get("name", str(i)) for i, each in enumerate(found)])


@pytest.mark.parametrize("name", generate.FILES)
def test_the_files_are_what_the_generator_writes(name: str) -> None:
    assert (generate.DIRECTORY / name).read_text() == generate.written(generate.FILES[name]())


@vectors("crc32c.json")
def test_checksums(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"]) if "hex" in vector else generate.pattern(vector["pattern_bytes"])
    assert crc32c_of(data) == vector["crc32c"]


@vectors("frames.json")
def test_frames(vector: dict[str, Any]) -> None:
    if vector.get("end"):
        assert END_FRAME.hex() == vector["frame_hex"]
        return
    data = bytes.fromhex(vector["hex"]) if "hex" in vector else generate.pattern(vector["pattern_bytes"])
    frame = chunk_frame(vector["offset"], [data], crc32c_of(data) if vector["checksum"] else None)
    assert frame.hex() == vector["frame_hex"]


@vectors("manifests.json")
def test_manifests(vector: dict[str, Any]) -> None:
    """Wherever the tensors come from; the daemon computes the digest of the contents."""
    tensors = [(each["name"], each["dtype"], tuple(each["shape"]), each["length"]) for each in vector["tensors"]]
    manifest = Manifest.end_to_end(reversed(tensors))
    assert [spec.offset for spec in manifest.tensors] == [each["offset"] for each in vector["tensors"]]
    assert (manifest.total_bytes, manifest.digest) == (vector["total_bytes"], vector["manifest_digest"])
    space = b"".join(generate.pattern(each["length"], each["pattern_step"]) for each in vector["tensors"])
    digests = [(spec, tensor_digest(spec, lambda a, b: memoryview(space)[a:b])) for spec in manifest.tensors]
    assert content_digest(digests) == vector["content_digest"]


@vectors("errors.json")
def test_errors(vector: dict[str, Any]) -> None:
    """A reason or code that has no class is in the metadata."""
    error = error_of_status(status_pb2.Status.FromString(bytes.fromhex(vector["status_hex"])), "here:1")
    found = {**error.metadata}
    code = found.pop("code", None)
    reason = found.pop("reason", error.reason if type(error).reason != "INTERNAL" else code)
    assert (reason, found) == (vector["reason"], vector["metadata"])
    assert [[each.field, each.description] for each in error.violations] == vector["violations"]
    retry_after_ms = None if error.retry_after_s is None else 1000 * error.retry_after_s
    assert retry_after_ms == vector["retry_after_ms"]
    assert vector["message"] in error.message


@vectors("generations.json")
def test_generations(vector: dict[str, Any]) -> None:
    generation = Generation()
    for message in vector["responses_hex"]:
        generation.add(Delta(generation_pb2.GenerateResponse.FromString(bytes.fromhex(message))))
    found = []
    for sequence in generation.sequences:
        fields: dict[str, Any] = {"token_ids": sequence.token_ids, "text": sequence.text}
        spans = [list(span if span.lora_version else span[:3]) for span in sequence.weight_spans]
        fields |= {"weight_spans": spans, "finish": sequence.finish_reason}
        if sequence.finish is not None:
            stops = {"stop_string": sequence.finish.stop_string, "stop_token_id": sequence.finish.stop_token_id}
            fields |= {name: value for name, value in stops.items() if value is not None}
        if sequence.logprobs is not None:
            fields["logprobs"] = list(sequence.logprobs.sampled)
        found.append(fields)
    assert found == vector["sequences"]
    assert generation.request_id == "r"
    if "prompt" in vector:
        prompt = generation.prompt
        assert prompt is not None and prompt.logprobs is not None
        told = {"num_tokens": prompt.num_tokens, "token_ids": prompt.token_ids, "logprobs": prompt.logprobs.sampled}
        assert told == vector["prompt"]


@vectors("json.json")
def test_json_forms(vector: dict[str, Any]) -> None:
    message_class = GetMessageClass(Default().pool.FindMessageTypeByName(vector["message"]))
    message = message_class.FromString(bytes.fromhex(vector["hex"]))
    assert MessageToDict(message) == vector["json"]
    assert Parse(json.dumps(vector["json"]), message_class()) == message
