"""Manifests made to hurt, as raw bytes on the wire: refused soon, and at no cost in memory."""

import time
from collections.abc import AsyncIterator, Callable

import grpc.aio
import pytest

from genserve.errors import InvalidFieldError, ManifestMismatchError, MessageTooLargeError, PushTruncatedError
from genserve.tensors.varint import to_varint
from genserve.transport.errors import error_of
from tests.support.answers import answer_of
from tests.support.footprint import reset_peak, resident_bytes
from tests.support.subject import Subject

MAX_GROWTH_BYTES = 64 << 20
REFUSED_WITHIN_S = 30.0
"""Far above what is measured, which is printed: other work on the machine must not fail a test."""


def nested(number: int, content: bytes) -> bytes:
    """A field that holds bytes, text or a message."""
    return to_varint(number << 3 | 2) + to_varint(len(content)) + content


def plain(number: int, value: int) -> bytes:
    """A field that holds a number."""
    return to_varint(number << 3) + to_varint(value)


def tensor(name: str, shape: list[int], offset: int, length: int, dtype: str = "BF16") -> bytes:
    """A TensorSpec within its manifest."""
    dims = b"".join(map(to_varint, shape))
    spec = nested(1, name.encode()) + nested(2, dtype.encode()) + nested(3, dims) + plain(4, offset) + plain(5, length)
    return nested(1, spec)


def a_million_named() -> bytes:
    """13 MB."""
    return b"".join(nested(1, nested(1, f"t{number}".encode())) for number in range(1_000_000)) + plain(2, 8)


def as_many_as_are_read() -> bytes:
    """Tensors enough for a mistake, none of which is the checkpoint's: all of them are looked at."""
    return b"".join(tensor(f"module.{number}", [1], 2 * number, 2) for number in range(1000)) + plain(2, 2000)


def millions_of_nothing() -> bytes:
    """Two bytes each on the wire, thirty times that when parsed: 16 MB."""
    return nested(1, b"") * 8_000_000 + plain(2, 8)


def millions_of_dimensions() -> bytes:
    """One byte each on the wire, eight when parsed: 16 MB."""
    return nested(1, nested(1, b"model.norm.weight") + nested(2, b"BF16") + nested(3, b"\x01" * (16 << 20))) + plain(
        2, 2
    )


def a_name_without_end() -> bytes:
    """16 MB of text."""
    return tensor("n" * (16 << 20), [1], 0, 2) + plain(2, 2)


def huge_shape() -> bytes:
    """2^63 elements."""
    return tensor("model.norm.weight", [1 << 63], 0, 1 << 63) + plain(2, 1 << 63)


def product_that_overflows() -> bytes:
    """2^32 by 2^32 elements are none in 64 bits."""
    return tensor("model.norm.weight", [1 << 32, 1 << 32], 0, 0) + plain(2, 8)


def sum_that_overflows() -> bytes:
    """Offset and length come to 8 in 64 bits."""
    return tensor("model.norm.weight", [8], (1 << 64) - 8, 16) + plain(2, 8)


def negative() -> bytes:
    """-1, as it comes from a careless trainer."""
    return tensor("model.norm.weight", [(1 << 64) - 1], (1 << 64) - 1, (1 << 64) - 2) + plain(2, (1 << 64) - 1)


def absurd_total() -> bytes:
    """A byte space of 2^62 bytes that one tensor covers."""
    return tensor("model.norm.weight", [1 << 61], 0, 1 << 62) + plain(2, 1 << 62)


async def send_header(subject: Subject, manifest: bytes) -> None:
    """Opens a push with this manifest and waits for the answer."""
    version = await subject.oracle.served_version() + 1
    header = nested(1, nested(1, b"hostile") + plain(2, version) + nested(4, manifest))

    async def requests() -> AsyncIterator[bytes]:
        yield header

    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(subject.process.address, options=options) as channel:
        call: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(
            "/genserve.v1.WeightService/PushWeights"
        )
        try:
            await answer_of(call(requests(), timeout=120))
        except grpc.aio.AioRpcError as error:
            raise error_of(error, subject.process.address) from error


HOSTILE: list[Callable[[], bytes]] = [
    a_million_named,
    as_many_as_are_read,
    millions_of_nothing,
    millions_of_dimensions,
    a_name_without_end,
    huge_shape,
    product_that_overflows,
    sum_that_overflows,
    negative,
    absurd_total,
]


async def test_a_hostile_manifest_is_refused_at_no_cost(subject: Subject) -> None:
    """INVALID_ARGUMENT, or RESOURCE_EXHAUSTED for its mere size; nothing is reserved for what it claims."""
    async with subject.unharmed():
        for manifest in HOSTILE:
            content = manifest()
            reset_peak(subject.pid)
            before_bytes, began_s = resident_bytes(subject.pid), time.monotonic()
            with pytest.raises((ManifestMismatchError, InvalidFieldError, MessageTooLargeError)):
                await send_header(subject, content)
            took_s = time.monotonic() - began_s
            growth_bytes = resident_bytes(subject.pid, peak=True) - before_bytes
            said = f"{manifest.__name__}: {len(content)} bytes, {took_s * 1e3:.0f} ms, +{growth_bytes >> 20} MiB"
            print(said)
            assert took_s < REFUSED_WITHIN_S, said
            assert growth_bytes <= MAX_GROWTH_BYTES, said


async def test_the_bytes_on_the_wire_are_those_of_a_manifest(subject: Subject) -> None:
    """The control: an honest manifest written by the same hand is accepted, so the others are refused for what they
    are. It is cut off after its header."""
    served = await subject.client.get_weights()
    offset, specs = 0, b""
    for each in served.tensors:
        elements = 1
        for size in each.shape:
            elements *= size
        specs += tensor(each.name, list(each.shape), offset, 2 * elements, each.dtype)
        offset += 2 * elements
    with pytest.raises(PushTruncatedError):
        await send_header(subject, specs + plain(2, offset))
    push = await subject.client.discard_push("hostile")
    assert push.missing == [(0, offset)]
    await subject.oracle.holds((served.weight_version, "a"))
