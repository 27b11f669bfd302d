"""A daemon for an hour under streams, pushes and faults: `scripts/soak`. What it holds of the machine is sampled.

Exits with 1 if it grows, answers what it may not, or does not satisfy the oracle of the fault tests at the end.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import uvloop

from bench.soak.run import Load, draw, soak


def main(argv: Sequence[str]) -> int:
    """Soaks; the exit status."""
    load = Load()
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=load.seconds, help="how long (default: %(default)g)")
    parser.add_argument("--streams", type=int, default=load.num_streams, help="at a time (default: %(default)s)")
    parser.add_argument(
        "--push-every", type=float, default=load.push_every_s, metavar="S", help="in seconds (default: %(default)g)"
    )
    parser.add_argument("--seed", type=int, default=load.seed, help="of all choices (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("soak"), metavar="DIR", help="(default: %(default)s)")
    args = parser.parse_args(argv)
    asked = Load(args.seconds, args.streams, args.push_every, args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        report = uvloop.run(soak(asked, Path(directory)))
    print(report.summary())
    report.save(args.out / "soak.json")
    draw(report, args.out / "soak.png")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
