"""How long tests wait for the start of a daemon."""

from pathlib import Path

import pytest

from tests.support import daemon_process


def test_a_start_has_the_time_that_the_module_says_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests on a GPU raise it, because kernels are compiled at a first start."""
    monkeypatch.setattr(daemon_process, "START_TIMEOUT_S", 0.0)
    daemon = daemon_process.DaemonProcess(["--model", str(tmp_path)], tmp_path / "log", cold=True)
    with pytest.raises(AssertionError, match="the daemon ended with -9"):
        daemon.wait_serving()
