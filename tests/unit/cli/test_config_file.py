"""Flags in a file: the same names, weaker than those of the command line, and wrong keys are named."""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from genserve.cli import main, route, up
from genserve.cli.config_file import with_config_file

CONTENT = """
# comments are allowed
model: /models/a model
max_model_len: 2048
allow-insecure: true
headless: false
enable-prefix-caching: false
drain-timeout: 12.5
cuda-graph-sizes: [1, 2]
compilation-config: {mode: 3}
"""
AS_FLAGS = [
    "--model=/models/a model",
    "--max-model-len=2048",
    "--allow-insecure",
    "--no-enable-prefix-caching",
    "--drain-timeout=12.5",
    "--cuda-graph-sizes",
    "1",
    "2",
    '--compilation-config={"mode": 3}',
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Of every kind of value."""
    path = tmp_path / "flags.yaml"
    path.write_text(CONTENT)
    return path


def test_a_file_stands_for_flags_before_all_others(file: Path) -> None:
    """So those of the command line win. A switch that is off is not there."""
    expected = [*AS_FLAGS, "--port", "7", "--model=b"]
    for named in (["--config", str(file)], [f"--config={file}"]):
        assert with_config_file(["--port", "7", *named, "--model=b"], ["--headless"]) == expected
    assert with_config_file(["--port", "7"]) == ["--port", "7"]


def test_flags_that_may_be_repeated_are(tmp_path: Path) -> None:
    """Where a list is several flags."""
    (tmp_path / "x").write_text("replica: [a:1, b:2]")
    assert with_config_file(["--config", str(tmp_path / "x")], (), ["--replica"]) == ["--replica=a:1", "--replica=b:2"]


def test_every_switch_of_a_router_can_be_off(tmp_path: Path) -> None:
    """Those of settings that it shares with a daemon, too."""
    parser = argparse.ArgumentParser()
    route.add_router_flags(parser)
    found = [flag for flag, action in parser._option_string_actions.items() if isinstance(action.const, bool)]
    assert "--channelz" in found
    (tmp_path / "x").write_text("".join(f"{flag[2:]}: false\n" for flag in found))
    assert with_config_file(["--config", str(tmp_path / "x")], route.SWITCHES) == []


def test_an_empty_file_has_no_flags(tmp_path: Path) -> None:
    """A file with comments only, say."""
    (tmp_path / "x").write_text("# nothing\n")
    assert with_config_file(["--config", str(tmp_path / "x")]) == []


def test_a_date_is_refused_whatever_others_make_of_dates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-format-enforcer makes them texts, for the whole process."""
    constructors = yaml.SafeLoader.yaml_constructors
    monkeypatch.setitem(constructors, "tag:yaml.org,2002:timestamp", constructors["tag:yaml.org,2002:str"])
    (tmp_path / "x").write_text("port: 2020-01-01")
    with pytest.raises(ValueError, match="is not the value of a flag"):
        with_config_file(["--config", str(tmp_path / "x")])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("- a", "must be a mapping of flags to values, is list"),
        ("a: [", "while parsing"),
        ("1: 2", "1 is not the name of a flag"),
        ("--port: 2", "'--port' is not the name of a flag"),
        ("config: other.yaml", "'config' is not the name of a flag"),
        ("port:", "port: None is not the value of a flag"),
        ("port: [[1]]", r"port: [[1]] is not the value of a flag"),
        ("port: 1\nhost: a\nport: 2", "'port' is there twice, in lines 1 and 3"),
        ("max-n: 1\nmax_n: 2", "max_n is there twice, with - and with _"),
        ("# " + "x" * (1 << 20) + "\nport: 1", "has more than 1048576 bytes"),
        ("port: " + "[" * 3000, "maximum recursion depth"),
        ("port: 2020-99-99", "month must be in 1..12"),
        ("port: " + "9" * 5000, "Exceeds the limit"),
        ("a: {since: 2020-01-01}", "a: Object of type date is not JSON serializable"),
        ("a: &a {b: *a}", "a: Circular reference detected"),
        ("a: [1, --port]", "a: [1, '--port'] is not the value of a flag"),
        ("port: 2020-01-01", "port: datetime.date(2020, 1, 1) is not the value of a flag"),
    ],
)
def test_what_cannot_be_flags_is_refused(content: str, says: str, tmp_path: Path) -> None:
    """Naming the file and the key."""
    path = tmp_path / "flags.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"^--config {re.escape(str(path))}: .*{re.escape(says)}"):
        with_config_file(["--config", str(path)])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--config"], "--config: names no file"),
        (["--config="], "--config: names no file"),
        (["--config", "a", "--config=b"], "--config: pass one file"),
        (["--config", "\udc80"], r"--config \\udc80: No such file or directory"),
        (["--config", "/nowhere/flags.yaml"], "--config /nowhere/flags.yaml: No such file or directory"),
    ],
)
def test_a_file_that_is_not_there_is_named(flags: list[str], says: str) -> None:
    """In one line."""
    with pytest.raises(ValueError, match=f"^{says}$"):
        with_config_file(flags)


@pytest.mark.parametrize("command", ["serve", "route", "up"])
def test_each_command_refuses_a_wrong_key_by_its_name(command: str, tmp_path: Path) -> None:
    """With status 2, before it does anything."""
    path = tmp_path / "flags.yaml"
    path.write_text("no_such_key: 1\n")
    replicas = ["--replicas", "2"] if command == "up" else []
    done = subprocess.run(
        [sys.executable, "-m", "genserve", command, *replicas, "--config", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert (
        "unrecognized arguments: --no-such-key=1" in done.stderr
        or "unrecognized arguments: --no-such-key" in done.stderr
    )


@pytest.mark.parametrize("command", ["serve", "route", "up"])
def test_each_command_refuses_a_wrong_value_in_a_file(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As on the command line."""
    path = tmp_path / "flags.yaml"
    path.write_text("port: seven\n")
    replicas = ["--replicas", "2"] if command == "up" else []
    with pytest.raises(SystemExit) as exited:
        main([command, *replicas, "--config", str(path)])
    assert exited.value.code == 2
    assert "argument --port: invalid int value: 'seven'" in capfd.readouterr().err


def test_a_file_of_up_has_flags_of_the_router_and_of_the_replicas(tmp_path: Path) -> None:
    """Each goes where it would go from the command line."""
    path = tmp_path / "flags.yaml"
    path.write_text("replicas: 3\nsettle: 7s\nmax-model-len: 9\nallow_insecure: false\nheadless: false\n")
    args = up.parse(["--config", str(path), "--model", "m"])
    assert (args.replicas, args.settle, args.allow_insecure) == (3, 7.0, False)
    assert args.flags == ["--max-model-len=9", "--model", "m"]
