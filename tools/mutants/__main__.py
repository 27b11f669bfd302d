"""Puts random one-line bugs into genserve, runs the tests that execute the line, and lists the bugs that none notices.

Exits with 1 when fewer than --at-least percent of them are noticed.
"""

import argparse
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path

from tools.mutants.operators import Mutant, mutants_of, sites_of
from tools.mutants.trials import NOT_COVERED, SURVIVED, TIMEOUT, LineMap, try_mutants, warm_up

PACKAGES = ("weights", "control", "rpc", "client", "routing", "fleet", "placement")
TESTS = ("tests/unit", "tests/rpc", "tests/fleet", "tests/simulation")
# Not a verdict on the tests: nothing in them runs the line, or the bug makes them wait.
_OTHER_ENDS = (TIMEOUT, SURVIVED, NOT_COVERED)


def main(argv: Sequence[str]) -> int:
    """Tries the bugs; the exit status."""
    args = _parser().parse_args(argv)
    began_s = time.monotonic()
    packages = args.package or list(PACKAGES)
    files = [file for name in packages for file in sorted(Path("genserve", name).rglob("*.py"))]
    chosen = _chosen(files, args)
    print(f"{len(chosen)} bugs out of {len(files)} files; running the tests once to see which lines they execute")
    warm_up(["grpc.aio", "hypothesis", "numpy", "pytest_asyncio", "pytest_timeout"])
    lines = LineMap.measure(files, args.tests or TESTS, args.slowest, timeout_s=60 * args.minutes)
    print(f"{len(lines.runs)} tests in {time.monotonic() - began_s:.0f} s", flush=True)
    for run in lines.left_out:
        print(f"left out: {run.name} ({run.seconds:.0f} s, {'passed' if run.passed else 'not passed'})")
    warm_up(lines.modules)
    ends: dict[str, Counter[str]] = {name: Counter() for name in packages}
    unnoticed: list[str] = []
    budget_s = 60 * args.minutes - (time.monotonic() - began_s)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    trials = try_mutants(lines, chosen, args.workers, budget_s)
    with suppress(KeyboardInterrupt), closing(trials):  # what was tried until then counts
        for mutant, end in trials:
            kind = end if end in _OTHER_ENDS else "killed"
            ends[mutant.path.parts[1]][kind] += 1
            if kind == "killed" and not args.verbose:
                continue
            print(f"{end}: {mutant}", flush=True)
            if kind in (SURVIVED, NOT_COVERED):
                unnoticed.append(f"{end}: {mutant}")
    print("\n" + "\n".join(sorted(unnoticed)) + "\n\n" + _table(ends))
    total = sum(ends.values(), Counter())
    print(f"seed {args.seed}: tried {total.total()} of {len(chosen)} in {time.monotonic() - began_s:.0f} s")
    return 1 if _percent(total) < args.at_least else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the choice (default: %(default)s)")
    parser.add_argument("--count", type=int, default=200, help="how many bugs (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=30, help="begin none after so long (default: %(default)s)")
    parser.add_argument(
        "--package", action="append", choices=PACKAGES, help="only this one (default: each; repeatable)"
    )
    parser.add_argument("--at", action="append", metavar="FILE[:LINE]", help="every bug of a file or a line instead")
    parser.add_argument("--slowest", type=float, default=10, metavar="SECONDS", help="of a test (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="bugs tried at a time (default: %(default)s)")
    parser.add_argument("--at-least", type=float, default=0, metavar="PERCENT", help="default: %(default)s")
    parser.add_argument("--verbose", action="store_true", help="name the test that notices each bug")
    parser.add_argument("tests", nargs="*", help=f"files and folders of tests (default: {' '.join(TESTS)})")
    return parser


def _chosen(files: Sequence[Path], args: argparse.Namespace) -> list[Mutant]:
    if args.at:
        return [mutant for place in args.at for mutant in _mutants_at(place)]
    sites = [site for file in files for site in sites_of(file)]
    random.Random(args.seed).shuffle(sites)
    found = (mutant for site in sites if (mutant := site.mutant()) is not None)
    return list(islice(found, args.count))


def _mutants_at(place: str) -> list[Mutant]:
    file, _, lineno = place.partition(":")
    return [mutant for mutant in mutants_of(Path(file)) if not lineno or mutant.lineno == int(lineno)]


def _percent(ends: Counter[str]) -> float:
    """A bug that makes the tests hang is noticed too."""
    return 100 * (ends["killed"] + ends["timeout"]) / ends.total() if ends else 100.0


def _table(ends: dict[str, Counter[str]]) -> str:
    columns = ("killed", *_OTHER_ENDS)
    rows = [["package", *columns, "noticed"]]
    for name, counted in [*ends.items(), ("all", sum(ends.values(), Counter()))]:
        rows.append([name, *(str(counted[column]) for column in columns), f"{_percent(counted):.1f} %"])
    return "\n".join("  ".join(f"{cell:>11}" for cell in row) for row in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
