"""Two front ends and an OpenAI server of two data-parallel engines with LoRA adapters: each of them reaches both
engines, and an adapter stays for as long as a request of any process uses it."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from genserve.errors import LoraNotFoundError, UnavailableError
from tests.engine.outputs import ends_early, greedy_outputs, next_version, wait_idle
from tests.support.adapters import CONFIG, PROMPT, adapter
from tests.support.daemon_process import BOTH_CORES, SMALL_ENGINE, DaemonProcess
from tests.support.frontends import PortClient, everywhere_of, on_port, reasons, running
from tests.support.patience import STEP_S, until

pytestmark = pytest.mark.long(
    "genserve/frontends",
    "genserve/daemon",
    "genserve/engine/vllm/clients",
    "genserve/engine/vllm/loras.py",
    "genserve/engine/vllm/openai",
    "genserve/engine/vllm/start/clients.py",
    "genserve/weights/lora",
    "tests/support/frontends.py",
)

NUM_FRONTENDS, NUM_ENGINES = 2, 2


@pytest.fixture(scope="module")
def replicas(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon with two engines, each of which holds two adapters."""
    flags = ["--model", str(checkpoints["a"]), *SMALL_ENGINE, "--data-parallel-size", str(NUM_ENGINES)]
    flags += ["--enable-lora", "--max-loras", "2", "--max-cpu-loras", "2", "--max-lora-rank", "8"]
    process = DaemonProcess(
        [*flags, "--frontends", str(NUM_FRONTENDS), "--openai-port", "0", "--served-model-name", "policy"],
        tmp_path_factory.mktemp("replicas") / "stderr",
        env=BOTH_CORES,
    )
    try:
        yield process.wait_serving()
    finally:
        process.end()


@pytest.fixture(scope="module")
async def everywhere(replicas: DaemonProcess) -> AsyncIterator[Sequence[PortClient]]:
    """A client of the daemon's own port, and one of each front end."""
    async with everywhere_of(replicas.address, NUM_FRONTENDS) as clients:
        yield clients


def directories(daemon: DaemonProcess) -> list[Path]:
    """The adapters' files that the daemon has on disk."""
    return list(Path(tempfile.gettempdir()).glob(f"genserve-lora-{daemon.process.pid}-*"))


async def until_removed(daemon: DaemonProcess) -> None:
    """Waits until no adapter is left."""
    await until(lambda: not directories(daemon))


async def test_every_front_end_reaches_every_engine(
    everywhere: Sequence[PortClient], checkpoints: dict[str, Path]
) -> None:
    """By its rank; before and after a push, and each token is labelled."""
    for name in ("b", "a"):
        version = await next_version(everywhere[0])
        await everywhere[0].push_weights(checkpoints[name], version=version)
        outputs = [await greedy_outputs(each) for each in everywhere]
        assert all(each == outputs[0] for each in outputs)
        for each in everywhere:
            for rank in range(NUM_ENGINES):
                generation = await each.generate(
                    PROMPT, max_tokens=4, ignore_eos=True, temperature=0.0, data_parallel_rank=rank
                )
                assert [span.version for span in generation.sequences[0].weight_spans] == [version]


async def test_a_pause_and_an_abort_reach_both_engines(everywhere: Sequence[PortClient]) -> None:
    """Of requests of all processes on both engines."""
    for rank in range(NUM_ENGINES):
        async with running(everywhere, data_parallel_rank=rank) as tasks:
            pause = await everywhere[0].pause("abort", holder="test", timeout_s=60)
            assert pause.requests_aborted == len(everywhere)
            assert await reasons(tasks) == ["paused"] * len(everywhere)
            await everywhere[0].resume(pause.lease.lease_id)
        async with running(everywhere, data_parallel_rank=rank) as tasks:
            assert len((await everywhere[1].abort(all=True)).aborted_ids) == len(everywhere)
            assert await reasons(tasks) == ["aborted"] * len(everywhere)


