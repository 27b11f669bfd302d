"""What a run is asked to measure."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from genserve.cli.options import count, counts

DEFAULT_OUT = Path("docs/benchmarks")


@dataclass(frozen=True, slots=True)
class Options:
    """`divisor` of requests and repetitions: above 1 with --quick. `sizes` are names of models by their weights, see
    engines.model; `model` is what generation is measured with."""

    rounds: int
    divisor: int
    model: str
    concurrency: list[int]
    peers: list[str]
    sizes: list[str]
    streams: int
    pushes: int
    out: Path


def add(parser: argparse.ArgumentParser, peers: tuple[str, ...], sizes: str) -> None:
    """The flags; `peers` and `sizes` are the defaults of a measurement, and all peers there are."""
    parser.add_argument("--rounds", type=count, default=5, metavar="N", help="medians of so many (default: 5)")
    parser.add_argument("--quick", action="store_true", help="a quarter of the requests, one round: a try, no result")
    parser.add_argument(
        "--model", default="tiny", choices=("tiny", "smollm2"), help="to generate with (default: %(default)s)"
    )
    parser.add_argument(
        "--concurrency", type=counts, default=[1, 4, 16, 64, 256], metavar="N,N", help="default: 1,4,16,64,256"
    )
    parser.add_argument(
        "--peers", type=lambda text: text.split(","), default=list(peers), metavar="NAME,NAME",
        help=f"only these, out of {', '.join(peers) if peers else 'none'}",
    )  # fmt: skip
    parser.add_argument(
        "--sizes", type=lambda text: text.split(","), default=sizes.split(","), metavar="MB,MB",
        help="models to push: smollm2, or megabytes of random weights (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--streams", type=count, default=4, metavar="N", help="live streams (default: 4)")
    parser.add_argument("--pushes", type=count, default=100, metavar="N", help="pushes of `memory` (default: 100)")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="DIR", help=f"default: {DEFAULT_OUT}")


def of(args: argparse.Namespace, peers: tuple[str, ...]) -> Options:
    """Checked. Raises ValueError for a peer that is none."""
    if unknown := [peer for peer in args.peers if peer not in peers]:
        raise ValueError(f"there is no peer {', '.join(unknown)}; there are {', '.join(peers)}")
    return Options(
        rounds=1 if args.quick else args.rounds,
        divisor=4 if args.quick else 1,
        model=args.model,
        concurrency=args.concurrency,
        peers=args.peers,
        sizes=args.sizes,
        streams=args.streams,
        pushes=max(args.pushes // 10, 2) if args.quick else args.pushes,
        out=args.out,
    )
