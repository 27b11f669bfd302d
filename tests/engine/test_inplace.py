"""The in-place update in a worker of plain vLLM: exact versions, whatever failed before. One engine for all of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.trap import Faults, run_steps
from tests.support import models
from tests.support.plain_vllm import Reference

V_PROJ = "model.layers.1.self_attn.v_proj.weight"
WRONG_VERSIONS: dict[str, tuple[Faults, str]] = {
    "the source fails": ({"before": V_PROJ}, f"ordered to fail before {V_PROJ}"),
    "a tensor of the first layer is misshapen": ({"misshapen": V_PROJ.replace("1", "0")}, "failed with error"),
    "a tensor of the last layer is misshapen": ({"misshapen": V_PROJ}, "failed with error"),
    "post-processing fails": ({"processing": 1}, "ordered to fail in post-processing"),
    "a tensor that is a part of a parameter is missing": ({"lacks": V_PROJ}, "layers.1.self_attn.qkv_proj.weight"),
    "a tensor that is a whole parameter is missing": ({"lacks": "model.norm.weight"}, "complete value to model.norm"),
}
FAILING_COMMITS: dict[str, tuple[Faults, str]] = {
    "loading the first layer": ({"loading": 5}, "ordered to fail in loading"),
    "loading the last layer": ({"loading": 16}, "ordered to fail in loading"),
    "post-processing the last layer": ({"processing": 1}, "ordered to fail in post-processing"),
    "post-processing embeddings and head": ({"processing": 2}, "ordered to fail in post-processing"),
    "exchanging the first layer": ({"put": 5}, "ordered to fail in the exchange"),
    "exchanging embeddings and head": ({"put": 28}, "ordered to fail in the exchange"),
}

Digests = dict[str, str]


@pytest.fixture(scope="module")
def answers(checkpoints: dict[str, Path]) -> dict[str, list[Any]]:
    """What one engine answered, by what it was asked for."""
    a, b = str(checkpoints["a"]), str(checkpoints["b"])

    def update(path: str) -> list[list[Any]]:
        return [["prepare", path, {}], ["commit", {}], ["digests"]]

    script: dict[str, list[list[Any]]] = {"cold": [["digests"], ["attach"]]}
    script["prepare"] = [["prepare", b, {}], ["digests"], ["rollback"], ["digests"]]
    script["alternate"] = update(b) + update(a) + update(b) + update(a)
    for name, (faults, _) in WRONG_VERSIONS.items():
        script[name] = [["prepare", b, faults], ["commit", {}], ["digests"], *update(b), *update(a)]
    for name, (faults, _) in FAILING_COMMITS.items():
        script[name] = [["prepare", b, {}], ["commit", faults], ["digests"], ["rollback"], *update(a)]
        script[f"{name}, and then another"] = [*update(b), *update(a)]
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
    assert answers["alternate"][2::3] == [cold["b"], cold["a"], cold["b"], cold["a"]]
    sizes: dict[str, int] = {}
    for name, tensor in models.load_tensors(checkpoints["a"]).items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else ""
        sizes[layer] = sizes.get(layer, 0) + tensor.nbytes
    assert set(answers["alternate"][1::3]) == {max(sizes.values())}
    assert max(sizes.values()) < 0.5 * sum(sizes.values())


def test_preparing_changes_nothing(answers: dict[str, list[Any]], cold: dict[str, Digests]) -> None:
    """It may run while the live version serves, and needs no way back."""
    assert answers["prepare"] == [None, cold["a"], None, cold["a"]]


@pytest.mark.parametrize("name", WRONG_VERSIONS)
def test_what_is_wrong_with_a_version_is_found_before_anything_changes(
    answers: dict[str, list[Any]], cold: dict[str, Digests], name: str
) -> None:
    """It cannot be committed, and the next ones are exact."""
    prepared, committed, after, *updates = answers[name]
    assert WRONG_VERSIONS[name][1] in prepared["error"]
    assert "nothing is prepared" in committed["error"]
    assert after == cold["a"]
    assert updates[2::3] == [cold["b"], cold["a"]]


@pytest.mark.parametrize("name", FAILING_COMMITS)
def test_after_a_failed_commit_the_next_version_is_exact(
    answers: dict[str, list[Any]], cold: dict[str, Digests], name: str
) -> None:
    """The previous version, which heals, as well as the one that failed. Until then a tensor is of one or the other."""
    prepared, failed, mixed, rolled_back, *healing = answers[name]
    assert prepared is None
    assert FAILING_COMMITS[name][1] in failed["error"]
    assert all(digest in (cold["a"][key], cold["b"][key]) for key, digest in mixed.items())
    assert mixed != cold["b"]
    assert (mixed == cold["a"]) == (name == "loading the first layer")
    assert "are gone" in rolled_back["error"]
    assert healing[2] == cold["a"]
    assert answers[f"{name}, and then another"][2::3] == [cold["b"], cold["a"]]
