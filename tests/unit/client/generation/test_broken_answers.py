"""Answers that no daemon gives."""

import pytest

from genserve.client import AsyncClient, Delta, Generation
from genserve.errors import GenserveError
from genserve.net import is_socket
from genserve.v1 import generation_pb2
from tests.support.refusals import refuses
from tests.support.silent_daemon import silent_daemon


async def test_a_generation_that_ends_without_its_last_message_is_an_error() -> None:
    async with silent_daemon() as daemon, AsyncClient(daemon.target) as client:
        daemon.answer = b""
        with refuses(GenserveError):
            await client.generate("a")


def test_impossible_sequence_index_is_an_error_and_takes_no_memory() -> None:
    outputs = [generation_pb2.SequenceDelta(index=2**32 - 1)]
    with refuses(GenserveError, says="4294967295"):
        Generation().add(Delta(generation_pb2.GenerateResponse(outputs=outputs)))


@pytest.mark.parametrize(
    ("address", "expected"), [("unix:/a", True), ("unix-abstract:a", True), ("unix1:50051", False)]
)
def test_a_host_may_begin_as_the_address_of_a_socket(address: str, expected: bool) -> None:
    assert is_socket(address) == expected
