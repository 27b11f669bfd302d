"""What the engine does not take is refused over gRPC and over HTTP alike, and harms nobody."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from genserve.client import AsyncClient
from genserve.errors import InvalidFieldError, QueueFullError
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.patience import STEP_S
from tests.support.refusals import refuses

PROMPT = [5, 6, 7, 8]
LIMITS = ("--max-n", "4", "--max-active-requests", "8")
FLAGS = ("--openai-port", "0", "--served-model-name", "policy", "--enable-lora", *LIMITS)
# On a CPU, vLLM's engine dies of the first two.
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "prompt-logprobs": ({"prompt_logprobs": 1}, "output.prompt_logprobs", "prompt_logprobs"),
    "seed": ({"seed": 7}, "sampling.seed", "seed"),
    "n": ({"n": 5}, "sampling.n", "n must be at most 4 (--max-n)"),
    "a large n": ({"n": 9}, "sampling.n", "n must be at most 4 (--max-n)"),
}


@pytest.fixture(scope="module")
def daemon(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """With all entrances, and with flags that make ordinary requests dangerous on a CPU."""
    flags = ["--model", str(checkpoints["a"]), *SMALL_ENGINE, *FLAGS, "--enable-chunked-prefill"]
    process = DaemonProcess(flags, tmp_path_factory.mktemp("door") / "stderr")
    try:
        yield process.wait_serving()
    finally:
        process.end()


@pytest.fixture
async def grpc(daemon: DaemonProcess) -> AsyncIterator[AsyncClient]:
    """A client of the daemon."""
    async with AsyncClient(daemon.address) as client:
        yield client


@pytest.fixture
async def http(daemon: DaemonProcess) -> AsyncIterator[httpx.AsyncClient]:
    """A client of its OpenAI port."""
    url = next(line for line in daemon.stderr.splitlines() if "openai: http" in line).split("openai: ")[1]
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        yield client


def body(**changes: Any) -> dict[str, Any]:
    """Of a completion."""
    return {"model": "policy", "prompt": PROMPT, "max_tokens": 2, **changes}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_does_not_take_is_refused_by_both(
    grpc: AsyncClient, http: httpx.AsyncClient, name: str, stream: bool
) -> None:
    """With the field's name, and both go on to serve."""
    asked, field, parameter = REFUSED[name]
    with refuses(InvalidFieldError, field=field):
        await grpc.generate(PROMPT, max_tokens=2, **asked)
    answer = await http.post("/v1/completions", json=body(stream=stream, **asked))
    assert answer.status_code == 400, answer.text
    assert parameter in answer.json()["error"]["message"]
    assert (await http.post("/v1/completions", json=body())).status_code == 200
    assert (await grpc.generate(PROMPT, max_tokens=2)).sequences[0].token_ids


async def test_beams_are_sequences_too(http: httpx.AsyncClient) -> None:
    """vLLM searches with as many requests at a time; over gRPC there are none."""
    answer = await http.post("/v1/completions", json=body(n=5, use_beam_search=True))
    assert answer.status_code == 400 and "--max-n" in answer.json()["error"]["message"], answer.text
    assert (await http.post("/v1/completions", json=body(n=2, use_beam_search=True))).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_more_sequences_than_all_clients_may_have_are_refused_by_both(
    grpc: AsyncClient, http: httpx.AsyncClient, stream: bool
) -> None:
    """While a request over gRPC runs, which counts. The status says that they may be sent again."""
    running = await grpc.pause()
    frozen = [asyncio.create_task(grpc.generate(PROMPT, max_tokens=2, n=4)) for _ in range(2)]
    async with asyncio.timeout(STEP_S):
        while (load := (await grpc.status()).load).running + load.waiting < 8:
            await asyncio.sleep(0.01)
    with refuses(QueueFullError, says="8 sequences are running or waiting, of 8 at most"):
        await grpc.generate(PROMPT, max_tokens=2)
    answer = await http.post("/v1/completions", json=body(stream=stream))
    assert answer.status_code == 503, answer.text
    assert "8 sequences are running or waiting, of 8 at most" in answer.json()["error"]["message"]
    await grpc.resume(running.lease.lease_id)
    await asyncio.gather(*frozen)
    assert (await http.post("/v1/completions", json=body())).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_an_id_that_is_too_long_is_refused_by_both(
    grpc: AsyncClient, http: httpx.AsyncClient, stream: bool
) -> None:
    """What a process leaves is ended by its ids, for which there is so much room."""
    with refuses(InvalidFieldError, field="request_id"):
        await grpc.generate(PROMPT, max_tokens=2, request_id="i" * 257)
    headers = {"X-Request-Id": "i" * 1100}
    answer = await http.post("/v1/completions", json=body(stream=stream), headers=headers)
    assert answer.status_code == 400, answer.text
    assert "request_id must be at most" in answer.json()["error"]["message"]
    assert (await http.post("/v1/completions", json=body())).status_code == 200


async def test_a_whole_answer_over_http_names_the_versions_that_sampled_it(
    daemon: DaemonProcess, grpc: AsyncClient, http: httpx.AsyncClient, checkpoints: dict[str, Path]
) -> None:
    """All of them, of all choices; an answer that is streamed has its headers before it is known."""
    answer = await http.post("/v1/completions", json=body(n=2))
    assert answer.headers["genserve-weight-versions"] == "0"
    await grpc.push_weights(checkpoints["b"], version=7)
    assert (await http.post("/v1/completions", json=body())).headers["genserve-weight-versions"] == "7"
    chat = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert (await http.post("/v1/chat/completions", json=chat)).headers["genserve-weight-versions"] == "7"
    for other in (await http.post("/v1/completions", json=body(stream=True)), await http.get("/v1/models")):
        assert other.status_code == 200 and "genserve-weight-versions" not in other.headers


async def test_a_body_that_no_honest_request_has_is_refused_unread(http: httpx.AsyncClient) -> None:
    """Parsing it would hold up all answers, also on routes that need no key."""
    for path in ("/v1/completions", "/detokenize"):
        body = b'{"model": "policy", "tokens": [' + b"1," * (6 << 20) + b"1]}"
        answer = await http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 413 and "bytes" in answer.text, answer.text


async def test_a_body_that_is_wrong_all_over_is_read_up_to_its_first_fault(http: httpx.AsyncClient) -> None:
    """Without a key, 0.3 MB held up all answers for six seconds: there were 1.5 million errors."""
    answer = await http.post("/tokenize", json={"model": "policy", "messages": [{}] * 100_000})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and int(message.partition(" validation error")[0]) < 100, message
