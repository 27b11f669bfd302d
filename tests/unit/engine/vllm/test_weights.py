"""What workers say of themselves when they are made ready for pushes, and of the weights that they serve."""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from genserve.engine.types import DigestedWeights
from genserve.engine.vllm.liveness import Liveness
from genserve.engine.vllm.weights import LiveWeights
from genserve.engine.vllm.workers import Workers
from genserve.errors import GenserveError
from genserve.worker.contract.calls import Attached, Digests


class ScriptedCore:
    """vLLM's client of an engine whose workers have these model runners."""

    def __init__(self, *runners: str) -> None:
        self._runners = runners

    async def call_utility_all_async(self, name: str, method: str, *args: Any) -> list[list[dict[str, Any]]]:
        """As vLLM's."""
        assert method == "genserve_attach"
        return [[Attached(f"tp{i}", "", "beside", model_runner=each).to_wire() for i, each in enumerate(self._runners)]]


async def attached(expected: str, *runners: str) -> Attached:
    """What a daemon learns that expects this runner."""
    llm: Any = SimpleNamespace(vllm_config=SimpleNamespace(use_v2_model_runner=expected == "v2"))
    liveness = Liveness(lambda: None)
    weights = LiveWeights(llm, liveness, Workers(ScriptedCore(*runners), liveness, len(runners)), "")
    try:
        return await weights.attach(10.0, takes_adapters=False)
    finally:
        weights.close()


@pytest.mark.parametrize("runner", ["v1", "v2"])
async def test_the_model_runner_is_the_one_that_the_workers_have(runner: str) -> None:
    """All of them."""
    assert (await attached(runner, runner, runner)).model_runner == runner


@pytest.mark.parametrize(("expected", "runners"), [("v2", ("v2", "v1")), ("v1", ("v2", "v2"))])
async def test_a_worker_with_another_model_runner_is_no_worker_of_this_engine(
    expected: str, runners: tuple[str, ...]
) -> None:
    """Its host has another environment: the scheduler would tell it what it does not understand."""
    with pytest.raises(RuntimeError, match=r"worker tp[01] has vLLM's model runner v[12].*VLLM_USE_V2_MODEL_RUNNER"):
        await attached(expected, *runners)


class ReadingCore:
    """Two ranks that serve a version. The second one reads its weights in a part more than the first."""

    def __init__(self) -> None:
        self.error = ""
        self._parts = [0, 0]

    async def call_utility_all_async(self, name: str, method: str, *args: Any) -> list[list[dict[str, Any]]]:
        """As vLLM's."""
        assert method == "genserve_digests"
        self._parts = [done + 1 for done in self._parts]
        ranks = zip(("tp0", "tp1"), self._parts, (1, 2), (0.5, 0.25), strict=True)
        return [
            [
                Digests(rank, {"w": "a"} if read >= all_ else {}, read >= all_, spent_s, self.error).to_wire()
                for rank, read, all_, spent_s in ranks
            ]
        ]


@pytest.fixture
def core() -> ReadingCore:
    return ReadingCore()


@pytest.fixture
async def live(core: ReadingCore) -> AsyncIterator[LiveWeights]:
    """Of an engine with these ranks."""
    llm: Any = SimpleNamespace()
    liveness = Liveness(lambda: None)
    weights = LiveWeights(llm, liveness, Workers(core, liveness, 2), "")
    yield weights
    weights.close()


def told(part: DigestedWeights) -> list[tuple[str, str]] | None:
    return None if part.digests is None else [(each.rank, each.sha256) for each in part.digests]


async def test_digests_are_known_when_every_rank_has_read_its_weights(live: LiveWeights) -> None:
    """Each part says how long the slowest rank was at it."""
    part = await live.digests(10.0)
    assert (told(part), part.spent_s) == (None, 0.5)
    part = await live.digests(10.0)
    assert (told(part), part.spent_s) == ([("tp0", "a"), ("tp1", "a")], 0.5)


async def test_a_rank_that_cannot_read_its_weights_is_named(core: ReadingCore, live: LiveWeights) -> None:
    """With its error."""
    core.error = "RuntimeError: no"
    with pytest.raises(GenserveError, match="tp0 could not read its weights: RuntimeError: no"):
        await live.digests(10.0)
