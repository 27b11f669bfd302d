"""The header that names the versions of an answer."""

import pytest

from genserve.engine.vllm.openai.versions import HEADER, Message, Receive, Send, VersionsHeader, note


@pytest.mark.parametrize(("status", "told"), [(200, [(HEADER, b"7, 8")]), (500, []), (400, [])])
async def test_an_error_names_no_versions_although_tokens_were_sampled(status: int, told: list[object]) -> None:
    """Nothing of what they sampled is answered."""
    sent: list[Message] = []

    async def app(_scope: Message, _receive: Receive, send: Send) -> None:
        note([7, 8, 7])
        await send({"type": "http.response.start", "status": status, "headers": []})

    async def receive() -> Message:
        return {}

    async def send(message: Message) -> None:
        sent.append(message)

    await VersionsHeader(app)({"type": "http"}, receive, send)
    assert [each["headers"] for each in sent] == [told]


async def test_versions_are_in_order_if_the_sequence_that_began_last_ends_first() -> None:
    """One of n sequences may wait for its turn until after a push, and end before one that began before it."""
    sent: list[Message] = []

    async def app(_scope: Message, _receive: Receive, send: Send) -> None:
        note([8])
        note([7, 8])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Message:
        return {}

    async def send(message: Message) -> None:
        sent.append(message)

    await VersionsHeader(app)({"type": "http"}, receive, send)
    assert sent[0]["headers"] == [(HEADER, b"7, 8")]