async def test_the_openai_server_reaches_every_engine(
    replicas: DaemonProcess, everywhere: Sequence[PortClient]
) -> None:
    """By its rank. A pause ends what it runs on both, and so does its death; the next process serves on."""
    daemon = everywhere[0]
    port = (await daemon.server_info()).openai_port
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:

        async def answer(rank: int, num_tokens: int) -> httpx.Response:
            body = {"model": "policy", "prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
            return await http.post("/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)})

        def both(num_tokens: int) -> list["asyncio.Task[httpx.Response]"]:
            return [asyncio.create_task(answer(rank, num_tokens)) for rank in range(NUM_ENGINES)]

        async def until_they_run() -> None:
            async with asyncio.timeout(STEP_S):
                while (await daemon.status()).load.running < NUM_ENGINES:
                    await asyncio.sleep(0.01)

        short = [each.json()["choices"][0]["text"] for each in await asyncio.gather(*both(8))]
        assert short[0] == short[1] != ""
        paused = both(1900)
        await until_they_run()
        pause = await daemon.pause("abort", holder="test", timeout_s=60)
        assert pause.requests_aborted == NUM_ENGINES
        assert [(await each).json()["choices"][0]["finish_reason"] for each in paused] == NUM_ENGINES * ["abort"]
        await daemon.resume(pause.lease.lease_id)
        cut_off = both(1900)
        await until_they_run()
        async with ends_early(daemon):
            replicas.descendant("APIServer").kill()
            for each in cut_off:
                with pytest.raises(httpx.HTTPError):
                    await each
        assert [each.json()["choices"][0]["text"] for each in await asyncio.gather(*both(8))] == short


async def test_an_adapter_stays_while_a_front_end_uses_it(
    replicas: DaemonProcess, everywhere: Sequence[PortClient], checkpoints: dict[str, Path]
) -> None:
    """The same tokens and version at every port. Unloaded, it stays until the last request ends; nobody can begin
    another one."""
    daemon = everywhere[0]
    await daemon.push_lora("policy", adapter(checkpoints["a"], seed=1), CONFIG, version=7)
    options: Any = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    plain = (await daemon.generate(PROMPT, **options)).token_ids
    said = [(await each.generate(PROMPT, **options, lora_name="policy")).sequences[0] for each in everywhere]
    assert all(each.token_ids == said[0].token_ids != plain for each in said)
    assert {span.lora_version for each in said for span in each.weight_spans} == {7}
    async with running(everywhere, lora_name="policy") as tasks:
        assert (await daemon.unload_lora("policy")).running_requests == len(everywhere)
        for each in everywhere:
            with pytest.raises(LoraNotFoundError, match="policy"):
                await each.generate(PROMPT, **options, lora_name="policy")
        await daemon.abort(["r0", "r1"])
        assert await reasons(tasks[:2]) == ["aborted"] * 2
        assert directories(replicas), "removed while the last request uses it"
        assert not tasks[2].done()
    await until_removed(replicas)


async def test_a_killed_front_end_leaves_no_request_in_an_engine_and_no_adapter(
    replicas: DaemonProcess, everywhere: Sequence[PortClient], checkpoints: dict[str, Path]
) -> None:
    """Nobody but it knew which engine had which request. The next one reaches both engines."""
    daemon, victim = everywhere[0], everywhere[2]
    await daemon.push_lora("policy", adapter(checkpoints["a"], seed=2), CONFIG)
    process = on_port(replicas, victim.port)
    async with running([victim] * 4, lora_name="policy") as lost:
        await daemon.unload_lora("policy")
        process.kill()
        for each in await asyncio.gather(*lost, return_exceptions=True):
            assert isinstance(each, UnavailableError)
    await wait_idle(daemon, timeout_s=60)
    await until_removed(replicas)
    await victim.wait_ready(timeout_s=120)
    for rank in range(NUM_ENGINES):
        generation = await victim.generate(PROMPT, max_tokens=4, ignore_eos=True, data_parallel_rank=rank)
        assert len(generation.token_ids) == 4
