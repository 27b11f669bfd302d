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
