"""What `genserve doctor` refuses. What it does: tests/engine/test_doctor_command.py."""

import sys

import pytest

from genserve.cli import main
from genserve.extras import pip_install_engine


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "/nowhere"], "genserve doctor: error: model: "),
        (["--ways", "fast"], "genserve doctor: error: ways: 'fast' is not one of "),
        (["--", "x"], "genserve doctor: error: SERVE_FLAGS: must begin with a flag"),
        (["--", "--model=x"], "genserve doctor: error: SERVE_FLAGS: --model is set by the doctor"),
        (["--timeout", "0"], "'0' is not a time above 0"),
        (["--timeout", "9" * 30], "is not a time above 0 s and up to 24h"),
    ],
)
def test_wrong_input_ends_at_once_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is started, and the status is not that of a check that fails."""
    with pytest.raises(SystemExit) as exited:
        main(["doctor", *arguments])
    output = capsys.readouterr()
    assert (exited.value.code, output.out) == (2, "")
    assert words in output.err.splitlines()[-1]
    assert "looking at" not in output.err


def test_what_has_to_be_installed_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the client alone, which has no numpy."""
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert main(["doctor"]) == 1
    output = capsys.readouterr()
    assert output.out == "" and output.err == f"genserve: the doctor needs numpy: {pip_install_engine()}\n"
