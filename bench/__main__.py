"""The benchmarks: `scripts/bench MEASUREMENT`, see --help. Exits with 1, naming it, when a peer cannot be run."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from bench import machine, options
from bench.measurements import cycle, generate, interference, memory, pause, push, serving
from bench.processes import PeerError, use_packages
from bench.results import page, plots
from bench.results.result import Result

MEASUREMENTS = {
    "generate": generate,
    "serving": serving,
    "cycle": cycle,
    "push": push,
    "pause": pause,
    "interference": interference,
    "memory": memory,
}


def main(argv: Sequence[str]) -> int:
    """Measures; the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    subparsers = parser.add_subparsers(dest="measurement", required=True, metavar="MEASUREMENT")
    for name, module in MEASUREMENTS.items():
        text = " ".join(str(module.__doc__).split("\n\n")[0].split())
        options.add(subparsers.add_parser(name, help=text, description=module.__doc__), module.DEFAULTS)
    options.add(subparsers.add_parser("all", help="all of them, with their defaults"), options.Defaults())
    table = subparsers.add_parser("table", help="write the tables, README.md's figures and the plots from the results")
    table.add_argument(
        "--out", type=Path, default=options.DEFAULT_OUT, metavar="DIR",
        help=f"where the results are (default: {options.DEFAULT_OUT})",
    )  # fmt: skip
    args = parser.parse_args(argv)
    try:
        use_packages()
    except PeerError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    if args.measurement == "table":
        try:
            page.update_readme(args.out)
            page.update_goals(args.out)
            for name in page.update_page(args.out):
                plots.draw(Result.load(args.out, name), args.out)
        except OSError as error:
            print(f"bench: table: {error}", file=sys.stderr)
            return 1
        return 0
    return _measure_all(parser, argv, args)


def _measure_all(parser: argparse.ArgumentParser, argv: Sequence[str], args: argparse.Namespace) -> int:
    # Either signal ends the engines too, also where a shell has put us into the background, which ignores interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    names = list(MEASUREMENTS) if args.measurement == "all" else [args.measurement]
    print(machine.describe(machine.facts()), file=sys.stderr)
    if (load := os.getloadavg()[0]) > 1:
        print(f"bench: others use this machine (load {load:.1f}): peers of more processes suffer more", file=sys.stderr)
    for name in names:
        module = MEASUREMENTS[name]
        own = parser.parse_args([name, *argv[1:]]) if args.measurement == "all" else args
        try:
            asked = options.of(own, module.DEFAULTS)
            result = uvloop.run(module.run(asked))
        except (PeerError, MemoryError, ValueError) as error:
            print(f"bench: {name}: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
        result.machine["load_after"] = list(os.getloadavg())  # others on the machine show here
        path = result.save(asked.out)
        print(f"\n{page.TABLES[name][1](result)}\n\n{path}")
        print(plots.draw(result, asked.out))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
