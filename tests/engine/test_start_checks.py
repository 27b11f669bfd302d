"""`genserve serve --check` with vLLM, which reads the model's configuration and starts nothing."""

import socket
import sys
from pathlib import Path

from genserve.doctor.start_checks import CHECKS
from tests.support.daemon_process import SMALL_ENGINE
from tests.support.warm import process


def check(model: Path, *flags: str) -> tuple[int, dict[str, str]]:
    """The exit status, and the line of each check."""
    command = [sys.executable, "-m", "genserve", "serve", "--check", "--model", str(model), *flags]
    done = process.run(command, timeout=240)
    return done.returncode, {line.split()[1]: line for line in done.stdout.splitlines()}


def test_a_start_that_would_be_accepted_passes_every_check(checkpoints: dict[str, Path]) -> None:
    """Each in its line; status 0."""
    status, told = check(checkpoints["a"], "--port", "0", *SMALL_ENGINE)
    assert (status, list(told)) == (0, [name for name, _ in CHECKS])
    assert all(line.startswith("ok ") for line in told.values())


def test_all_that_is_wrong_is_reported_at_once(checkpoints: dict[str, Path]) -> None:
    """Status 1. vLLM's flags are checked with the model's configuration."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        status, told = check(
            checkpoints["a"], "--port", port, "--max-model-len", "100000000", "--weight-update", "inplace"
        )
    assert status == 1
    assert told["addresses"].startswith("failed ") and "Address already in use" in told["addresses"]
    assert told["flags"].startswith("failed ") and "max_model_len" in told["flags"]
    assert told["files"].startswith("ok ")
