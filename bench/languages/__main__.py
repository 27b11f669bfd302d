"""TypeScript against Python: `python -m bench.languages`, after scripts/typescript has installed the packages.

Both clients are programs of their own, call one daemon, and take turns, forwards in one round and backwards in the
next. Told are tokens per second of 64 streams at once and of GenerateMany with 64 prompts, a message or an item for
each token, and GB/s of a push that is staged: over one connection, as TypeScript sends, and for Python also as it
sends by default, which on one host is through shared memory. The result goes to docs/benchmarks/typescript.json and
typescript.md; with --quick, which takes a minute or two, it is only printed.
"""

import argparse
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop

from bench import engines, machine
from bench.genserve_daemon import start_daemon
from bench.machine import turns
from bench.options import DEFAULT_OUT
from bench.processes import PeerError, Program, say
from bench.results.page import replace_marked
from bench.results.result import Result, markdown, medians, value, with_ratio

CONCURRENCY, MAX_TOKENS, REQUESTS_PER_SLOT = 64, 64, 8
BASELINE = "python"
PEERS = (BASELINE, "typescript")
PUSHERS = (BASELINE, "typescript", "python_default")
ROWS = {
    "stream": "64 streams, tokens per second",
    "many": "GenerateMany of 64 prompts, tokens per second",
    "push": "push, GB/s",
}
PAGE = DEFAULT_OUT / "typescript.md"
_RUN = Path("clients/typescript/scripts/run")
Rounds = dict[str, list[dict[str, float]]]


async def measure(args: argparse.Namespace) -> Result:
    """Generation with the tiny model, then pushes of the one of --size."""
    facts = machine.facts()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        rounds = await _generation(directory, args)
        rounds["push"], num_bytes = await _pushes(directory, args)
    return Result(
        "typescript",
        machine=facts,
        settings={
            "engine": engines.flags(),
            "environment": engines.ENVIRONMENT,
            "rounds": args.rounds,
            "max_tokens": MAX_TOKENS,
            "concurrency": CONCURRENCY,
        },
        rounds=rounds,
        medians={row: {peer: medians(each) for peer, each in by_peer.items()} for row, by_peer in rounds.items()},
        ratios={},
        notes={"bytes": num_bytes},
    )


async def _started(directory: Path, model: str, stack: AsyncExitStack) -> tuple[dict[str, Program], int]:
    """The programs, connected to a daemon, and the process of the daemon."""
    checkpoint = engines.model(model, directory)
    logs = directory / f"logs-{model}"
    logs.mkdir()
    daemon = await start_daemon(checkpoint, logs, stack)
    python = Program.of_module(BASELINE, "bench.languages.python_program", daemon.address, log=logs / "python")
    stack.callback(python.stop)
    typescript = Program("typescript", [str(_RUN), "bench/program.ts", daemon.address], log=logs / "typescript")
    stack.callback(typescript.stop)
    programs: dict[str, Program] = {BASELINE: python, "typescript": typescript}
    for program in programs.values():
        await program.wait_ready()
    return programs, daemon.process.pid


async def _generation(directory: Path, args: argparse.Namespace) -> dict[str, Rounds]:
    num_requests = CONCURRENCY * args.requests
    load = {"concurrency": CONCURRENCY, "requests": num_requests, "max_tokens": MAX_TOKENS}
    rounds: dict[str, Rounds] = {row: {peer: [] for peer in PEERS} for row in ("stream", "many")}
    async with AsyncExitStack() as stack:
        programs, pid = await _started(directory, "tiny", stack)
        for row, by_peer in rounds.items():
            for number, peer in turns(PEERS, args.rounds):
                await machine.rest("the daemon", pid)
                told = await programs[peer].order(do="generate", many=row == "many", **load)
                if told["tokens"] != num_requests * MAX_TOKENS:
                    raise PeerError(peer, f"it got {told['tokens']} tokens, not {num_requests * MAX_TOKENS}")
                figures = {
                    "rate": told["tokens"] / told["seconds"],
                    "client_cpu": 1e6 * told["cpu_s"] / told["tokens"],
                }
                say(f"{row:>8} round {number}: {peer:16} {figures['rate']:9.0f} tok/s")
                if number > 0:  # the first one warms up
                    by_peer[peer].append(figures)
    return rounds


async def _pushes(directory: Path, args: argparse.Namespace) -> tuple[Rounds, int]:
    rounds: Rounds = {peer: [] for peer in PUSHERS}
    async with AsyncExitStack() as stack:
        programs, pid = await _started(directory, args.size, stack)
        sizes = {(await program.order(do="pull"))["bytes"] for program in programs.values()}
        (num_bytes,) = sizes  # both have pulled the same, and push it
        for number, peer in turns(PUSHERS, args.rounds):
            await machine.rest("the daemon", pid)
            # TypeScript has no other way.
            how: dict[str, Any] = {} if peer == "typescript" else {"one_connection": peer == BASELINE}
            told = await programs[peer.removesuffix("_default")].order(do="push", **how)
            gigabytes = num_bytes / 1e9
            figures = {"rate": gigabytes / told["seconds"], "client_cpu": 1e3 * told["cpu_s"] / gigabytes}
            say(f"    push round {number}: {peer:16} {figures['rate']:9.2f} GB/s")
            if number > 0:
                rounds[peer].append(figures)
    return rounds, num_bytes


def table(result: Result) -> str:
    """The rates, with what they are of Python's in the same round, and CPU time of the client."""
    rows = []
    for row, title in ROWS.items():
        digits = 2 if row == "push" else 0
        baseline = result.medians[row][BASELINE]["rate"]
        for peer, figures in result.medians[row].items():
            ratio = figures["rate"] / baseline
            rate = with_ratio(result, row, peer, "rate", ratio, BASELINE, digits=digits)
            unit = "ms per GB" if row == "push" else "µs per token"
            rows.append([title, f"`{peer}`", rate, f"{value(result, row, peer, 'client_cpu', digits=0)} {unit}"])
    return markdown(["load", "client", "median (of `python`; lowest–highest)", "CPU time of the client"], rows)


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="medians of so many (default: %(default)s)")
    parser.add_argument("--size", default="smollm2", metavar="MB", help="model to push (default: %(default)s, 269 MB)")
    parser.add_argument("--quick", action="store_true", help="one round of a quarter of the requests: a try, no result")
    args = parser.parse_args()
    args.requests = REQUESTS_PER_SLOT // 4 if args.quick else REQUESTS_PER_SLOT
    args.rounds = 1 if args.quick else args.rounds
    try:
        result = uvloop.run(measure(args))
    except PeerError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    print(table(result))
    if not args.quick:
        result.save(DEFAULT_OUT)
        megabytes = f"{result.notes['bytes'] / 1e6:.0f} MB"
        measured = f"[JSON](typescript.json): medians of {args.rounds} rounds; pushes of {megabytes}."
        replace_marked(PAGE, f"{measured} {machine.describe(result.machine)}.\n\n{table(result)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
