"""Tokens per second through a router: `python -m bench.fleet.tokens`.

One daemon with a tiny model, so that forwarding is what costs, is called by a plain client (`daemon`), through a router
(`router`), by a client that the router has told of it (`direct`), and through a program that forwards bytes without any
logic (`floor`), which is the floor of a router in Python. The ways take turns. `Generate` is a call for each request
with a message for each token, `GenerateMany` is one stream for all. What is told: tokens per second, and CPU time of
the forwarding process and of the client for each token in microseconds.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import psutil
import uvloop

from bench import engines
from genserve.client import AsyncClient
from tests.support.daemon_process import DaemonProcess

_TOKENS = 64


async def generate(client: AsyncClient, concurrency: int, requests: int) -> int:
    """So many calls, each with a message for each token; the tokens."""
    numbers = iter(range(requests))
    count = 0

    async def work() -> None:
        nonlocal count
        for number in numbers:
            async with client.stream(
                [1 + number % 500, 7, 3], max_tokens=_TOKENS, ignore_eos=True, text=False, timeout_s=None
            ) as deltas:
                async for delta in deltas:
                    count += sum(len(output.token_ids) for output in delta.outputs)

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return count


async def generate_many(client: AsyncClient, concurrency: int, requests: int) -> int:
    """The same over one stream."""
    count = running = 0
    numbers = iter(range(requests))
    async with client.stream_many(timeout_s=None) as many:

        async def begin() -> bool:
            number = next(numbers, None)
            if number is None:
                return False
            await many.submit([1 + number % 500, 7, 3], max_tokens=_TOKENS, ignore_eos=True, text=False)
            return True

        while running < concurrency and await begin():
            running += 1
        async for item in many:
            if item.error is not None:
                raise item.error
            assert item.delta is not None
            count += sum(len(output.token_ids) for output in item.delta.outputs)
            if item.is_last:
                running -= 1
                if await begin():
                    running += 1
                elif not running:
                    return count
    return count


async def measure(ways: dict[str, tuple[str, int]], args: argparse.Namespace) -> None:
    """`ways`: address and process (0 = none) of each."""
    me = psutil.Process()
    for call in (generate, generate_many):
        for concurrency in args.concurrency:
            rates: dict[str, list[float]] = {way: [] for way in ways}
            costs: dict[str, list[float]] = {way: [] for way in ways}
            own_costs: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(args.rounds + 1):
                for way, (address, pid) in ways.items():
                    process = psutil.Process(pid) if pid else None
                    async with AsyncClient(address, direct=way == "direct") as client:
                        await client.generate([1, 2, 3], max_tokens=2)
                        before_s = sum(process.cpu_times()[:2]) if process else 0.0
                        own_before_s = sum(me.cpu_times()[:2])
                        began_s = time.monotonic()
                        count = await call(client, concurrency, concurrency * args.requests)
                        rates[way].append(count / (time.monotonic() - began_s))
                        spent_s = sum(process.cpu_times()[:2]) - before_s if process else 0.0
                        costs[way].append(1e6 * spent_s / count)
                        own_costs[way].append(1e6 * (sum(me.cpu_times()[:2]) - own_before_s) / count)
            for way in ways:
                counted, spent = rates[way][1:], costs[way][1:]
                told = {
                    "call": call.__name__, "concurrency": concurrency, "way": way,
                    "tokens_per_s": round(median(counted)), "range": [round(min(counted)), round(max(counted))],
                    "of_daemon": round(median(counted) / median(rates["daemon"][1:]), 2),
                    "cpu_us_per_token": round(median(spent), 1),
                    "client_cpu_us_per_token": round(median(own_costs[way][1:]), 1),
                }  # fmt: skip
                print(json.dumps(told), flush=True)


def main() -> None:
    """Starts everything, and prints a line of JSON for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=lambda text: list(map(int, text.split(","))), default=[16, 64])
    parser.add_argument("--requests", type=int, default=4, metavar="N", help="for each slot (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")
    args = parser.parse_args()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        checkpoint = engines.model("tiny", directory)
        daemon = DaemonProcess(
            ["--model", str(checkpoint), *engines.flags()], directory / "daemon", engines.ENVIRONMENT
        )
        stack.callback(daemon.kill)
        daemon.wait_serving()
        route = [sys.executable, "-m", "genserve", "route", "--port", "0", "--replica", daemon.address]
        proxy = [sys.executable, "-m", "bench.fleet.byte_proxy", daemon.address]
        router, router_address = _started(route, directory / "router", stack)
        floor, floor_address = _started(proxy, directory / "floor", stack)
        ways = {
            "daemon": (daemon.address, 0),
            "floor": (floor_address, floor),
            "router": (router_address, router),
            "direct": (router_address, router),
        }
        uvloop.run(measure(ways, args))


def _started(command: list[str], log: Path, stack: ExitStack) -> tuple[int, str]:
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    stack.callback(process.kill)
    assert process.stdout is not None
    return process.pid, process.stdout.readline().split()[-1]


if __name__ == "__main__":
    main()
