"""What an invalid request over HTTP costs."""

from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeRequest

from genserve.engine.vllm.openai.app import fail_fast

MODELS = [(TokenizeRequest, "messages"), (ChatCompletionRequest, "messages"), (ResponsesRequest, "input")]


def posted(model: Any, body: dict[str, Any]) -> Any:
    """The answer of a route that takes such a request, and returns it."""
    app = FastAPI()

    async def take(request: Any) -> Any:
        return request.model_dump(include=body.keys())

    take.__annotations__ = {"request": model}
    app.post("/")(take)
    fail_fast(app.routes)
    return TestClient(app).post("/", json={"model": "m", **body}).json()


@pytest.mark.parametrize(("model", "field"), MODELS)
@pytest.mark.parametrize("element", [0, {}])
def test_a_list_is_read_up_to_its_first_wrong_element(model: Any, field: str, element: Any) -> None:
    """There are errors of all kinds that one might have been, and not of each of thousands: 30 kB took 11 GB."""
    many, one = ([each["loc"] for each in posted(model, {field: [element] * n})["detail"]] for n in (1000, 1))
    assert many == one


@pytest.mark.parametrize(("model", "field"), MODELS)
def test_what_is_right_is_what_it_was(model: Any, field: str) -> None:
    """Each element of it."""
    messages = [{"role": "user", "content": str(number)} for number in range(1000)]
    assert [each["content"] for each in posted(model, {field: messages})[field]] == list(map(str, range(1000)))
