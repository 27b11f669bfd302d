"""The scan that the whole suite ends with finds what it is to find."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.known_secrets import check_arguments, check_files, check_told, known_token


def test_a_token_in_a_log_is_found_and_not_told_again(tmp_path: Path) -> None:
    token = known_token()
    log = tmp_path / "below" / "stderr"
    log.parent.mkdir()
    log.write_bytes(b"\xff refused: " + token.encode() + b"\n")
    with pytest.raises(AssertionError, match="below/stderr") as found:
        check_files(tmp_path)
    log.unlink()  # the scan at the end of all tests comes here, too
    assert token not in str(found.value)


def test_files_that_are_to_hold_secrets_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "trainer.token").write_text(known_token())
    (tmp_path / "own.key").write_text("-----BEGIN PRIVATE KEY-----")
    (tmp_path / "stderr").write_text("genserve: serving")
    assert check_files(tmp_path) == 1


def test_a_key_is_found() -> None:
    with pytest.raises(AssertionError, match="the metrics"):
        check_told("the metrics", "-----BEGIN PRIVATE KEY-----")


def test_a_token_among_arguments_is_found() -> None:
    command = [sys.executable, "-c", "input()", known_token()]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        with pytest.raises(AssertionError, match="the arguments of"):
            check_arguments(os.getpid())
        process.communicate(b"\n")
