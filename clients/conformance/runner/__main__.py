"""Prints the table of scenarios and drivers; exits with 1 if anything differs."""

import argparse
import asyncio
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from clients.conformance.runner.daemons import running
from clients.conformance.runner.drivers import DRIVERS
from clients.conformance.runner.mutations import MUTATIONS
from clients.conformance.runner.run import Run
from clients.conformance.runner.scenario import Scenario, all_scenarios
from clients.conformance.runner.table import table


def parsed(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/conformance", description=__doc__)
    parser.add_argument("--only", metavar="NAME,...", help="some scenarios instead of all")
    parser.add_argument("--driver", metavar="NAME=COMMAND", action="append", help="instead of those of this repository")
    parser.add_argument("--mutate", choices=MUTATIONS, help="pass calls on with a mistake, which the table must show")
    args = parser.parse_args(arguments)
    known = {scenario.name: scenario for scenario in all_scenarios()}
    try:
        args.scenarios = [known[name] for name in args.only.split(",")] if args.only else list(known.values())
    except KeyError as error:
        parser.error(f"no scenario is named {error}; there are {', '.join(known)}")
    if wrong := [each for each in args.driver or () if not each.partition("=")[2]]:
        parser.error(f"argument --driver: {wrong[0]!r} is not NAME=COMMAND")
    pairs = [each.partition("=") for each in args.driver or ()]
    args.drivers = {name: shlex.split(command) for name, _, command in pairs} or DRIVERS
    return args


async def run(scenarios: list[Scenario], drivers: dict[str, Sequence[str]], mutation: str | None) -> int:
    """The exit status."""
    with tempfile.TemporaryDirectory() as directory, running(Path(directory)) as daemons:
        async with Run.against(daemons) as all_drivers:
            outcomes = {each.name: await all_drivers.scenario(each, drivers, mutation) for each in scenarios}
    print(table(outcomes, list(drivers)))
    return int(any(outcome.differences for by_driver in outcomes.values() for outcome in by_driver.values()))


if __name__ == "__main__":
    given = parsed(sys.argv[1:])
    sys.exit(asyncio.run(run(given.scenarios, given.drivers, given.mutate)))
