"""Sleep on real vLLM, with workers that forget what GPUs do: what colocated trainers do every step."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from genserve.client import AsyncClient
from genserve.errors import EngineSleepingError, EngineTaintedError, InvalidFieldError
from tests.engine.examples import block
from tests.support.adapters import CONFIG, adapter, saved
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.forgetful_worker import FORGETFUL_EXTENSION, SLEEPS_VARIABLE
from tests.support.patience import until
from tests.support.unchanging import unchanging
from tests.support.warm import process as warm

LIFECYCLE = Path(__file__).parents[2] / "docs" / "lifecycle.md"
PROMPT = [5, 6, 7, 8, 9, 10]
LONG = 400
FOREVER = 1900
"""Tokens of a request that does not end by itself in a test."""


@pytest.fixture(scope="module")
def sleeps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where workers write what they forgot."""
    return tmp_path_factory.mktemp("sleeps") / "log"


@pytest.fixture(scope="module")
def forgetful(checkpoints: dict[str, Path], sleeps: Path) -> Iterator[DaemonProcess]:
    flags = ["--model", str(checkpoints["a"]), *SMALL_ENGINE, "--enable-lora", "--max-lora-rank", "8"]
    process = DaemonProcess(
        [*flags, "--worker-extension-cls", FORGETFUL_EXTENSION],
        sleeps.with_name("stderr"),
        env={SLEEPS_VARIABLE: str(sleeps)},
    )
    try:
        yield process.wait_serving()
    finally:
        process.end()


@pytest.fixture
async def client(forgetful: DaemonProcess) -> AsyncIterator[AsyncClient]:
    """A client of the daemon, which is awake after every test."""
    async with AsyncClient(forgetful.address) as connected:
        yield connected
        assert (await connected.wake_up()).phase == "running"


