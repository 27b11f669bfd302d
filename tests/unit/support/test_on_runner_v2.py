"""The list of what `scripts/test --runner-v2` leaves out."""

import ast
from pathlib import Path

import torch

from tests.support import on_runner_v2

ROOT = Path(__file__).parents[3]


def test_what_is_left_out_is_there() -> None:
    """And each has a reason."""
    for node_id, reason in on_runner_v2.LEFT_OUT.items():
        path, _, name = node_id.partition("::")
        functions = ast.parse((ROOT / path).read_text()).body
        assert name in {each.name for each in functions if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert reason


def test_no_ordinary_run_leaves_anything_out() -> None:
    """Nor does it generate fewer tokens."""
    assert not on_runner_v2.IS_ON
    assert on_runner_v2.fewer(300) == 300
    assert all(on_runner_v2.reason(each) is None for each in on_runner_v2.LEFT_OUT)


def test_triton_is_the_one_of_this_torch() -> None:
    """A new torch asks for another one: pip download torch, and look at what it requires."""
    assert "triton=3.7.1 " in (ROOT / "scripts" / "runner_v2").read_text()
    assert torch.__version__.startswith("2.13.")
