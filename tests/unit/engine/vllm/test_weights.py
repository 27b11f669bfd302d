"""What workers say of themselves when they are made ready for pushes."""

from types import SimpleNamespace
from typing import Any

import pytest

from genserve.engine.vllm.liveness import Liveness
from genserve.engine.vllm.weights import LiveWeights
from genserve.engine.vllm.workers import Workers
from genserve.worker.contract.calls import Attached


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
