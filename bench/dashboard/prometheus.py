"""A real Prometheus that scrapes this machine, and its answers to queries."""

import asyncio
import contextlib
import json
import math
import os
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.ports import free_port

SCRAPE_INTERVAL_S = 2
_START_TIMEOUT_S = 60.0


class PrometheusError(Exception):
    """It cannot be run, or refuses a query."""


@dataclass(frozen=True)
class Series:
    """One answer to a query: its labels, and its values by Unix time in seconds. Values that are NaN are left out, as
    Grafana does not draw them."""

    labels: Mapping[str, str]
    values: Mapping[float, float]


@dataclass(frozen=True)
class Prometheus:
    """Where it listens."""

    url: str

    def series(self, query: str, start_s: int, end_s: int, step_s: int) -> list[Series]:
        """What a query gives over a range of time."""
        asked = {"query": query, "start": start_s, "end": end_s, "step": step_s}
        answered = self._asked("query_range", asked)["result"]
        values = [{float(at): float(value) for at, value in each["values"]} for each in answered]
        finite = [{at: value for at, value in some.items() if math.isfinite(value)} for some in values]
        return [Series(each["metric"], some) for each, some in zip(answered, finite, strict=True) if some]

    def values_of(self, label: str, metric: str) -> list[str]:
        """The values of a label of a metric."""
        return [str(each) for each in self._asked(f"label/{label}/values", {"match[]": metric})]

    def _asked(self, what: str, parameters: Mapping[str, Any]) -> Any:
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise PrometheusError(f"{parameters}: {error.read().decode(errors='replace')}") from error


def found(program: str) -> str:
    """Its path. Raises PrometheusError, which says how to install it."""
    path = shutil.which(program)
    if path is None:
        raise PrometheusError(f"{program} is missing: apt-get install prometheus, or name another by --prometheus")
    return path


@asynccontextmanager
async def scraping(targets: Mapping[str, str], program: str, directory: Path) -> AsyncIterator[Prometheus]:
    """Prometheus, for as long as the block runs. `targets`: HOST:PORT by the name that becomes the label instance.
    `program`: its path."""
    config = directory / "prometheus.json"  # JSON is YAML
    config.write_text(json.dumps(_config(targets)))
    address = f"127.0.0.1:{free_port()}"
    log = directory / "prometheus.log"
    storage = f"--storage.tsdb.path={directory / 'series'}"
    command = [program, f"--config.file={config}", storage, f"--web.listen-address={address}", "--log.level=warn"]
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=stderr, stderr=stderr, env=_environment(), process_group=0)
    try:
        await _until_ready(f"http://{address}/-/ready", process, log)
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait()


def _config(targets: Mapping[str, str]) -> dict[str, Any]:
    static: Sequence[Any] = [{"targets": [each], "labels": {"instance": name}} for name, each in targets.items()]
    interval = f"{SCRAPE_INTERVAL_S}s"
    return {
        "global": {"scrape_interval": interval, "scrape_timeout": interval},
        "scrape_configs": [{"job_name": "genserve", "static_configs": static}],
    }


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


async def _until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    async with asyncio.timeout(_START_TIMEOUT_S):
        while process.poll() is None:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(urllib.request.urlopen, url, timeout=5)
                return
            await asyncio.sleep(0.1)
    raise PrometheusError(f"it has ended with {process.returncode}: {_end_of(log)}")
