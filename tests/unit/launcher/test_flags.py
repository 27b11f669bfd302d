"""Flags by keyword."""

import sys
from pathlib import Path
from typing import Any

import pytest

from genserve.launcher.daemon_process import serve_command
from genserve.launcher.server import flags_of


@pytest.mark.parametrize(
    ("value", "flags"),
    [
        (2048, ["--max-model-len", "2048"]),
        (0.5, ["--max-model-len", "0.5"]),
        ("8k", ["--max-model-len", "8k"]),
        (Path("a/b"), ["--max-model-len", "a/b"]),
        (-1, ["--max-model-len=-1"]),
        (True, ["--max-model-len"]),
        (False, ["--no-max-model-len"]),
        (None, []),
        (["a", 2], ["--max-model-len", "a", "2"]),
        ({"method": "ngram", "n": [1, None]}, ["--max-model-len", '{"method": "ngram", "n": [1, null]}']),
    ],
)
def test_a_keyword_is_a_flag(value: Any, flags: list[str]) -> None:
    """As it would be typed."""
    assert flags_of({"max_model_len": value}) == flags


def test_a_switch_of_the_daemons_own_that_is_off_is_left_out() -> None:
    """It has no `--no-…`; vLLM's have."""
    assert flags_of({"no_shared_memory": False, "allow_insecure": True}) == ["--allow-insecure"]


@pytest.mark.parametrize("value", [object(), b"bytes", [[1]], [True], {1, 2}])
def test_what_cannot_be_written_as_a_flag_is_refused(value: Any) -> None:
    """By the flag's name."""
    with pytest.raises(TypeError, match="max_model_len: "):
        flags_of({"max_model_len": value})


@pytest.mark.parametrize("flags", [["--port", "7"], ["--port=7"]])
def test_a_port_is_picked_unless_the_flags_say_which(flags: list[str]) -> None:
    """By the system."""
    serve = [sys.executable, "-m", "genserve", "serve"]
    assert serve_command(["--uds", "a"]) == [*serve, "--port", "0", "--uds", "a"]
    assert serve_command(flags) == [*serve, *flags]
