"""What the client makes of answers of a daemon that was made for a later version of the contract."""

from typing import Any

from genserve.client import AsyncClient, EngineState, GeneratedSequence
from genserve.v1 import types_pb2
from tests.support.scripted_services import ScriptedDaemon

LATER: Any = 99
NEW_FIELD = b"\xa2\x3e\x03new"
"""Field 1000, of a text."""


async def test_a_phase_that_is_not_known_is_told_by_its_number(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """And a field that is not known changes nothing."""
    state = types_pb2.EngineState(phase=LATER, weight_version=3).SerializeToString() + NEW_FIELD
    daemon.state = lambda: types_pb2.EngineState.FromString(state)  # type: ignore[method-assign]
    told = (await client.status()).state
    assert isinstance(told, EngineState)
    assert (told.phase, told.weight_version) == ("unknown_99", 3)


async def test_a_reason_to_finish_that_is_not_known_is_one(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """The sequence has ended, with all of its tokens."""
    daemon.finish_reason = LATER
    generated = await client.generate("x")
    assert isinstance(generated.sequences[0], GeneratedSequence)
    assert generated.sequences[0].finish_reason == "unknown_99"
    assert generated.text == "Once upon a time"
