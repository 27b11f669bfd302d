"""The flags of `genserve route`, and what it refuses before it listens: in one line, with status 2."""

import subprocess
import sys
from pathlib import Path

import pytest

from genserve.cli import main, make_parser
from genserve.cli.route import make_config
from genserve.fleet.config import FleetSettings, RouteConfig

REFUSED = {
    "--replica=replica": "--replica: must be HOST:PORT or unix:PATH, is 'replica'",
    "--replica=http://replica:1": "--replica: must be HOST:PORT or unix:PATH, is 'http://replica:1'",
    "--replica=a:1 --replica=a:1": "--replica names the same address twice",
    "--dns=replicas": "--dns: must be NAME:PORT, is 'replicas'",
    "--port=70000": "--port must be in [-1, 65535], is 70000",
    "--port=-1": "--port -1 listens only on a Unix socket: pass --uds too",
    "--policy=": "--policy: policy '' is not known: use ",
    "--policy=fastest": "--policy: policy 'fastest' is not known: use ",
    "--policy=requests,session": "--policy: policy requests decides about every request, so session ",
    "--overload-threshold=nan": "--overload-threshold must be at least 1, is nan",
    "--fanout=0": "--fanout must be in [1, 1024], is 0",
    "--min-replicas=-1": "--min-replicas must be in [0, 1024], is -1",
    "--silence=0s": "--silence must be above 0.5 s, is 0",
    "--host=0.0.0.0": "--host 0.0.0.0 can be reached from other hosts, without encryption: ",
}


@pytest.mark.parametrize(("flags", "says"), REFUSED.items())
def test_wrong_values_are_refused(flags: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The line names the flag and what would do."""
    assert main(["route", "--port=0", *flags.split()]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"genserve route: error: {says}")
    assert errors.count("\n") == 1


def test_without_flags_the_defaults_are_those_of_the_settings() -> None:
    """A flag has no default of its own."""
    assert make_config(make_parser().parse_args(["route"])) == RouteConfig()


def test_every_flag_sets_its_own_field() -> None:
    """And none that of another one."""
    flags = (
        "--host ::1 --port 1 --uds /u --policy requests --overload-threshold 2 --fanout 3 --min-replicas 4 "
        "--silence 5.5s --wait-ready 6s --settle 7s --drain-timeout 8s --write-timeout 9s --replica a:1 --dns b:2 "
        "--allow-insecure"
    )
    args = make_parser().parse_args(["route", *flags.split()])
    fleet = FleetSettings(fanout=3, min_replicas=4, silence_s=5.5, wait_ready_s=6.0, settle_s=7.0)
    assert make_config(args, args.replica, args.dns) == RouteConfig(
        replicas=["a:1"],
        dns=["b:2"],
        host="::1",
        port=1,
        uds="/u",
        allow_insecure=True,
        policies="requests",
        overload_threshold=2.0,
        drain_timeout_s=8.0,
        write_timeout_s=9.0,
        fleet=fleet,
    )


def test_no_flag_can_be_shortened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither on the command line nor in a file: a later version may have another flag of that beginning."""
    (tmp_path / "flags.yaml").write_text("por: 0\n")
    for arguments in (["--por=0"], ["--config", str(tmp_path / "flags.yaml")]):
        with pytest.raises(SystemExit):
            main(["route", *arguments])
        assert "(did you mean --port?)" in capsys.readouterr().err


@pytest.mark.slow
def test_a_router_needs_nothing_that_its_extra_does_not_bring() -> None:
    """What a daemon and a trainer have beside it."""
    program = (
        "import sys\n"
        "for name in ('google_crc32c', 'numpy', 'psutil', 'safetensors', 'torch', 'vllm'):\n"
        "    sys.modules[name] = None\n"
        "import genserve.fleet.serve, genserve.placement.ray.up"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
