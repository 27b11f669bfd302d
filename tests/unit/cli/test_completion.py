"""Shells complete commands and flags, those of the daemon too."""

import shutil
import subprocess
import sys

import pytest

from genserve.cli import main, make_parser
from genserve.cli.completion import SHELLS, complete_parser
from genserve.settings.config import ServeConfig
from genserve.settings.flags import flag_of, settings_of

SHELL_OF = {"bash": ["bash", "-n"], "zsh": ["zsh", "-n"], "fish": ["fish", "--no-execute"]}


def script_for(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command prints."""
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_takes_its_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It knows every command and every flag of the daemon."""
    script = script_for(shell, capsys)
    for setting in settings_of(ServeConfig):
        assert flag_of(setting.name)[2:] in script
    for command in ("serve", "wake-up", "replicas", "completion"):
        assert command in script
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} to read it")
    done = subprocess.run([*SHELL_OF[shell]], input=script, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sta"], ["status"]),
        (["serve", "--drain"], ["--drain-timeout"]),
        (["serve", "--weight-up"], ["--weight-update"]),
        (["up", "--front"], ["--frontends"]),
        (["up", "--gpus"], ["--gpus-per-replica"]),
        (["replicas", "dr"], ["drain"]),
    ],
)
def test_bash_completes(words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """As when somebody presses the tab key."""
    script = script_for("bash", capsys)
    line = f"COMP_WORDS=(genserve {' '.join(words)}); COMP_CWORD={len(words)}; _shtab_genserve; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", f"{script}\n{line}"], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == expected


def test_the_flags_of_serve_are_added_to_no_parser_that_parses() -> None:
    """A parser made later takes the rest of the line as before."""
    complete_parser()
    args = make_parser().parse_args(["serve", "x", "--drain-timeout", "y"])
    assert args.flags == ["x", "--drain-timeout", "y"]


def test_without_the_package_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The client does not need it."""
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert "pip install shtab" in capsys.readouterr().err
