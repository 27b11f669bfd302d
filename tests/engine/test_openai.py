"""vLLM's OpenAI server in front of the daemon's engine, on real vLLM."""

import asyncio
import json
import resource
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from genserve.client import AsyncClient
from tests.engine.examples import block
from tests.engine.outputs import ends_early, next_version, wait_idle
from tests.support import on_runner_v2
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.patience import STEP_S
from tests.support.unchanging import unchanging

PAGE = Path(__file__).parents[2] / "docs" / "openai.md"
WRITTEN_URL = "http://127.0.0.1:8000"
PROMPT = [5, 6, 7, 8]
SERVER = "APIServer"
LONG = 1500


@dataclass
class Served:
    """A daemon with an OpenAI server."""

    process: DaemonProcess
    grpc: AsyncClient
    http: openai.AsyncOpenAI

    async def collect(self, max_tokens: int, answer: "Answer") -> "Answer":
        """Greedy tokens over HTTP, as they come."""
        stream = await self.http.completions.create(
            model="policy",
            prompt=PROMPT,
            max_tokens=max_tokens,
            temperature=0.0,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        async for chunk in stream:
            choice: Any = chunk.choices[0]
            answer.token_ids += choice.token_ids or []
            answer.finish_reason = choice.finish_reason or answer.finish_reason
            answer.begun.set()
        return answer

    async def begun(self, max_tokens: int) -> "Answer":
        """An answer that is being streamed."""
        answer = Answer()
        answer.task = asyncio.create_task(self.collect(max_tokens, answer))
        async with asyncio.timeout(60):
            await answer.begun.wait()
        return answer

    @property
    def server(self) -> psutil.Process:
        """Its process."""
        return self.process.descendant(SERVER)


@dataclass
class Answer:
    """Tokens that came over HTTP. `task` reads them."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[Answer] | None" = None

    async def done(self) -> "Answer":
        """All of it. Raises what has cut it off."""
        assert self.task is not None
        async with asyncio.timeout(60):
            return await self.task


def url_of(process: DaemonProcess) -> str:
    """What the daemon says on stderr."""
    line = next(line for line in process.stderr.splitlines() if "openai: http" in line)
    return line.split("openai: ")[1]


def started(checkpoint: Path, log: Path, *more: str) -> DaemonProcess:
    """The daemon of the page, on a free port, whose environment asks vLLM for all the routes that it has."""
    command, written_port = block("sh", "genserve serve", PAGE).split(), WRITTEN_URL.rpartition(":")[2]
    assert command[:4] == ["genserve", "serve", "--openai-port", written_port]
    flags = ["--model", str(checkpoint), *SMALL_ENGINE, "--openai-port", "0", *command[4:]]
    routes = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    return DaemonProcess([*flags, *more], log, routes)


@pytest.fixture(scope="module")
def process(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon on checkpoint a, with front ends beside the server."""
    process = started(checkpoints["a"], tmp_path_factory.mktemp("openai") / "stderr", "--frontends", "2")
    try:
        yield process.wait_serving()
    finally:
        process.end()


async def connected(process: DaemonProcess) -> AsyncIterator[Served]:
    """With clients of both protocols."""
    http = openai.AsyncOpenAI(base_url=f"{url_of(process)}/v1", api_key="secret", max_retries=0, timeout=60)
    async with AsyncClient(process.address) as grpc, http:
        yield Served(process, grpc, http)


@pytest.fixture
async def served(process: DaemonProcess) -> AsyncIterator[Served]:
    """The daemon that tests share."""
    async for each in connected(process):
        yield each


@pytest.fixture
async def own(checkpoints: dict[str, Path], tmp_path: Path) -> AsyncIterator[Served]:
    """A daemon for one test."""
    process = started(checkpoints["a"], tmp_path / "stderr")
    try:
        async for each in connected(process.wait_serving()):
            yield each
    finally:
        process.kill()


async def greedy(client: AsyncClient, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy tokens over gRPC."""
    return (await client.generate(prompt, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)).token_ids


async def until_cut_off(served: Served) -> None:
    """Asks for tokens until the server takes no more requests; raises what it says then."""
    while True:
        await served.collect(1, Answer())


@pytest.mark.long("genserve/engine/vllm", "genserve/frontends", "genserve/weights", "genserve/daemon")
async def test_a_push_reaches_an_answer_that_is_being_streamed(served: Served, checkpoints: dict[str, Path]) -> None:
    """Its first tokens are those of the old weights, the others those that the new ones give after them."""
    old = await greedy(served.grpc, PROMPT, LONG)
    answer = await served.begun(LONG)
    await served.grpc.push_weights(checkpoints["b"], version=await next_version(served.grpc))
    tokens = (await answer.done()).token_ids
    assert len(tokens) == LONG
    same = next(i for i, (each, before) in enumerate(zip(tokens, old, strict=True)) if each != before)
    assert 0 < same < LONG - 8
    assert tokens[same : same + 8] == await greedy(served.grpc, PROMPT + tokens[:same], 8)
    await served.grpc.push_weights(checkpoints["a"], version=await next_version(served.grpc))
    assert (await served.collect(8, Answer())).token_ids == old[:8]


async def test_the_server_may_have_thousands_of_connections(served: Served) -> None:
    """As with `vllm serve`."""
    soft, hard = served.server.rlimit(psutil.RLIMIT_NOFILE)
    assert soft == (65_535 if hard == resource.RLIM_INFINITY else min(65_535, hard))


async def test_the_port_is_reported(served: Served) -> None:
    """Over gRPC too, as the daemon has picked it."""
    assert url_of(served.process).endswith(f":{(await served.grpc.server_info()).openai_port}")


async def test_the_example_of_the_page_works(process: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/openai.md, with the address of this daemon: text at once, then as it comes."""
    example = block("python", "OpenAI(", PAGE).replace(WRITTEN_URL, url_of(process)).replace("8)", "8, temperature=0)")
    await asyncio.to_thread(exec, example.replace("stream=True", "stream=True, temperature=0"), {})
    told = capsys.readouterr().out
    assert told[: len(told) // 2] == told[len(told) // 2 + 1 :] != ""


@pytest.mark.parametrize("number", range(3))
async def test_a_command_of_the_page_works(process: DaemonProcess, number: int) -> None:
    """With the real curl: the list of models, an answer, and a streamed one. The page's answers are sampled, and would
    end early now and then."""
    page = block("sh", "curl", PAGE).replace("\\\n", "").replace(WRITTEN_URL, url_of(process))
    commands = page.replace('"max_tokens": 8', '"max_tokens": 8, "ignore_eos": true').strip().splitlines()
    assert len(commands) == 3
    done = await asyncio.create_subprocess_shell(f"{commands[number]} --silent", stdout=asyncio.subprocess.PIPE)
    told = (await asyncio.wait_for(done.communicate(), 60))[0].decode()
    if number == 0:
        assert [model["id"] for model in json.loads(told)["data"]] == ["policy"]
    elif number == 1:
        assert json.loads(told)["usage"]["completion_tokens"] == 8
    else:
        assert told.count("data: {") > 1 and told.endswith("data: [DONE]\n\n")


async def test_a_pause_freezes_answers_until_the_resume(served: Served) -> None:
    """The request that runs and the one that comes in the pause; the pause counts the first one."""
    answer = await served.begun(LONG)
    paused = await served.grpc.pause()
    assert paused.requests_kept == 1
    late = asyncio.create_task(served.collect(1, Answer()))
    async with asyncio.timeout(STEP_S):
        while (load := (await served.grpc.status()).load).running + load.waiting < 2:
            await asyncio.sleep(0.01)
    num_tokens = await unchanging(lambda: len(answer.token_ids))
    assert num_tokens < LONG and not late.done()
    await served.grpc.resume(paused.lease.lease_id)
    assert (await answer.done()).token_ids == await greedy(served.grpc, PROMPT, LONG)
    assert (await late).finish_reason == "length"


async def test_a_pause_that_aborts_ends_answers(served: Served) -> None:
    """As those of gRPC, with vLLM's reason for it."""
    answer = await served.begun(LONG)
    paused = await served.grpc.pause("abort")
    assert paused.requests_aborted == 1
    assert (await answer.done()).finish_reason == "abort"
    await served.grpc.resume(paused.lease.lease_id)
    assert len(answer.token_ids) < LONG


async def test_an_abort_of_all_requests_ends_answers(served: Served) -> None:
    """The daemon knows them by the ids that vLLM gives them."""
    answer = await served.begun(LONG)
    aborted = await served.grpc.abort(all=True)
    assert len(aborted.aborted_ids) == 1
    assert (await answer.done()).finish_reason == "abort"
    await wait_idle(served.grpc)


async def test_more_than_a_model_runner_holds_of_one_request_ends_nobody_elses(served: Served) -> None:
    """vLLM's server lets it through, and V2 would end the engine. V1 holds any number."""
    many = {"allowed_token_ids": [3] * 1025, "ignore_eos": True}
    asked = served.http.completions.create(model="policy", prompt=PROMPT, max_tokens=2, extra_body=many)
    if on_runner_v2.IS_ON:
        with pytest.raises(openai.BadRequestError, match="allowed_token_ids"):
            await asked
    else:
        assert (await asked).choices[0].finish_reason == "length"
    assert len(await greedy(served.grpc, PROMPT, 3)) == 3


async def test_the_servers_port_shows_what_it_counts(served: Served) -> None:
    """vLLM's series of its requests, of which each answer adds its tokens; none of the daemon's."""

    async def num_tokens() -> float:
        async with httpx.AsyncClient(base_url=url_of(served.process)) as http:
            lines = (await http.get("/metrics")).text.splitlines()
        assert not [each for each in lines if each.startswith("genserve_")]
        counted = [each for each in lines if each.startswith("vllm:generation_tokens_total{")]
        return sum(float(each.rpartition(" ")[2]) for each in counted)

    before = await num_tokens()
    await served.collect(8, Answer())
    assert await num_tokens() == before + 8


async def test_an_answer_that_nobody_reads_any_more_is_aborted(served: Served) -> None:
    """Its client has closed the connection."""
    answer = await served.begun(2000)
    assert answer.task is not None
    async with ends_early(served.grpc):
        answer.task.cancel()


@pytest.mark.parametrize(
    "path",
    [
        "abort_requests",
        "collective_rpc",
        "inference/v1/generate",
        "init_weight_transfer_engine",
        "invocations",
        "pause",
        "reset_prefix_cache",
        "resume",
        "scale_elastic_ep",
        "server_info",
        "sleep",
        "start_profile",
        "update_weight_version",
        "update_weights",
        "v1/load_lora_adapter",
        "v1/unload_lora_adapter",
        "wake_up",
    ],
)
async def test_no_route_controls_the_engine(served: Served, path: str) -> None:
    """Whatever the daemon's environment says: only gRPC does."""
    async with httpx.AsyncClient(base_url=url_of(served.process), headers={"Authorization": "Bearer secret"}) as http:
        assert {(await http.get(f"/{path}")).status_code, (await http.post(f"/{path}", json={})).status_code} == {404}


async def test_a_request_without_the_key_is_refused(served: Served) -> None:
    """--api-key is vLLM's flag."""
    async with httpx.AsyncClient(base_url=url_of(served.process)) as http:
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.get("/health")).status_code == 200


async def test_a_server_that_is_killed_is_started_again_and_leaves_no_request(served: Served) -> None:
    """gRPC streams do not notice, and the port stays the same."""
    before = served.server
    answer = await served.begun(LONG)
    stream = asyncio.create_task(greedy(served.grpc, PROMPT, 400))
    before.kill()
    with pytest.raises(openai.APIConnectionError):
        await answer.done()
    assert len(await stream) == 400
    await wait_idle(served.grpc)
    again = await served.collect(8, Answer())  # waits in the listener until the next process accepts it
    assert again.token_ids == await greedy(served.grpc, PROMPT, 8)
    assert served.server.pid != before.pid
    name = f"OpenAI server on port {served.http.base_url.port}"
    assert f"{name}: it was ended by SIGKILL; it is started again in 0.5 s" in served.process.stderr


@pytest.mark.long("genserve/engine/vllm", "genserve/frontends", "genserve/daemon", "genserve/control")
async def test_a_drain_finishes_answers_and_refuses_new_ones(own: Served) -> None:
    """Then every process is gone, and the status is 0."""
    children = psutil.Process(own.process.process.pid).children(recursive=True)
    answer = await own.begun(LONG)
    own.process.process.send_signal(signal.SIGTERM)
    with pytest.raises(openai.APIConnectionError):
        await until_cut_off(own)
    assert (await answer.done()).finish_reason == "length"
    assert len(answer.token_ids) == LONG
    assert await asyncio.to_thread(own.process.exit_status, 60) == 0
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
    assert "Traceback" not in own.process.stderr


async def test_the_server_ends_with_a_daemon_that_is_killed(own: Served) -> None:
    """As the engine does, though its process group is its own."""
    server = own.server
    own.process.process.kill()
    _, alive = psutil.wait_procs([server], timeout=60)
    assert alive == []


async def test_an_engine_that_dies_ends_answers_and_the_daemon(own: Served) -> None:
    """No answer over HTTP waits for ever, and no process stays."""
    children = psutil.Process(own.process.process.pid).children(recursive=True)
    answer = await own.begun(LONG)
    own.process.descendant("EngineCore").kill()
    with pytest.raises((openai.APIError, httpx.HTTPError)):
        await answer.done()
    assert await asyncio.to_thread(own.process.exit_status, 60) == 1
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
