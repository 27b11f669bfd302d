"""Lines that are logged during a call name its method and its ids."""

import logging
from collections.abc import Iterator

import grpc
import pytest

from genserve.observe.log_lines import noted
from genserve.v1 import generation_pb2
from tests.rpc.frames import END, chunk, header, refused
from tests.support.scripted_daemon import Daemon


class Noting(logging.Handler):
    """Keeps the context of each record."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[dict[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.noted.append(noted())


@pytest.fixture
def lines() -> Iterator[list[dict[str, str]]]:
    """The contexts of the lines that genserve's modules log."""
    handler, logger = Noting(), logging.getLogger("genserve")
    logger.addHandler(handler)
    yield handler.noted
    logger.removeHandler(handler)


def request(request_id: str) -> generation_pb2.GenerateRequest:
    """A request that the engine refuses."""
    return generation_pb2.GenerateRequest(request_id=request_id, text="hi")


async def test_a_line_about_a_request_names_its_id_and_its_method(daemon: Daemon, lines: list[dict[str, str]]) -> None:
    """Here an error that nobody expected, which is logged with its traceback."""
    daemon.engine.refusal = KeyError("x")
    with pytest.raises(grpc.aio.AioRpcError):
        await daemon.generation.Generate(request("r1")).read()
    assert lines == [{"method": "/genserve.v1.GenerationService/Generate", "request_id": "r1"}]


async def test_a_line_about_one_of_many_requests_names_that_one(daemon: Daemon, lines: list[dict[str, str]]) -> None:
    """They share a call."""
    daemon.engine.refusal = KeyError("x")
    asked = [generation_pb2.GenerateManyRequest(generate=request(name)) for name in ("r1", "r2")]
    async for _ in daemon.generation.GenerateMany(iter(asked)):
        pass
    assert [each["request_id"] for each in lines] == ["r1", "r2"]
    assert {each["method"] for each in lines} == {"/genserve.v1.GenerationService/GenerateMany"}


async def test_a_line_about_a_push_names_its_id(daemon: Daemon, lines: list[dict[str, str]]) -> None:
    """Also where it is carried out in a task of its own."""
    daemon.engine.fails["discard_weights"] = KeyError("x")
    daemon.engine.fails["prepare_weights"] = KeyError("y")
    await refused(daemon, [await header(daemon, push_id="p7"), chunk(0, 32), END])
    assert {"method": "/genserve.v1.WeightService/PushWeights", "push_id": "p7"} in lines
