"""`genserve serve --check` with vLLM, which reads the model's configuration and starts nothing."""

import socket
import sys
from pathlib import Path

from genserve.doctor.start_checks import CHECKS
from tests.support.warm import process


def check(model: Path, *flags: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit status; what is said of each check, and its whole line."""
    command = [sys.executable, "-m", "genserve", "serve", "--check", "--model", str(model), *flags]
    done = process.run(command, timeout=240)
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    return done.returncode, {name: (level, text) for level, name, text in lines}


def test_a_start_that_would_be_accepted_passes_every_check(model: Path) -> None:
    """Each in its line; status 0."""
    command = [sys.executable, "-m", "genserve", "serve", "--check", "--port", "0", "--model", str(model)]
    done = process.run(command, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["ok", name] for name, _ in CHECKS]


def test_all_that_is_wrong_is_told_at_once(model: Path) -> None:
    """Status 1. vLLM's flags are checked with the model's configuration."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        flags = ["--port", str(taken.getsockname()[1]), "--max-model-len", "100000000", "--weight-update", "inplace"]
        command = [sys.executable, "-m", "genserve", "serve", "--check", "--model", str(model), *flags]
        done = process.run(command, timeout=240)
    assert done.returncode == 1
    told = {line.split()[1]: line for line in done.stdout.splitlines()}
    assert told["addresses"].startswith("failed ") and "Address already in use" in told["addresses"]
    assert told["flags"].startswith("failed ") and "max_model_len" in told["flags"]
    assert told["files"].startswith("ok ")
