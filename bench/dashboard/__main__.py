"""Draws the dashboard's panels from real data: `scripts/screenshot dashboard`.

Starts replicas on the built-in model, a router and a Prometheus that scrapes them; generates, pushes, pauses and fails
for some minutes; and asks Prometheus for what Grafana would ask. A query without an answer is an error that names its
panel, and then nothing is drawn.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.dashboard.fleet import Events, running
from bench.dashboard.picture import Span, draw
from bench.dashboard.prometheus import SCRAPE_INTERVAL_S, Prometheus, PrometheusError, Series, found, scraping
from genserve.client import AsyncClient
from genserve.demo_model import demo_model_path
from tests.support.dashboard import Dashboard, any_of, rate_interval_s, sent
from tests.support.models import perturbed

_NUM_REPLICAS = 2
_STEP_S = 2
_INSTANCES = ("instance", "grpc_server_started_total")
"""The label and the metric of which the dashboard lists the values."""


def main(argv: Sequence[str]) -> int:
    """Draws; the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/screenshot dashboard", description=__doc__)
    parser.add_argument("--seconds", type=int, default=180, help="of traffic (default: %(default)s)")
    parser.add_argument("--prometheus", default="prometheus", metavar="PROGRAM", help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("docs/images/dashboard.png"), help="(default: %(default)s)")
    args = parser.parse_args(argv)
    dashboard = Dashboard.read()
    try:
        with tempfile.TemporaryDirectory() as directory:
            program = found(args.prometheus)
            answers, span = asyncio.run(_answers(dashboard, args.seconds, program, Path(directory)))
    except PrometheusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    missing = [where for where, series in answers.items() if not series]
    if missing:
        print(*(f"error: no data: {where}" for where in missing), sep="\n", file=sys.stderr)
        return 1
    of_panels = {
        panel.title: [answers[f"{panel.title}, query {target.ref}"] for target in panel.targets]
        for panel in dashboard.panels
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    about = f"{_NUM_REPLICAS} replicas and a router      {args.seconds} s, scraped every {SCRAPE_INTERVAL_S} s      UTC"
    draw(dashboard, of_panels, span, about, args.output)
    print(args.output)
    return 0


async def _answers(
    dashboard: Dashboard, seconds: int, program: str, directory: Path
) -> tuple[dict[str, list[Series]], Span]:
    """What Prometheus answers to each query of the dashboard, by the panel and the query."""
    model = demo_model_path()
    checkpoints = {"a": model, "b": perturbed(model, directory / "b", seed=1, scale=0.01)}
    with running(model, _NUM_REPLICAS, directory) as fleet:
        async with AsyncClient(fleet.address) as client, scraping(fleet.targets, program, directory) as prometheus:
            await client.wait_ready()
            start_s = int(time.time())
            await Events(client, checkpoints, fleet.faults).run(seconds)
            span = Span(start_s, int(time.time()), _STEP_S)
            return await asyncio.to_thread(_asked, dashboard, prometheus, span), span


def _asked(dashboard: Dashboard, prometheus: Prometheus, span: Span) -> dict[str, list[Series]]:
    instance = any_of(prometheus.values_of(*_INSTANCES))
    interval = f"{rate_interval_s(span.step_s, SCRAPE_INTERVAL_S)}s"
    queries = {
        f"{panel.title}, query {target.ref}": target.query for panel in dashboard.panels for target in panel.targets
    }
    queries |= {f"annotation {name}": query for name, query in dashboard.annotations.items()}
    return {
        where: prometheus.series(sent(query, interval, instance), span.start_s, span.end_s, span.step_s)
        for where, query in queries.items()
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
