"""An adapter counts as loaded only if all of it reached a layer, on one rank or another."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from genserve.engine.vllm import loras as live_loras
from genserve.engine.vllm.liveness import Liveness
from genserve.engine.vllm.loras import LiveLoras
from genserve.engine.vllm.workers import Workers
from genserve.errors import LoraNotFoundError, ManifestMismatchError, StagingFullError
from genserve.worker.contract.calls import Ack, AddedLora
from tests.support.patience import until
from tests.support.refusals import refuses


class ScriptedCore:
    """vLLM's client of its engine, with two ranks. `without_layer`: the modules that each of them takes none of.
    `failing_removals`: what a rank says of the next ones, "" = they are not answered before `is_closed`."""

    def __init__(self) -> None:
        self.without_layer: list[list[str]] = [[], []]
        self.loaded: set[int] = set()
        self.failing_removals: list[str] = []
        self.is_closed = asyncio.Event()

    async def call_utility_all_async(self, name: str, method: str, *args: Any) -> list[list[dict[str, Any]]]:
        """As vLLM's."""
        request = args[1][0]
        if method == "genserve_remove_lora":
            error = ""
            if self.failing_removals and not (error := self.failing_removals.pop(0)):
                await self.is_closed.wait()
            self.loaded.discard(request["lora_id"])
            return [[Ack(rank, request["nonce"], error).to_wire() for rank in ("pp0", "pp1")]]
        self.loaded.add(request["lora_id"])
        of_ranks = zip(("pp0", "pp1"), self.without_layer, strict=True)
        return [[AddedLora(rank, request["nonce"], "", unused).to_wire() for rank, unused in of_ranks]]


class Files:
    """What an adapter is loaded from."""

    rank, size_bytes, source, push_id, directory = 1, 1, "", "", ""

    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def core() -> ScriptedCore:
    return ScriptedCore()


@pytest.fixture
async def loras(core: ScriptedCore) -> AsyncIterator[LiveLoras]:
    workers = Workers(core, Liveness(lambda: None), 2)
    live = LiveLoras(workers, 4)
    yield live
    live.close()
    core.is_closed.set()
    workers.close()


async def test_what_no_rank_has_a_layer_for_is_refused_and_removed(loras: LiveLoras, core: ScriptedCore) -> None:
    """The adapter before it stays."""
    await loras.load("policy", Files(), 5.0)
    core.without_layer = [["model.x.q_proj", "model.layers.1.q_proj"], ["model.layers.0.q_proj", "model.x.q_proj"]]
    files = Files()
    with refuses(ManifestMismatchError, field="header.manifest", says="model.x.q_proj"):
        await loras.load("policy", files, 5.0)
    await until(lambda: files.is_closed)
    assert core.loaded == {1}
    assert [each.name for each in loras.loaded()] == ["policy"]


async def test_layers_of_other_ranks_are_no_reason(loras: LiveLoras, core: ScriptedCore) -> None:
    """Each rank of pipeline parallelism has some of them."""
    core.without_layer = [["model.layers.1.q_proj"], ["model.layers.0.q_proj"]]
    assert (await loras.load("policy", Files(), 5.0)).name == "policy"


async def test_many_modules_are_counted(loras: LiveLoras, core: ScriptedCore) -> None:
    """An error message stays readable."""
    names = [f"x.{number}" for number in range(10)]
    core.without_layer = [names, names]
    with refuses(ManifestMismatchError, says="and 7 more"):
        await loras.load("policy", Files(), 5.0)


async def test_a_request_is_labelled_with_the_version_that_it_began_with(loras: LiveLoras, core: ScriptedCore) -> None:
    """Whatever is loaded under the name afterwards; a load that fails is no version."""
    for version, expected in ((0, 1), (7, 7), (0, 8), (3, 3)):
        assert (await loras.load("policy", Files(), 5.0, version)).version == expected
        used = await loras.use("policy", "r")
        assert (used.version, used.unique_name) == (expected, f"policy#{used.lora_id}")
        loras.release("r")
    core.without_layer = [["x"], ["x"]]
    with refuses(ManifestMismatchError):
        await loras.load("policy", Files(), 5.0, 9)
    assert [each.version for each in loras.loaded()] == [3]
    core.without_layer = [[], []]
    assert (await loras.load("other", Files(), 5.0)).version == 1


async def test_a_removal_that_fails_is_tried_again(
    loras: LiveLoras, core: ScriptedCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each place that is lost for good would be one adapter less until the daemon starts again."""
    monkeypatch.setattr(live_loras, "REMOVE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(live_loras, "FIRST_RETRY_S", 0.01)
    core.failing_removals = ["", "CUDA error", ""]
    files = [Files() for _ in range(4)]
    for number, each in enumerate(files):
        await loras.load(f"policy {number}", each, 5.0)
    loras.unload("policy 1")
    assert (await loras.load("policy 4", Files(), 20.0)).version == 1
    await until(lambda: files[1].is_closed)  # in a thread, after its place is free
    assert [each.is_closed for each in files] == [False, True, False, False]
    assert core.failing_removals == []


async def test_a_load_does_not_wait_for_a_place_that_never_comes(
    loras: LiveLoras, core: ScriptedCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long its timeout: nothing else can change the engine meanwhile."""
    monkeypatch.setattr(live_loras, "PLACE_TIMEOUT_S", 0.1)
    core.failing_removals = ["CUDA error"] * 100
    for number in range(4):
        await loras.load(f"policy {number}", Files(), 5.0)
    loras.unload("policy 1")
    files = Files()
    with refuses(StagingFullError, says="policy 1 (old), policy 2, policy 3; some are being removed: load again later"):
        await loras.load("policy 4", files, 600.0)
    assert files.is_closed


async def test_an_engine_without_adapters_says_with_what_it_takes_some(core: ScriptedCore) -> None:
    workers = Workers(core, Liveness(lambda: None), 1)
    with refuses(LoraNotFoundError, says="without --enable-lora"):
        await LiveLoras(workers, 0).use("x", "request")
    workers.close()
