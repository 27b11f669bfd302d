"""What `genserve up` refuses before it starts anything. tests/faults/test_up.py starts daemons."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from genserve.cli import main
from genserve.doctor import start_checks
from genserve.placement import up
from genserve.placement.config import START_TIMEOUT_S, UpConfig


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "the following arguments are required: --replicas"),
        (["--replicas", "0"], "'0' is not a whole number"),
        (["--replicas", "1025"], "--replicas must be in [1, 1024], is 1025"),
        (["--replicas", "2", "--bogus", "1"], "unrecognized arguments: --bogus"),
        (["--replicas", "2", "--model", "/nope"], "--model: no directory /nope"),
        (["--replicas", "2", "--frontends", "65"], "--frontends must be in [-1, 64], is 65"),
        (["--replicas", "2", "--host", "0.0.0.0"], "pass --allow-insecure"),
        (["--replicas", "2", "--policy", "nope"], "nope"),
        (["--replicas", "2", "--check", "--ray"], "--check: looks at this host"),
        (["--replicas", "2", "--headless"], "--headless: "),
        (["--replicas", "2", "--openai_port=8000"], "--openai-port: every replica would listen there"),
        (["--replicas", "2", "--drain_timeout=25h"], "--drain-timeout must be in [0, 86400] s, is 90000"),
        (["--replicas", "2", "--prot", "7"], "unrecognized arguments: --prot (did you mean --port?)"),
        (["--replicas", "2", "a/b"], "unrecognized arguments: a/b; a model is the first argument, or follows --model"),
        (["a/b", "--model", "--replicas", "2"], "argument --model: expected one argument"),
        (["a/b", "--replicas", "2", "--model=c/d"], "two models are named: a/b, and --model c/d"),
        (["--replicas", "2", "--start-timeout", "0"], "--start-timeout must be in (0, 86400] s, is 0"),
        (["--replicas", "2", "--nnodes", "2"], "--nnodes: "),
        (["--replicas", "2", "--gpus-per-replica", "1"], "the engine that is installed runs on the CPU"),
    ],
)
def test_wrong_flags_are_refused_before_anything_starts(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the status of wrong usage, in one line after argparse's own."""

    def started(*_: object) -> None:
        raise AssertionError("a replica was made")

    monkeypatch.setattr(up, "LocalReplica", started)
    try:
        status = main(["up", *flags])
    except SystemExit as exited:
        assert isinstance(exited.code, int)
        status = exited.code
    said = capsys.readouterr().err
    assert status == 2
    assert said.splitlines()[-1].startswith("genserve up: error: ")
    assert says in said.splitlines()[-1]


def test_flags_of_the_daemon_and_of_the_router_are_told_apart() -> None:
    """Those of the daemon keep their order; where it listens and how long it waits is not theirs to say."""
    from genserve.cli.route import make_config
    from genserve.cli.up import parse

    words = ["-tp", "2", "--port", "7", "--replicas=3", "--max_model_len", "-1", "--drain-timeout", "5s"]
    args = parse(["a/b", *words, "--start_timeout", "2h", "--write-timeout", "9s"])
    config = UpConfig(args.replicas, args.flags, args.gpus_per_replica, make_config(args), args.start_timeout)
    assert (config.num_replicas, config.gpus_each, config.route.port) == (3, None, 7)
    assert config.start_timeout_s == 7200
    assert parse(["--replicas", "1"]).start_timeout == START_TIMEOUT_S
    listening, times = ["--host=127.0.0.1", "--port=0"], ["--drain-timeout=5.0", "--write-timeout=9.0"]
    assert up.daemon_flags(config) == [*listening, *times, "--model", "a/b", "-tp", "2", "--max_model_len", "-1"]
    shown = replace(config, route=replace(config.route, metrics_port=9400))
    assert up.daemon_flags(shown)[: len(listening) + 1] == [*listening, "--metrics-port=0"]


def test_help_names_the_flags_of_both(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the daemon by the command that shows them."""
    with pytest.raises(SystemExit):
        main(["up", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "--replicas N" in said and "--policy" in said and "genserve serve --help shows them" in said


def test_a_check_looks_at_the_router_and_at_one_replica_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a start would find after a minute. tests/engine/test_start_checks.py has the checks that take vLLM."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    quick = tuple(each for each in start_checks.CHECKS if each[0] in ("addresses", "files"))
    monkeypatch.setattr(start_checks, "CHECKS", quick)
    monkeypatch.setattr(up, "LocalReplica", None)
    flags = ["up", "--check", "--replicas", "2", "--model", str(tmp_path)]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main([*flags, "--port", port]) == 1
    said = {line.split()[1]: line for line in capsys.readouterr().out.splitlines()}
    assert list(said) == ["router", "replicas", "addresses", "files"]
    assert said["router"].startswith("failed ") and "choose another port with --port" in said["router"]
    assert said["replicas"].startswith("ok ") and " 2" in said["replicas"]
    assert said["addresses"].startswith("ok "), "a replica listens on a free port"
    assert said["files"].startswith("failed "), "there are no weights"
