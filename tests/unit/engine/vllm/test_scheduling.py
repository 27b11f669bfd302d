"""What an engine is asked to drop when the weights change; without an engine."""

from types import SimpleNamespace
from typing import Any

import pytest

from genserve.engine.types import KvPolicy, PauseMode
from genserve.engine.vllm.liveness import Liveness
from genserve.engine.vllm.scheduling import Scheduling
from genserve.errors import GenserveError
from tests.support.refusals import refuses

IMAGES = ["renderer clears its images", "core clears its images", "core clears embeddings"]


class Recorder:
    """As AsyncLLM, its renderer and its client of EngineCore; of two engines, the second answers `dropped`."""

    def __init__(self, *, multimodal: bool, dropped: bool = True) -> None:
        self.calls: list[str] = []
        self.dropped = dropped
        self.renderer = self.engine_core = self
        model = SimpleNamespace(is_moe=False, is_multimodal_model=multimodal)
        parallel = SimpleNamespace(data_parallel_size=2)
        self.vllm_config = SimpleNamespace(model_config=model, parallel_config=parallel)

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        """As the client's."""
        self.calls.append(f"pause {mode} {clear_cache}")

    async def call_utility_all_async(self, method: str, *args: Any) -> list[bool]:
        """As the client's."""
        self.calls.append(f"{method} {args}")
        return [True, self.dropped]

    async def clear_mm_cache_async(self) -> None:
        """As the renderer's."""
        self.calls.append(IMAGES[0])

    async def reset_mm_cache_async(self) -> None:
        """As the client's."""
        self.calls.append(IMAGES[1])

    async def reset_encoder_cache_async(self) -> None:
        """As the client's."""
        self.calls.append(IMAGES[2])


def scheduling(llm: Recorder) -> Scheduling:
    """Of such an engine."""
    return Scheduling(llm, Liveness())  # type: ignore[arg-type]


async def test_a_reset_drops_keys_values_connectors_images_and_embeddings() -> None:
    """Whatever the old weights have computed; embeddings are what the vision tower made of images."""
    llm = Recorder(multimodal=True)
    await scheduling(llm).reset_caches(1.0)
    assert llm.calls == ["reset_prefix_cache (True, True)", *IMAGES]


async def test_a_model_without_images_is_asked_for_keys_and_values_alone() -> None:
    """A pause is short."""
    llm = Recorder(multimodal=False)
    await scheduling(llm).reset_caches(1.0)
    await scheduling(llm).pause(PauseMode.KEEP, KvPolicy.RECOMPUTE, 1.0)
    assert llm.calls == ["reset_prefix_cache (True, True)", "pause keep True"]


async def test_an_engine_whose_connector_drops_nothing_is_reported() -> None:
    """Also when it is not the first one, whose answer is all that AsyncLLM gives."""
    llm = Recorder(multimodal=True, dropped=False)
    with refuses(GenserveError, says="connector"):
        await scheduling(llm).reset_caches(1.0)


@pytest.mark.parametrize(
    ("policy", "calls"),
    [(KvPolicy.REUSE, ["pause keep False"]), (KvPolicy.RECOMPUTE, [IMAGES[0], "pause keep True"])],
)
async def test_a_pause_that_drops_images_drops_them_on_both_sides(policy: KvPolicy, calls: list[str]) -> None:
    """The renderer sends EngineCore the bare names of images that it thinks known there."""
    llm = Recorder(multimodal=True)
    await scheduling(llm).pause(PauseMode.KEEP, policy, 1.0)
    assert llm.calls == calls
