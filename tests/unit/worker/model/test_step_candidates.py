"""What vLLM's steps may leave on a model's objects, read from its source: for a new vLLM, this lists what to look at.

A candidate is an attribute that a step makes where it is absent, or that is set in a method that runs in steps. Each is
in a table of `step_made`, or in step_candidates.txt: those that vLLM 0.32 and 0.33 have. They are no numbers and no
tensors of layers, or a comment says why they need no row.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import vllm

from genserve.worker.model import step_made
from tests.unit.worker.model.step_source import STEPS, Assignment, classes_of

ROOT = Path(vllm.__file__).parent
LOOKED_AT = Path(__file__).with_name("step_candidates.txt")
# The answer changes with vLLM and with the tables. That the rows of the tables are right: test_step_made.py.
HERE = ("tests/unit/worker/model/step_source.py", "tests/unit/worker/model/step_candidates.txt")
pytestmark = pytest.mark.long("genserve/worker/model", "genserve/installed_engine.py", "requirements.lock", *HERE)
FOLDERS = ("model_executor", "models", "v1/attention")


@cache
def candidates() -> list[str]:
    """As file, class and attribute."""
    return list(_candidates())


def _candidates() -> Iterator[str]:
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            for owner, attributes in classes_of(file):
                for key, assignments in attributes.items():
                    if any(is_candidate(each) for each in assignments):
                        yield f"{file.relative_to(ROOT)} {owner} {key}"


def is_candidate(assignment: Assignment) -> bool:
    """Whether it may leave a tensor there."""
    if assignment.value is not None and type(assignment.value).__name__ == "Constant":
        return False
    return assignment.where_absent or assignment.method.lstrip("_").startswith(STEPS)


def is_listed(file: str, owner: str, key: str) -> bool:
    """Whether a row has it; those of a class that others derive from, and of any class, are of other files."""
    rows = (*step_made.WEIGHT_FREE, *step_made.FROM_NUMBERS)
    return any(key in row.keys and row.owner in ("", owner) for row in rows) or any(
        (row.owner, row.key) == (owner, key) for row in step_made.FROM_WEIGHTS
    )


@pytest.mark.timeout(300)
def test_all_that_steps_may_leave_was_looked_at() -> None:
    """Read each of these in vLLM. Its row goes into a table of step_made, or its line into step_candidates.txt."""
    known = {line.partition("  # ")[0] for line in LOOKED_AT.read_text().splitlines()}
    found = [each for each in candidates() if not is_listed(*each.split())]
    assert len(found) > 50, "the search finds nothing"
    unknown = [each for each in found if each not in known]
    assert unknown == [], "\n" + "\n".join(unknown)


def test_the_search_finds_what_the_tables_know() -> None:
    """Of those that a class makes for itself: it looks where new ones will be."""
    found = {tuple(each.split()[1:]) for each in candidates()}
    for known in (
        ("MoERunner", "_combined_gate_weight"),
        ("Indexer", "_wp_fp32"),
        ("FlashInferImpl", "bmm1_scale"),
        ("InklingSinkExperts", "_unit"),
    ):
        assert known in found
