"""The matrix of tests/gpu, as far as it can be proven without a GPU: it shall not rot where nobody can run it."""

import re
from pathlib import Path

import pytest

from genserve.worker.contract.placement import WAYS as EVERY_WAY
from genserve.worker.contract.placement import WorkerFacts, place
from tests.support.gpu_issue import what_to_send
from tests.support.matrix import KINDS, WAYS, Kind, refused, served


def test_every_kind_is_either_served_or_refused_in_every_way() -> None:
    """And the ways are those that there are."""
    assert WAYS == EVERY_WAY
    both = [(kind.name, way) for kind, way in [*served(), *refused()]]
    assert sorted(both) == sorted((kind.name, way) for kind in KINDS for way in WAYS)


@pytest.mark.parametrize(("kind", "way"), [pytest.param(*each, id=f"{each[0].name}-{each[1]}") for each in refused()])
def test_refusals_say_what_the_matrix_expects(kind: Kind, way: str) -> None:
    """Those that are known before a model is audited."""
    if "would leave" in kind.refused[way]:
        pytest.skip("the audit of a model on a GPU says it")
    online = kind.name.endswith("-online")
    facts = WorkerFacts(1 << 20, 1 << 10, 1 << 36, 1 << 36, quantization="fp8", is_online=online)
    with pytest.raises(ValueError, match=re.escape(kind.refused[way])):
        place(way, facts)


def test_failure_names_what_to_send_with_a_report(tmp_path: Path) -> None:
    """The versions, and the end of the daemon's log."""
    (tmp_path / "daemon").mkdir()
    (tmp_path / "daemon" / "stderr").write_text("first\n" * 100 + "the last words\n")
    said = what_to_send("tests/gpu/test_ways.py::test_pushes[awq]", tmp_path)
    for part in (
        '"GPU: test_ways.py::test_pushes[awq]"',
        "genserve doctor",
        "nvidia-smi",
        "\nvllm",
        "\ntorch ",
        "the last words",
    ):
        assert part in said
    assert said.count("first") < 50
    assert "if it was started" in what_to_send("tests/gpu/test_ways.py::test_pushes[awq]", None)