class SleepLog:
    """What workers have forgotten since the test began."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._path.write_text("")

    def lines(self) -> list[str]:
        """One for each call."""
        return self._path.read_text().splitlines()


@pytest.fixture
def log(sleeps: Path) -> SleepLog:
    return SleepLog(sleeps)


async def tokens(client: AsyncClient, **options: Any) -> list[int]:
    """A greedy continuation."""
    options = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True} | options
    (sequence,) = (await client.generate(PROMPT, **options)).sequences
    return list(sequence.token_ids)


async def collect(client: AsyncClient, found: list[int]) -> None:
    """The same, as it comes, and much longer."""
    async for delta in client.stream(PROMPT, max_tokens=FOREVER, temperature=0.0, ignore_eos=True):
        found += delta.outputs[0].token_ids


async def until_more_than(found: list[int], num_tokens: int) -> None:
    """Waits for tokens."""
    await until(lambda: len(found) > num_tokens)


async def digests(client: AsyncClient) -> dict[tuple[str, str], str]:
    """Of every live tensor."""
    return (await client.get_weights(include_digests=True)).digests


async def test_level_2_serves_the_same_version_after_the_wake_up(client: AsyncClient, log: SleepLog) -> None:
    """Every tensor is what it was, and a request that was under way goes on as if nothing had happened."""
    before, whole = await tokens(client), await tokens(client, max_tokens=LONG)
    live, version = await digests(client), (await client.status()).state.weight_version
    found: list[int] = []
    begun = asyncio.create_task(collect(client, found))
    await until_more_than(found, 0)
    asleep = await client.sleep(level=2)
    assert (asleep.phase, asleep.weights_discarded) == ("sleeping", True)
    num_tokens = await unchanging(lambda: len(found))
    assert not begun.done(), "nothing is proven about requests under way"
    awake = await client.wake_up()
    assert (awake.phase, awake.asleep_tags, awake.weights_discarded) == ("running", [], False)
    await until_more_than(found, max(num_tokens + 100, LONG))
    begun.cancel()
    await asyncio.wait([begun])
    assert found[:LONG] == whole
    assert found == await tokens(client, max_tokens=len(found))
    assert await tokens(client) == before
    assert await digests(client) == live
    assert awake.weight_version == version
    slept, *woken = log.lines()
    assert int(slept.removeprefix("sleep 2: ").removesuffix(" spoiled")) > 20
    assert woken == ["wake_up weights", "wake_up all"]


@pytest.mark.parametrize("level", [0, 1])
async def test_a_wake_up_under_a_lease_leaves_the_engine_paused(client: AsyncClient, level: int) -> None:
    """vLLM schedules as soon as all is awake: one step may have begun by the time the pause is there, and no more."""
    found: list[int] = []
    running = asyncio.create_task(collect(client, found))
    await until_more_than(found, 5)
    async with client.paused():
        before = await unchanging(lambda: len(found))
        await client.sleep(level=level)
        await client.wake_up()
        assert await unchanging(lambda: len(found)) - before <= 1
    running.cancel()
    await asyncio.wait([running])


@pytest.mark.parametrize("level", [1, 2])
async def test_a_trainer_pushes_between_the_weights_and_the_kv_cache(
    client: AsyncClient, checkpoints: dict[str, Path], level: int
) -> None:
    """Nothing is generated before all is awake, and then under the new version alone."""
    of_a = await tokens(client)
    version = (await client.status()).state.weight_version
    await client.push_weights(checkpoints["b"], version=version + 1)
    of_b = await tokens(client)
    assert of_a != of_b
    await client.push_weights(checkpoints["a"], version=version + 2)
    assert await tokens(client) == of_a
    await client.sleep(level=level)
    with pytest.raises(EngineSleepingError):
        await client.push_weights(checkpoints["b"], version=version + 3)
    assert (await client.wake_up(["weights"])).asleep_tags == ["scheduling", "kv_cache"]
    applied = (await client.push_weights(checkpoints["b"], version=version + 3)).applied
    assert applied is not None and applied.paused_s == 0
    assert (await client.status()).state.phase == "sleeping"
    with pytest.raises(EngineSleepingError):
        await tokens(client)
    assert (await client.wake_up(["kv_cache"])).phase == "running"
    assert await tokens(client) == of_b
    await client.push_weights(checkpoints["a"], version=version + 4)


async def test_the_recipe_of_a_trainer_that_shares_the_gpu_runs(
    client: AsyncClient, checkpoints: dict[str, Path], forgetful: DaemonProcess
) -> None:
    """As it stands; also when a trainer before it has died while the engine slept."""
    version = (await client.status()).state.weight_version
    await client.sleep(level=2)
    program = (
        "from pathlib import Path\nfrom genserve.client import Client\nfrom tests.support import models\n"
        "class trainer:\n    step = offload = staticmethod(lambda *_: None)\n"
        f"    weights = staticmethod(lambda: models.load_tensors(Path({str(checkpoints['b'])!r})))\n"
        f"num_steps, prompts, client = 2, ['x'], Client({forgetful.address!r})\n"
    )
    recipe = block("python", "client.sleep", LIFECYCLE)
    done = await asyncio.to_thread(warm.run, [sys.executable, "-c", program + recipe], timeout=180)
    assert done.returncode == 0, done.stderr
    state = (await client.status()).state
    assert (state.phase, state.weight_version) == ("running", version + 3)
    applied = (await client.push_weights(checkpoints["a"], version=version + 4)).applied
    assert applied is not None and applied.paused_s > 0


async def test_dropped_weights_are_neither_digested_nor_woken_last(client: AsyncClient) -> None:
    """On a GPU the first would read memory that is not there."""
    await client.sleep(level=2)
    with pytest.raises(EngineSleepingError):
        await client.get_weights(include_digests=True)
    with pytest.raises(InvalidFieldError) as caught:
        await client.wake_up(["kv_cache"])
    assert caught.value.violations[0].field == "tags"
    await client.wake_up(["weights"])
    with pytest.raises(EngineTaintedError):
        await client.get_weights(include_digests=True)


async def test_adapters_outlive_level_2(client: AsyncClient, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Their slots lie in the pool of the weights: they are filled again from the host. One can be loaded while only the
    weights are awake."""
    one = saved(adapter(checkpoints["a"], seed=1), tmp_path / "one")
    await client.load_lora("one", str(one))
    before = await tokens(client, lora_name="one")
    assert before != await tokens(client)
    await client.sleep(level=2)
    await client.wake_up(["weights"])
    await client.push_lora("two", adapter(checkpoints["a"], seed=1), CONFIG)
    await client.wake_up()
    assert await tokens(client, lora_name="one") == before
    assert await tokens(client, lora_name="two") == before


@pytest.mark.parametrize("options", [{"level": 0}, {"tags": ["kv_cache"]}])
async def test_a_sleep_that_keeps_the_weights_takes_pushes(
    client: AsyncClient, checkpoints: dict[str, Path], options: Any
) -> None:
    """The engine stands still until it is woken up."""
    before = await tokens(client)
    version = (await client.status()).state.weight_version
    asleep = await client.sleep(**options)
    assert "weights" not in asleep.asleep_tags
    await client.push_weights(checkpoints["b"], version=version + 1)
    with pytest.raises(EngineSleepingError):
        await tokens(client)
    await client.wake_up()
    assert await tokens(client) != before
    await client.push_weights(checkpoints["a"], version=version + 2)
    assert await tokens(client) == before
