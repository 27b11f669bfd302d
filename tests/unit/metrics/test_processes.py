"""Series that several processes count together."""

import os
import subprocess
import sys
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client import generate_latest

from genserve.metrics.process import registry_of
from tests.support.scraped import parsed

COUNT = """
import sys
from prometheus_client import Counter, CollectorRegistry
from genserve.metrics.process import count_into

count_into(sys.argv[1], sys.argv[2])
Counter("calls", "Calls.", ["code"], registry=CollectorRegistry()).labels("OK").inc(int(sys.argv[3]))
"""


def counted(directory: Path, name: str, count: int) -> None:
    """A process of this name counts so much, and ends without a word."""
    program = f"{COUNT}\nimport os\nos._exit(0)"
    subprocess.run([sys.executable, "-c", program, str(directory), name, str(count)], check=True)


@pytest.mark.slow
def test_what_a_process_has_counted_outlives_it_and_its_successor_goes_on(tmp_path: Path) -> None:
    """It does not fall, which would look like a restart; and files do not become more with each process."""
    before = os.environ.copy()
    counted(tmp_path, "daemon", 1)
    counted(tmp_path, "frontend-0", 10)
    counted(tmp_path, "frontend-0", 100)
    registry = registry_of(str(tmp_path))
    found = parsed(generate_latest(registry).decode())
    assert found.value("calls_total", code="OK") == 111
    assert found.value("process_open_fds") > 0
    assert len(list(tmp_path.iterdir())) == 2
    assert os.environ == before and prometheus_client.values.ValueClass.__name__ == "MutexValue"  # type: ignore[attr-defined]
