"""The in-place update in a worker of plain vLLM: exact versions, whatever failed before. One engine for all of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import models
from tests.engine.conftest import Reference
from tests.engine.trap import Faults, run_steps

V_PROJ = "model.layers.1.self_attn.v_proj.weight"
FAILURES: dict[str, tuple[Faults, str]] = {
    "the source, in the middle of a layer": ({"before": V_PROJ}, "ordered to fail before"),
    "the loader, in the middle of the first layer": ({"misshapen": V_PROJ.replace("1", "0")}, ""),
    "the loader, in the middle of the last layer": ({"misshapen": V_PROJ}, ""),
    "the loader, after all layers": ({"misshapen": "model.norm.weight"}, ""),
    "post-processing of the last layer": ({"processing": 1}, "ordered to fail in post-processing"),
    "post-processing of embeddings and head": ({"processing": 2}, "ordered to fail in post-processing"),
    "the exchange, in the middle of a layer": ({"put": 5}, "ordered to fail in the exchange"),
    "a tensor that is part of a parameter is missing": ({"lacks": V_PROJ}, "layers.1.self_attn.qkv_proj.weight"),
    "a whole parameter is missing": ({"lacks": "model.norm.weight"}, "no tensor gave a value to all of model.norm"),
}
BEFORE_ANYTHING = {"the source, in the middle of a layer", "the loader, in the middle of the first layer"}
"""Failures after which every layer is still the old one."""

Digests = dict[str, str]


@pytest.fixture(scope="module")
def answers(checkpoints: dict[str, Path]) -> dict[str, list[Any]]:
    """What one engine answered, by what it was asked for."""
    a, b = str(checkpoints["a"]), str(checkpoints["b"])
    script: dict[str, list[list[Any]]] = {"cold": [["digests"], ["attach"]]}
    script["alternate"] = [step for path in (b, a, b, a) for step in (["commit", path, {}], ["digests"])]
    script["rehearse"] = [["rehearse", b, {}], ["digests"]]
    for name, (faults, _) in FAILURES.items():
        script[f"rehearse {name}"] = [["rehearse", b, faults], ["digests"]]
        script[f"fail {name}"] = [["commit", b, faults], ["digests"]]
        script[f"heal {name}"] = [["commit", a, {}], ["digests"], ["commit", b, {}], ["digests"]]
        script[f"back {name}"] = [["commit", a, {}]]
    given = iter(run_steps(checkpoints["a"], [step for steps in script.values() for step in steps]))
    return {name: [next(given) for _ in steps] for name, steps in script.items()}


@pytest.fixture(scope="module")
def cold(answers: dict[str, list[Any]], reference: Callable[..., Reference]) -> dict[str, Digests]:
    """Digests of engines that loaded a, or b, themselves."""
    b = {name.split(" ", 1)[1]: digest for name, digest in reference("b")["digests"].items()}
    assert answers["cold"][1] is None
    return {"a": answers["cold"][0], "b": b}


def test_versions_are_exact_and_take_room_for_one_layer(
    answers: dict[str, list[Any]], cold: dict[str, Digests], checkpoints: dict[str, Path]
) -> None:
    """Every live tensor is that of a cold start, and the most that was held at a time is the largest layer."""
    assert cold["a"].keys() == cold["b"].keys()
    assert cold["a"] != cold["b"]
    assert answers["alternate"][1::2] == [cold["b"], cold["a"], cold["b"], cold["a"]]
    sizes: dict[str, int] = {}
    for name, tensor in models.load_tensors(checkpoints["a"]).items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else ""
        sizes[layer] = sizes.get(layer, 0) + tensor.nbytes
    assert set(answers["alternate"][0::2]) == {max(sizes.values())}
    assert max(sizes.values()) < 0.5 * sum(sizes.values())


def test_a_rehearsal_changes_nothing(answers: dict[str, list[Any]], cold: dict[str, Digests]) -> None:
    """It may run while the live model serves."""
    assert answers["rehearse"] == [None, cold["a"]]


@pytest.mark.parametrize("name", FAILURES)
def test_after_a_failure_the_next_complete_version_is_exact(
    answers: dict[str, list[Any]], cold: dict[str, Digests], name: str
) -> None:
    """The previous version as well as the one that failed; between them every tensor is one or the other's."""
    failed, mixed = answers[f"fail {name}"]
    assert FAILURES[name][1] in failed["error"]
    assert all(digest in (cold["a"][key], cold["b"][key]) for key, digest in mixed.items())
    assert mixed != cold["b"]
    assert (mixed == cold["a"]) == (name in BEFORE_ANYTHING)
    _, healed, _, again = answers[f"heal {name}"]
    assert healed == cold["a"]
    assert again == cold["b"]


@pytest.mark.parametrize("name", FAILURES)
def test_a_rehearsal_finds_what_is_wrong_with_a_version(
    answers: dict[str, list[Any]], cold: dict[str, Digests], name: str
) -> None:
    """All but what fails in the exchange; and nothing has changed."""
    faults, says = FAILURES[name]
    found, after = answers[f"rehearse {name}"]
    assert after == cold["a"]
    assert found is None if "put" in faults else says in found["error"]
