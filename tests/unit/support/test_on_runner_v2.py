"""What `scripts/test --runner-v2` changes."""

from pathlib import Path

import torch

from tests.support import on_runner_v2

ROOT = Path(__file__).parents[3]


def test_an_ordinary_run_generates_no_fewer_tokens() -> None:
    """Its engines have the other runner."""
    assert not on_runner_v2.IS_ON
    assert on_runner_v2.fewer(300) == 300


def test_triton_is_the_one_of_this_torch() -> None:
    """A new torch asks for another one: pip download torch, and look at what it requires."""
    assert "triton=3.7.1 " in (ROOT / "scripts" / "runner_v2").read_text()
    assert torch.__version__.startswith("2.13.")
