"""Whatever one client sends, the others are served: against real vLLM, which dies of some of it."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from genserve.client import AsyncClient
from genserve.errors import GenserveError, InvalidFieldError, QueueFullError
from genserve.v1 import generation_pb2
from genserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.engine.hostile_requests import Requests
from tests.engine.outputs import wait_idle
from tests.support import models
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess

SECOND_EOS = 42
MAX_QUEUED = 300
NUM_HOSTILE = int(os.environ.get("GENSERVE_HOSTILE_REQUESTS", "6000"))
SEED = int(os.environ.get("GENSERVE_HOSTILE_SEED", "0"))
BATCH = 100
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon with two EOS tokens, and a short queue of vLLM's."""
    directory = tmp_path_factory.mktemp("hostile")
    checkpoint = models.tiny_qwen3(directory / "model")
    config = json.loads((checkpoint / "generation_config.json").read_text())
    config["eos_token_id"] = [config["eos_token_id"], SECOND_EOS]
    (checkpoint / "generation_config.json").write_text(json.dumps(config))
    flags = ["--model", str(checkpoint), *SMALL_ENGINE, "--max-num-queued-reqs", str(MAX_QUEUED)]
    process = DaemonProcess(flags, directory / "stderr")
    try:
        yield process.wait_serving()
    finally:
        process.end()


@pytest.fixture(scope="module")
async def client(daemon: DaemonProcess) -> AsyncIterator[AsyncClient]:
    """A client of it."""
    async with AsyncClient(daemon.address) as connected:
        yield connected


async def serves(client: AsyncClient) -> None:
    """The engine answers others within seconds, and no request is left."""
    generation = await client.generate(PROMPT, max_tokens=3, ignore_eos=True, timeout_s=60)
    assert len(generation.token_ids) == 3
    await wait_idle(client)


async def test_every_eos_token_of_the_checkpoint_ends_a_sequence_as_eos(client: AsyncClient) -> None:
    """vLLM gives all but one as stop tokens, which trainers take for an unfinished answer; one that was asked for is a
    stop token."""
    steered = {"temperature": 0.0, "max_tokens": 8, "logit_bias": {SECOND_EOS: 100.0}}
    (sequence,) = (await client.generate(PROMPT, **steered)).sequences  # type: ignore[arg-type]
    assert sequence.finish is not None
    assert (sequence.finish.reason, sequence.finish.stop_token_id, sequence.token_ids) == ("eos", None, [SECOND_EOS])
    (sequence,) = (await client.generate(PROMPT, stop_token_ids=[SECOND_EOS], **steered)).sequences  # type: ignore[arg-type]
    assert sequence.finish is not None
    assert (sequence.finish.reason, sequence.finish.stop_token_id) == ("stop_token", SECOND_EOS)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"repetition_detection": {"max_pattern_size": 4}}, "repetition_detection"),
        ({"repetition_detection": {"max_pattern_size": "4"}}, "repetition_detection"),
        ({"repetition_detection": {"max_patern_size": 4}}, "repetition_detection.max_patern_size"),
        ({"spaces_between_special_tokens": None}, "spaces_between_special_tokens"),
        ({"spaces_between_special_tokens": 1}, "spaces_between_special_tokens"),
        ({"skip_reading_prefix_cache": "yes"}, "skip_reading_prefix_cache"),
        ({"logprob_token_ids": [1.5]}, "logprob_token_ids"),
        ({"routed_experts_prompt_start": 1e300}, "routed_experts_prompt_start"),
        ({"thinking_token_budget": 2.0**40}, "thinking_token_budget"),
        ({"watermarking": []}, "watermarking"),
    ],
)
async def test_engine_parameter_of_wrong_type_is_refused_and_engine_lives(
    client: AsyncClient, params: dict[str, object], field: str
) -> None:
    """EngineCore ends the thread that takes requests, for everybody, when it cannot decode one."""
    with pytest.raises(InvalidFieldError) as raised:
        await client.generate(PROMPT, max_tokens=2, engine_params=params, timeout_s=60)
    assert [v.field for v in raised.value.violations] == [f"engine_params.{field}"]
    await serves(client)


async def test_a_request_that_the_engine_ends_with_an_error_leaves_its_stream(client: AsyncClient) -> None:
    """Its id and its place are free, and what the others generated is not lost."""
    excluded = {"choice": ["red", "green"], "allowed_token_ids": [300, 301]}
    async with client.stream_many() as many:
        await many.submit(PROMPT, request_id="good", max_tokens=4, ignore_eos=True)
        await many.submit(PROMPT, request_id="bad", max_tokens=8, **excluded)  # type: ignore[arg-type]
        await many.done()
        async with asyncio.timeout(60):
            last = {item.request_id: item async for item in many if item.is_last}
    assert last["good"].error is None
    assert isinstance(last["bad"].error, InvalidFieldError)
    with pytest.raises(InvalidFieldError):
        await client.generate(PROMPT, request_id="bad", max_tokens=8, timeout_s=60, **excluded)  # type: ignore[arg-type]
    await serves(client)


async def test_the_tokens_before_an_error_of_the_engine_are_delivered(client: AsyncClient) -> None:
    """A constraint that can be followed for two tokens only."""
    a = (await client.tokenize("a"))[0]
    tokens: list[int] = []

    async def read() -> None:
        async for delta in client.stream(PROMPT, regex="aab", allowed_token_ids=[a], max_tokens=8, stream_interval=1):
            tokens.extend(delta.outputs[0].token_ids)

    with pytest.raises(InvalidFieldError):
        await read()
    assert tokens[:2] == [a, a]
    await serves(client)


