"""Which of vLLM's OpenAI servers runs, and why."""

from pathlib import Path

import pytest

from genserve.engine.vllm.openai.choice import choose


@pytest.fixture
def binary(tmp_path: Path) -> Path:
    """The server in Rust, as vLLM's package brings it."""
    path = tmp_path / "vllm-rs"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_server_in_rust_runs_where_vllm_brings_it(binary: Path) -> None:
    """Without being asked for."""
    choice = choose({}, binary.parent)
    assert (choice.binary, str(choice)) == (str(binary), "vLLM's Rust server (the installed vLLM brings vllm-rs)")


def test_the_server_in_python_runs_elsewhere(tmp_path: Path) -> None:
    """And where the other one is not wanted, or cannot be executed."""
    assert str(choose({}, tmp_path)) == "vLLM's Python server (the installed vLLM has no vllm-rs)"
    (tmp_path / "vllm-rs").write_text("")
    assert choose({}, tmp_path).binary == ""


def test_the_server_in_python_runs_if_it_is_asked_for(binary: Path) -> None:
    """By vLLM's own variable."""
    assert str(choose({"VLLM_USE_RUST_FRONTEND": "0"}, binary.parent)) == (
        "vLLM's Python server (VLLM_USE_RUST_FRONTEND=0)"
    )


def test_a_binary_elsewhere_is_taken(binary: Path, tmp_path: Path) -> None:
    """By vLLM's own variable."""
    choice = choose({"VLLM_RUST_FRONTEND_PATH": str(binary)}, tmp_path / "vllm")
    assert (choice.binary, choice.reason) == (str(binary), f"VLLM_RUST_FRONTEND_PATH={binary}")


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"VLLM_USE_RUST_FRONTEND": "1"}, "VLLM_USE_RUST_FRONTEND=1: the installed vLLM has no vllm-rs"),
        ({"VLLM_RUST_FRONTEND_PATH": "/nope"}, "VLLM_RUST_FRONTEND_PATH=/nope: no program there"),
    ],
)
def test_a_server_in_rust_that_is_asked_for_and_missing_is_an_error(
    environment: dict[str, str], says: str, tmp_path: Path
) -> None:
    """Rather than another server than the one that was meant."""
    with pytest.raises(ValueError, match=says):
        choose(environment, tmp_path)
