"""How long generation stands still for new weights: genserve and the two naive ways, side by side in one run.

    python -m tests.bench.push_ways [--rounds 5] [--streams 4] [--json FILE]

A real model of 269 MB (SmolLM2-135M). Both engines run all the time; each update happens while `streams` streams
generate in the engine that is updated, and the other is idle. The ways take turns.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from genserve.client import AsyncClient
from genserve.engine.demo_model import demo_model_path
from tests import models
from tests.daemon_process import DaemonProcess

ENGINE = ("--max-model-len", "2048", "--kv-cache-memory-bytes", str(1 << 30))
WAYS = ("genserve", "genserve_inplace", "tmpfs", "collective_rpc")
Measurement = dict[str, float]


class NaiveEngine:
    """`tests.bench.naive_engine` as a process."""

    def __init__(self, checkpoint: Path) -> None:
        program = [sys.executable, "-m", "tests.bench.naive_engine", str(checkpoint)]
        self._process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._answer("READY")

    def update(self, way: str, weights: Path, streams: int) -> Measurement:
        """One update among live streams."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"way": way, "weights": str(weights), "streams": streams}) + "\n")
        self._process.stdin.flush()
        measured: Measurement = json.loads(self._answer("ANSWER"))
        return measured

    def _answer(self, kind: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(kind):
                return line.removeprefix(kind)
        raise RuntimeError(f"the plain engine ended with {self._process.wait()}")

    def stop(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


async def push(client: AsyncClient, weights: Path, streams: int) -> Measurement:
    """One push among live streams."""
    waits: list[float] = []

    async def stream(seed: int) -> None:
        last = time.monotonic()
        async for _ in client.stream([seed + 1, 7, 9], temperature=0.0, max_tokens=1900, ignore_eos=True):
            now = time.monotonic()
            waits.append(now - last)
            last = now

    running = [asyncio.create_task(stream(i)) for i in range(streams)]
    await asyncio.sleep(2.0)
    waits.clear()
    version = (await client.get_weights()).weight_version + 1
    began = time.monotonic()
    pushed = await client.push_weights(weights, version=version)
    total_s = time.monotonic() - began
    await asyncio.sleep(2.0)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert pushed.applied is not None and pushed.applied.paused_s is not None
    steps = {f"{step}_s": duration_s for step, duration_s in pushed.applied.step_s.items()}
    return {"total_s": total_s, "paused_s": pushed.applied.paused_s, "longest_wait_s": max(waits), **steps}


async def run(rounds: int, streams: int) -> dict[str, Any]:
    """All measurements: way -> list of them, in order."""
    a = demo_model_path()
    measured: dict[str, list[Measurement]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as directory:
        b = models.perturbed(a, Path(directory) / "b", seed=1, scale=0.01)
        naive = await asyncio.to_thread(NaiveEngine, a)
        daemons: dict[str, DaemonProcess] = {}
        try:
            for way in WAYS[:2]:
                flags = ["--model", str(a), *ENGINE, "--weight-update", "inplace" if "inplace" in way else "beside"]
                daemons[way] = DaemonProcess(flags, Path(directory) / f"{way}.log")
                await asyncio.to_thread(daemons[way].wait_serving)
            for number in range(rounds + 1):
                weights = (b, a)[number % 2]
                for way in WAYS if number % 2 == 0 else WAYS[::-1]:
                    if way in daemons:
                        async with AsyncClient(daemons[way].address) as client:
                            one = await push(client, weights, streams)
                    else:
                        one = await asyncio.to_thread(naive.update, way, weights, streams)
                    if number > 0:  # the first round warms up
                        measured[way].append(one)
                    print(f"{number} {way:17} " + " ".join(f"{k} {v:.4f}" for k, v in one.items()), file=sys.stderr)
        finally:
            for daemon in daemons.values():
                daemon.stop()
            naive.stop()
        size_bytes = (a / "model.safetensors").stat().st_size
    return {
        "machine": {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()},
        "model": a.name, "bytes": size_bytes, "streams": streams, "rounds": rounds, "measured": measured,
    }  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """Medians in milliseconds, and the pause as a multiple of genserve's."""
    columns = (
        "receive_s",
        "save_s",
        "prepare_s",
        "pause_s",
        "commit_s",
        "resume_s",
        "paused_s",
        "longest_wait_s",
        "total_s",
    )
    rows = ["| way | " + " | ".join(c.removesuffix("_s").replace("_", " ") for c in columns) + " | paused, ratio |"]
    rows.append("|---" * (len(columns) + 2) + "|")
    reference = median(one["paused_s"] for one in result["measured"]["genserve"])
    for way, measured in result["measured"].items():
        cells = [f"{1000 * median(one[c] for one in measured):.1f}" if c in measured[0] else "" for c in columns]
        ratio = median(one["paused_s"] for one in measured) / reference
        rows.append(f"| {way} | " + " | ".join(cells) + f" | {ratio:.1f} |")
    return "\n".join(rows)


def main() -> None:
    """Measures, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = asyncio.run(run(args.rounds, args.streams))
    print(table(result))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