async def test_the_first_constraint_does_not_decide_what_the_others_can_say(client: AsyncClient) -> None:
    """What the backend cannot compile is refused, whichever came before; nothing else compiles it in its place."""
    for regex in (r"\p{L}{3}", "(?=a)b"):
        with pytest.raises(InvalidFieldError) as raised:
            await client.generate(PROMPT, regex=regex, max_tokens=4, timeout_s=60)
        assert [v.field for v in raised.value.violations] == ["constraint"]
        assert (await client.generate(PROMPT, regex="aa", max_tokens=4, timeout_s=60)).text == "aa"
    await serves(client)


async def test_a_chat_template_of_a_client_is_refused(client: AsyncClient) -> None:
    """It is a program. So are arguments refused that change what comes out of rendering."""
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    chat = [{"role": "user", "content": "x"}]
    for name, value in {"chat_template": endless, "tokenize": True, "return_dict": True, "truncation": True}.items():
        with pytest.raises(InvalidFieldError) as raised:
            await client.generate(chat, template_params={name: value}, max_tokens=1, timeout_s=60)
        assert [v.field for v in raised.value.violations] == [f"chat.template_params.{name}"]
    await serves(client)


async def test_sequences_are_what_counts(client: AsyncClient) -> None:
    """One request cannot begin thousands of them; vLLM's own limit is QUEUE_FULL too."""
    with pytest.raises(InvalidFieldError) as raised:
        await client.generate(PROMPT, n=257, max_tokens=1)
    assert [v.field for v in raised.value.violations] == ["sampling.n"]
    async with client.stream(PROMPT, n=200, max_tokens=1900, ignore_eos=True) as running:
        await anext(running)
        with pytest.raises(QueueFullError) as full:
            await client.generate(PROMPT, n=200, max_tokens=1)
        assert full.value.retry_after_s is not None
    await wait_idle(client)
    await serves(client)


@pytest.mark.parametrize(
    "num_hostile",
    [min(NUM_HOSTILE, 1600), pytest.param(NUM_HOSTILE, marks=pytest.mark.long("genserve/engine/vllm", "genserve/rpc"))],
)
async def test_hostile_requests_harm_nobody_else(daemon: DaemonProcess, client: AsyncClient, num_hostile: int) -> None:
    """Every one is answered, by tokens or by an error that says why, and after every batch the daemon serves, with no
    request left. GENSERVE_HOSTILE_REQUESTS and GENSERVE_HOSTILE_SEED ask for more, and for others."""
    requests = Requests(SEED)
    outcomes = dict.fromkeys(("tokens", "refused", "internal"), 0)
    async with grpc.aio.insecure_channel(daemon.address) as channel:
        stub = GenerationServiceStub(channel)
        for number in range(num_hostile // BATCH):
            batch = [requests.next() for _ in range(BATCH)]
            codes = await (one_by_one if number % 4 == 3 else together)(stub, batch)
            for message, code in zip(batch, codes, strict=True):
                kind = {0: "tokens", grpc.StatusCode.INTERNAL.value[0]: "internal"}.get(code, "refused")
                outcomes[kind] += 1
                assert kind != "internal", message
            await serves(client)
            health = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=60)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert min(outcomes["tokens"], outcomes["refused"]) > num_hostile / 10, outcomes


async def together(stub: GenerationServiceStub, batch: list[generation_pb2.GenerateRequest]) -> list[int]:
    """Status codes of requests that share a stream, 0 where there was none, in their order."""
    for index, message in enumerate(batch):
        if not message.request_id.startswith("hostile-"):
            message.request_id = f"{index}{message.request_id}"  # to tell the answers apart
    call = stub.GenerateMany(iter([generation_pb2.GenerateManyRequest(generate=m) for m in batch]), timeout=120)
    ended: dict[str, int] = {}
    try:
        async for response in call:
            for item in response.items:
                if item.HasField("error") or item.response.HasField("usage"):
                    assert item.request_id not in ended
                    ended[item.request_id] = item.error.code
    except grpc.aio.AioRpcError as error:
        pytest.fail(f"{error.code()}: {[str(m) for m in batch if m.request_id[:256] not in ended]}")
    return [ended[message.request_id[:256]] for message in batch]


async def one_by_one(stub: GenerationServiceStub, batch: list[generation_pb2.GenerateRequest]) -> list[int]:
    """The same of requests that have a call each."""

    async def code_of(message: generation_pb2.GenerateRequest) -> int:
        try:
            async for _ in stub.Generate(message, timeout=120):
                pass
        except grpc.aio.AioRpcError as error:
            return int(error.code().value[0])
        return 0

    return list(await asyncio.gather(*map(code_of, batch)))


async def test_an_error_is_what_the_client_raises(client: AsyncClient) -> None:
    """Many at once, of which some cannot be served: all results are there."""
    generations = await client.generate_many(
        [PROMPT, "", PROMPT], raise_errors=False, max_tokens=2, ignore_eos=True, timeout_s=60
    )
    assert [isinstance(each.error, GenserveError) for each in generations] == [False, True, False]


def test_the_daemon_has_nothing_to_complain_about(daemon: DaemonProcess) -> None:
    """No traceback of ours."""
    log = daemon.stderr
    assert "Task exception was never retrieved" not in log
    assert "genserve/rpc" not in log
