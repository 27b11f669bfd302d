"""What a run is asked to measure."""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.traces import OUTPUTS
from genserve.cli.options import count, counts

DEFAULT_OUT = Path("docs/benchmarks")
QUICK_OUT = Path(".venv/bench-quick")
"""With --quick: a try does not replace what the page shows."""


@dataclass(frozen=True, slots=True)
class Options:
    """`divisor` of requests and repetitions: above 1 with --quick. `sizes` are names of models by their weights, see
    engines.model; `model` is what generation is measured with."""

    rounds: int
    divisor: int
    model: str
    concurrency: list[int]
    outputs: list[str]
    peers: list[str]
    sizes: list[str]
    streams: int
    pushes: int
    intervals: list[int]
    out: Path


@dataclass(frozen=True, slots=True)
class Defaults:
    """Of one measurement. `peers` are all there are."""

    peers: tuple[str, ...] = ()
    sizes: str = ""
    rounds: int = 5
    model: str = "tiny"
    concurrency: tuple[int, ...] = (1, 4, 16, 64, 256)
    outputs: tuple[str, ...] = OUTPUTS
    pushes: int = 100
    quick_concurrency: tuple[int, ...] = ()
    """With --quick, unless --concurrency says otherwise; empty: the same."""


def _sizes(text: str) -> list[str]:
    """Names of models by their weights, separated by commas."""
    sizes = [part.strip() for part in text.split(",")]
    for size in sizes:
        try:
            if size != "smollm2":
                count(size)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{size!r} is neither smollm2 nor a number of megabytes") from error
    return sizes


def add(parser: argparse.ArgumentParser, defaults: Defaults) -> None:
    """The flags."""
    peers, sizes = defaults.peers, defaults.sizes
    parser.add_argument(
        "--rounds", type=count, default=defaults.rounds, metavar="N", help="medians of so many (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="a quarter of the requests, one round: a try, no result")
    parser.add_argument(
        "--model", default=defaults.model, choices=("tiny", "smollm2"), help="to generate with (default: %(default)s)"
    )
    parser.add_argument(
        "--concurrency", type=counts, metavar="N,N", help=f"default: {','.join(map(str, defaults.concurrency))}"
    )
    parser.add_argument(
        "--outputs", type=lambda text: text.split(","), default=list(defaults.outputs), metavar="WHAT,WHAT",
        help=f"tokens, logprobs (with each token's), text (with both; default: {','.join(defaults.outputs)})",
    )  # fmt: skip
    parser.add_argument(
        "--peers", type=lambda text: text.split(","), default=list(peers), metavar="NAME,NAME",
        help=f"only these, out of {', '.join(peers) if peers else 'none'}",
    )  # fmt: skip
    parser.add_argument(
        "--sizes", type=_sizes, default=sizes.split(",") if sizes else [], metavar="MB,MB",
        help=f"models to push: smollm2, or megabytes of random weights (default: {sizes or 'none'})",
    )  # fmt: skip
    parser.add_argument("--streams", type=count, default=4, metavar="N", help="live streams (default: 4)")
    parser.add_argument(
        "--pushes", type=count, default=defaults.pushes, metavar="N",
        help="pushes of `memory`, or of each peer and round of `cycle` (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--intervals", type=counts, metavar="S,S",
        help="of `cycle`: seconds from one push to the next (default: 5,10,30; with --quick 5)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="DIR",
        help=f"where the results go (default: {DEFAULT_OUT}; with --quick {QUICK_OUT})",
    )  # fmt: skip


def of(args: argparse.Namespace, defaults: Defaults) -> Options:
    """Checked. Raises ValueError for a peer, or an output, that is none, and if results cannot be written."""
    if unknown := [peer for peer in args.peers if peer not in defaults.peers]:
        raise ValueError(f"there is no peer {', '.join(unknown)}; there are {', '.join(defaults.peers)}")
    if unknown := [each for each in args.outputs if each not in OUTPUTS]:
        raise ValueError(f"no peer can be asked for {', '.join(unknown)}; there are {', '.join(OUTPUTS)}")
    concurrency = (args.quick and defaults.quick_concurrency) or defaults.concurrency
    out = args.out if args.out is not None else QUICK_OUT if args.quick else DEFAULT_OUT
    _check_writable(out)
    return Options(
        rounds=1 if args.quick else args.rounds,
        divisor=4 if args.quick else 1,
        model=args.model,
        concurrency=list(concurrency) if args.concurrency is None else args.concurrency,
        outputs=args.outputs,
        peers=args.peers,
        sizes=args.sizes,
        streams=args.streams,
        pushes=min(max(args.pushes // 10, 2), args.pushes) if args.quick else args.pushes,
        intervals=args.intervals or ([5] if args.quick else [5, 10, 30]),
        out=out,
    )


def _check_writable(directory: Path) -> None:
    """Makes it. What is found out here is not found out after hours of measuring."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ValueError(f"no results can be written: {error}") from error
