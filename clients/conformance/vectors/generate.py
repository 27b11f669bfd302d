"""Writes the golden vectors beside this file: python -m clients.conformance.vectors.generate.

The values come from protobuf's own encoder, hashlib and the definitions in the proto comments, not from a client. What
is written by hand are the inputs, and what a client must understand.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from google.protobuf import any_pb2, duration_pb2
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from clients.conformance.drivers.crc32c import crc32c
from clients.conformance.vectors.generations import generation_vectors
from genserve.v1 import control_pb2, generation_pb2, types_pb2, weights_pb2

Vectors = list[dict[str, Any]]
DIRECTORY = Path(__file__).parent
_ITEM_BYTES = {"F32": 4, "BF16": 2, "I64": 8, "F8_E4M3": 1}


def pattern(num_bytes: int, step: int = 7) -> bytes:
    """Byte i is i * step, modulo 251."""
    return bytes(i * step % 251 for i in range(num_bytes))


def crc32c_vectors() -> Vectors:
    """Of RFC 3720, appendix B.4, and longer ones."""
    rfc = {
        "32 zeros": (bytes(32), 0x8A9136AA),
        "32 times 255": (b"\xff" * 32, 0x62A8AB43),
        "0 to 31": (bytes(range(32)), 0x46DD794E),
        "31 to 0": (bytes(reversed(range(32))), 0x113FDB5C),
        "digits": (b"123456789", 0xE3069283),
        "nothing": (b"", 0),
    }
    for data, expected in rfc.values():
        assert crc32c(data) == expected
    vectors = [{"name": name, "hex": data.hex(), "crc32c": expected} for name, (data, expected) in rfc.items()]
    for num_bytes in (255, 65_537, (1 << 20) + 3):
        name = f"pattern of {num_bytes}"
        vectors.append({"name": name, "pattern_bytes": num_bytes, "crc32c": crc32c(pattern(num_bytes))})
    return vectors


def frame_vectors() -> Vectors:
    """Frames of PushWeights: the offset is left out where it is 0, as proto3 leaves out all zeros."""
    vectors: Vectors = []
    for offset in (0, 1, 127, 128, (1 << 20) + 5, (1 << 31) + 1, (1 << 40) + 3):
        for num_bytes in (1, 100, 300):
            for checksum in (True, False):
                data = pattern(num_bytes)
                chunk = weights_pb2.PushChunk(offset=offset, data=data)
                if checksum:
                    chunk.crc32c = crc32c(data)
                frame = weights_pb2.PushWeightsRequest(chunk=chunk).SerializeToString()
                fields = {"offset": offset, "pattern_bytes": num_bytes, "checksum": checksum}
                vectors.append({**fields, "frame_hex": frame.hex()})
    # A checksum of 0 is sent: the field is optional, so that a 0 is not the same as none.
    data = bytes.fromhex("ab9be09b")
    chunk = weights_pb2.PushChunk(offset=5, data=data, crc32c=crc32c(data))
    assert chunk.crc32c == 0
    frame = weights_pb2.PushWeightsRequest(chunk=chunk).SerializeToString()
    vectors.append({"offset": 5, "hex": data.hex(), "checksum": True, "frame_hex": frame.hex()})
    end = weights_pb2.PushWeightsRequest(end=weights_pb2.PushEnd()).SerializeToString()
    return [*vectors, {"end": True, "frame_hex": end.hex()}]


def manifest_vectors() -> Vectors:
    """Tensors end to end in order of the bytes of their names, and the digests that weights.proto defines."""
    cases: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {
        "two tensors": [("w", "BF16", (2, 3)), ("b", "F32", ())],
        "an empty tensor": [("a", "F32", (0, 4)), ("b", "I64", (3,))],
        "names beyond ASCII": [("\U00010000", "F32", (1,)), ("\uffff", "F32", (1,)), ("z", "F8_E4M3", (5,))],
        "more than two dimensions": [("experts", "BF16", (2, 3, 4, 5))],
    }
    vectors = []
    for name, tensors in cases.items():
        lines, contents, specs, end = b"", b"", [], 0
        for number, (tensor, dtype, shape) in enumerate(sorted(tensors, key=lambda each: each[0].encode())):
            num_bytes = _ITEM_BYTES[dtype]
            for size in shape:
                num_bytes *= size
            data, dimensions = pattern(num_bytes, number + 1), ",".join(map(str, shape))
            lines += f"{tensor}\t{dtype}\t{dimensions}\t{end}\t{num_bytes}\n".encode()
            contents += f"{tensor}\t{dtype}\t{dimensions}\t{hashlib.sha256(data).hexdigest()}\n".encode()
            spec = {"name": tensor, "dtype": dtype, "shape": list(shape), "offset": end, "length": num_bytes}
            specs.append({**spec, "pattern_step": number + 1})
            end += num_bytes
        digests = {"manifest_digest": hashlib.sha256(lines).hexdigest()}
        digests["content_digest"] = hashlib.sha256(contents).hexdigest()
        vectors.append({"name": name, "tensors": specs, "total_bytes": end, **digests})
    return vectors


def error_vectors() -> Vectors:
    """Statuses as they are in the trailer grpc-status-details-bin."""
    info, retry = error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo

    def status(code: int, message: str, *details: Message) -> status_pb2.Status:
        packed = [any_pb2.Any() for _ in details]
        for each, detail in zip(packed, details, strict=True):
            each.Pack(detail)
        return status_pb2.Status(code=code, message=message, details=packed)

    violation = error_details_pb2.BadRequest.FieldViolation(field="sampling.top_p", description="must be above 0")
    bad = error_details_pb2.BadRequest(field_violations=[violation])
    delay = retry(retry_delay=duration_pb2.Duration(seconds=1, nanos=500_000_000))
    invalid = info(reason="INVALID_FIELD", domain="genserve")
    changed = info(reason="CHECKSUM_MISMATCH", domain="genserve")
    foreign = info(reason="X", domain="x")
    broken = status(code_pb2.UNAVAILABLE, "x", invalid)
    broken.details[0].value = broken.details[0].value[:-1]
    elsewhere = status(code_pb2.RESOURCE_EXHAUSTED, "x", info(reason="QUEUE_FULL", domain="genserve"))
    elsewhere.details[0].type_url = "example.org/google.rpc.ErrorInfo"
    cases: list[tuple[str, status_pb2.Status, dict[str, Any]]] = [
        (
            "a wrong field",
            status(code_pb2.INVALID_ARGUMENT, "sampling.top_p: must be above 0", invalid, bad),
            {"reason": "INVALID_FIELD", "violations": [["sampling.top_p", "must be above 0"]]},
        ),
        (
            "when to try again, and values for programs",
            status(
                code_pb2.RESOURCE_EXHAUSTED,
                "too many",
                info(reason="QUEUE_FULL", domain="genserve", metadata={"limit": "8192"}),
                delay,
            ),
            {"reason": "QUEUE_FULL", "retry_after_ms": 1500, "metadata": {"limit": "8192"}},
        ),
        (
            "a reason that this client does not know",
            status(code_pb2.ABORTED, "later", info(reason="OF_THE_FUTURE", domain="genserve")),
            {"reason": "OF_THE_FUTURE"},
        ),
        (
            "a reason of somebody else",
            status(code_pb2.UNAVAILABLE, "no upstream", info(reason="INVALID_FIELD", domain="proxy.example.org")),
            {"reason": "UNAVAILABLE"},
        ),
        (
            "two reasons, of which one is genserve's",
            status(code_pb2.NOT_FOUND, "no", foreign, info(reason="PUSH_NOT_FOUND", domain="genserve")),
            {"reason": "PUSH_NOT_FOUND"},
        ),
        (
            "a detail of an unknown type",
            status(code_pb2.DATA_LOSS, "no", bad, changed, types_pb2.TokenIds()),
            {"reason": "CHECKSUM_MISMATCH", "violations": [["sampling.top_p", "must be above 0"]]},
        ),
        ("no details", status(code_pb2.DEADLINE_EXCEEDED, "late"), {"reason": "DEADLINE_EXCEEDED"}),
        (
            "no details: a message is too large for gRPC",
            status(code_pb2.RESOURCE_EXHAUSTED, "x"),
            {"reason": "MESSAGE_TOO_LARGE"},
        ),
        ("no details: an unknown call", status(code_pb2.UNIMPLEMENTED, "x"), {"reason": "UNSUPPORTED"}),
        ("no details: the other side cancelled", status(code_pb2.CANCELLED, "x"), {"reason": "UNAVAILABLE"}),
        (
            "when to try again, of a proxy",
            status(code_pb2.UNAVAILABLE, "x", delay),
            {"reason": "UNAVAILABLE", "retry_after_ms": 1500},
        ),
        ("a detail that is cut", broken, {"reason": "UNAVAILABLE"}),
        ("a detail under another host", elsewhere, {"reason": "QUEUE_FULL"}),
    ]
    none: dict[str, Any] = {"violations": [], "retry_after_ms": None, "metadata": {}}
    return [
        {"name": name, "status_hex": value.SerializeToString(deterministic=True).hex()}
        | {"code": code_pb2.Code.Name(value.code), "message": value.message, **none, **understood}
        for name, value, understood in cases
    ]


def json_vectors() -> Vectors:
    """Messages as bytes, and as the JSON that grpcurl and buf take and print: 64-bit numbers and bytes are strings."""
    messages: list[Message] = [
        generation_pb2.GenerateRequest(
            token_ids=types_pb2.TokenIds(ids=[1, 2]),
            sampling=generation_pb2.Sampling(temperature=0.0, n=2, logit_bias={5: -1.5}),
            stop=generation_pb2.Stop(max_tokens=4, time_budget=duration_pb2.Duration(seconds=1, nanos=500_000_000)),
        ),
        weights_pb2.PushWeightsRequest(chunk=weights_pb2.PushChunk(offset=1 << 40, data=b"\x00\xff\x10", crc32c=7)),
        weights_pb2.PushHeader(push_id="p", weight_version=3, expected_version=0, action=weights_pb2.PUSH_ACTION_STAGE),
        weights_pb2.TensorSpec(name="w", dtype="BF16", shape=[2, 3], offset=0, length=12),
        control_pb2.PauseRequest(mode=types_pb2.PAUSE_MODE_KEEP, holder="ops", ttl=duration_pb2.Duration(seconds=30)),
        types_pb2.EngineState(
            weight_version=7, phase=types_pb2.PHASE_PAUSED, pauses=[types_pb2.PauseLease(lease_id="l")]
        ),
    ]
    return [
        {"message": each.DESCRIPTOR.full_name, "hex": each.SerializeToString(deterministic=True).hex()}
        | {"json": MessageToDict(each)}
        for each in messages
    ]


FILES = {
    "crc32c.json": crc32c_vectors,
    "frames.json": frame_vectors,
    "manifests.json": manifest_vectors,
    "errors.json": error_vectors,
    "generations.json": generation_vectors,
    "json.json": json_vectors,
}


def written(vectors: Vectors) -> str:
    """A file: one vector a line."""
    return "[\n" + ",\n".join(json.dumps(vector, ensure_ascii=True) for vector in vectors) + "\n]\n"


if __name__ == "__main__":
    for name, vectors in FILES.items():
        (DIRECTORY / name).write_text(written(vectors()))
