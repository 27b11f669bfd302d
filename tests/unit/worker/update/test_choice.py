"""What a worker of a GPU finds out before it chooses, and what is built where; with objects that have vLLM's fields."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from genserve.worker.contract.placement import GIB, Placement, WorkerFacts
from genserve.worker.contract.vllm_settings import RANKS_HERE_KEY, WEIGHT_UPDATE_KEY
from genserve.worker.update import choice as update
from genserve.worker.update.choice import Chosen, choose, gpu_facts, make_update
from genserve.worker.update.device import Device

FREE = 60 * GIB
SIZES = [10 * GIB, 2 * GIB, 4 * GIB]


def worker(asked: str = "auto", kv_cache_memory_bytes: int | None = None, **told: int) -> Any:
    """One of 80 GiB, of which vLLM may take 72 and others have 2, when the model has taken 18."""
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            additional_config={WEIGHT_UPDATE_KEY: asked, **told},
            model_config=SimpleNamespace(quantization=None),
            quant_config=None,
            speculative_config=None,
        ),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=kv_cache_memory_bytes),
        model_runner=SimpleNamespace(get_model=lambda: nn.Linear(1, 1), kv_caches=[]),
        requested_memory=72 * GIB,
        init_snapshot=SimpleNamespace(free_memory=78 * GIB),
        device=torch.device("cuda", 0),
    )


@pytest.fixture(autouse=True)
def host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host has."""
    monkeypatch.setattr(update, "available_memory_bytes", lambda: 240 * GIB)


def test_what_is_left_is_what_vllm_may_take_less_what_it_has_taken() -> None:
    """And what others hold is no matter, as vLLM was told how much to take."""
    assert gpu_facts(worker(), SIZES, FREE) == WorkerFacts(16 * GIB, 10 * GIB, 54 * GIB, 240 * GIB)
    assert gpu_facts(worker(), SIZES, GIB).left_bytes == 0


def test_a_kv_cache_of_a_fixed_size_leaves_the_rest_of_the_device() -> None:
    """`--gpu-memory-utilization` is no matter then."""
    facts = gpu_facts(worker(kv_cache_memory_bytes=8 * GIB), SIZES, FREE)
    assert (facts.left_bytes, facts.kv_cache_bytes) == (FREE - 8 * GIB, 8 * GIB)
    assert gpu_facts(worker(kv_cache_memory_bytes=80 * GIB), SIZES, FREE).left_bytes == 0


def test_with_the_kv_cache_there_what_is_free_is_left() -> None:
    """For a worker class that does not reserve."""
    late = worker(kv_cache_memory_bytes=8 * GIB)
    late.model_runner.kv_caches = [torch.zeros(1)]
    assert gpu_facts(late, SIZES, 3 * GIB).left_bytes == 3 * GIB


@pytest.mark.parametrize(("told", "num_here"), [({}, 1), ({RANKS_HERE_KEY: 6}, 6), ({RANKS_HERE_KEY: 0}, 1)])
def test_the_workers_of_a_host_share_its_memory(told: dict[str, int], num_here: int) -> None:
    """Each has its part; the daemon tells them how many they are."""
    assert gpu_facts(worker(**told), SIZES, FREE).cpu_bytes == 240 * GIB // num_here


def test_weights_that_are_quantised_as_they_are_loaded_are_known() -> None:
    """By vLLM's configuration of it."""
    quantised = worker()
    quantised.vllm_config.model_config.quantization = "fp8"
    found = gpu_facts(quantised, SIZES, FREE)
    assert (found.quantization, found.is_online) == ("fp8", False)
    spec = SimpleNamespace(weight=object())
    quantised.vllm_config.quant_config = SimpleNamespace(args=SimpleNamespace(linear=spec))
    assert gpu_facts(quantised, SIZES, FREE).is_online


class Gpu(Device):
    """A device with memory to spare."""

    def free_bytes(self) -> int:
        return FREE


@pytest.mark.parametrize(
    ("asked", "built", "place"),
    [("auto", "beside", "cuda"), ("beside", "beside", "cuda"), ("host", "beside", "cpu"), ("inplace", "inplace", None)],
)
def test_versions_are_built_where_the_way_says(
    monkeypatch: pytest.MonkeyPatch, asked: str, built: str, place: str | None
) -> None:
    """On the host for host alone."""
    asked_for: list[Any] = []
    monkeypatch.setattr(Device, "of", Gpu)
    monkeypatch.setattr(update, "BesideUpdate", lambda live, config, device, at: asked_for.append(("beside", at.type)))
    monkeypatch.setattr(update, "InPlaceUpdate", lambda live, config, device: asked_for.append(("inplace", None)))
    chosen = choose(worker(asked))
    assert chosen.placement.way == ("beside" if asked == "auto" else asked)
    assert asked_for == [(built, place)]


class Recorded:
    """An update that writes down what is asked of it; its audit may fail."""

    can_roll_back = True
    reserved = "what drafts needs"

    def __init__(self, name: str, said: list[tuple[Any, ...]], failure: Exception | None = None) -> None:
        self._name, self._said, self._failure = name, said, failure

    def audit(self) -> None:
        """May fail."""
        if self._failure is not None:
            raise self._failure

    def __getattr__(self, asked: str) -> Any:
        return lambda *given: self._said.append((self._name, asked, *given))


@pytest.mark.parametrize("failure", [None, ValueError("layer.kernel is hidden")])
def test_draft_model_takes_part_unless_its_first_steps_changed_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: Exception | None
) -> None:
    """Memory is taken for both at once, when it is chosen; what drafts lets go of it if it cannot be exchanged."""
    said: list[tuple[Any, ...]] = []
    served, draft = Recorded("served", said), Recorded("draft", said, failure)
    monkeypatch.setattr(Device, "of", Gpu)
    monkeypatch.setattr(update, "BesideUpdate", lambda *_: served)
    monkeypatch.setattr(update, "draft_update", lambda *_: draft)
    made, chosen = make_update(worker("beside"))
    assert said[0] == ("served", "reserve_memory", draft.reserved)
    assert chosen.placement.way == "beside"
    made.discard()
    if failure is None:
        assert said[1:] == [("served", "discard"), ("draft", "discard")]
    else:
        assert said[1:] == [("draft", "let_go"), ("served", "discard")]
        assert "layer.kernel is hidden" in caplog.text


def test_worker_keeps_the_choice_it_made_when_it_loaded_its_model() -> None:
    """The memory is taken then."""
    said: list[tuple[Any, ...]] = []
    served: Any = Recorded("served", said)
    loaded, before = worker(), Chosen(Placement("beside", ""), Device(torch.device("cpu")), served, None)
    loaded.genserve_chosen = before
    assert make_update(loaded) == (served, before)
    assert said == []


def test_a_way_that_cannot_be_had_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the flag; nothing is built."""
    monkeypatch.setattr(Device, "of", Gpu)
    monkeypatch.setattr(update, "available_memory_bytes", lambda: 0)
    with pytest.raises(ValueError, match="--weight-update host needs"):
        choose(worker("host"))
