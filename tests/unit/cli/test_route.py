"""What `genserve route` refuses before it listens. Each is one line, and ends with status 2."""

import pytest

from genserve.cli import main

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
    "--host=0.0.0.0": "--host 0.0.0.0 can be reached from other hosts, without encryption or authentication: ",
}


@pytest.mark.parametrize(("flags", "says"), REFUSED.items())
def test_wrong_values_are_refused(flags: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The line names the flag and what would do."""
    assert main(["route", "--port=0", *flags.split()]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"genserve route: error: {says}")
    assert errors.count("\n") == 1
