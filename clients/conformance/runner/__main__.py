"""Prints the table of scenarios and drivers; exits with 1 if anything differs."""

import argparse
import asyncio
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from clients.conformance.runner.daemons import Daemons, running
from clients.conformance.runner.drivers import DRIVERS
from clients.conformance.runner.mutations import MUTATIONS
from clients.conformance.runner.run import Run
from clients.conformance.runner.scenario import Scenario, all_scenarios
from clients.conformance.runner.table import Outcome, table


def parsed(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/conformance", description=__doc__)
    parser.add_argument("--only", metavar="NAME,...", help="some scenarios instead of all")
    parser.add_argument("--driver", metavar="NAME=COMMAND", action="append", help="instead of those of this repository")
    parser.add_argument("--mutate", choices=MUTATIONS, help="pass calls on with a mistake, which the table must show")
    args = parser.parse_args(arguments)
    known = {scenario.name: scenario for scenario in all_scenarios()}
    try:
        args.scenarios = [known[name.strip()] for name in args.only.split(",")] if args.only else list(known.values())
    except KeyError as error:
        parser.error(f"no scenario is named {error}; there are {', '.join(known)}")
    if args.mutate and not any(scenario.daemon == "open" for scenario in args.scenarios):
        parser.error("--mutate changes nothing in scenarios of the secured daemon, and there are no others here")
    try:
        args.drivers = _drivers(args.driver or ()) or DRIVERS
    except ValueError as error:
        parser.error(f"argument --driver: {error}")
    return args


def _drivers(given: Sequence[str]) -> dict[str, Sequence[str]]:
    """Commands by name. Raises ValueError for one that cannot be right, before daemons start for it."""
    drivers: dict[str, Sequence[str]] = {}
    for each in given:
        name, _, text = each.partition("=")
        try:
            command = shlex.split(text)
        except ValueError as error:
            raise ValueError(f"{each!r}: {error}") from None
        if name == "" or not command:
            raise ValueError(f"{each!r} is not NAME=COMMAND")
        if name in drivers:
            raise ValueError(f"there are two drivers {name!r}")
        if shutil.which(command[0]) is None:
            raise ValueError(f"{each!r}: there is no program {command[0]!r}")
        drivers[name] = command
    return drivers


def main(scenarios: list[Scenario], drivers: dict[str, Sequence[str]], mutation: str | None) -> int:
    """The exit status. The daemons end with it, also if it is interrupted or told to end."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    print("starting daemons on a tiny model, which takes up to a minute", file=sys.stderr)
    with tempfile.TemporaryDirectory() as directory, running(Path(directory)) as daemons:
        outcomes = asyncio.run(run(daemons, scenarios, drivers, mutation))
    print(table(outcomes, list(drivers)))
    return int(any(outcome.differences for by_driver in outcomes.values() for outcome in by_driver.values()))


async def run(
    daemons: Daemons, scenarios: list[Scenario], drivers: dict[str, Sequence[str]], mutation: str | None
) -> dict[str, dict[str, Outcome]]:
    """Outcomes by scenario and driver."""
    async with Run.against(daemons) as all_drivers:
        outcomes = {}
        for number, each in enumerate(scenarios, start=1):
            print(f"{number} of {len(scenarios)}: {each.name}", file=sys.stderr)
            outcomes[each.name] = await all_drivers.scenario(each, drivers, mutation)
        return outcomes


if __name__ == "__main__":
    given = parsed(sys.argv[1:])
    try:
        sys.exit(main(given.scenarios, given.drivers, given.mutate))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
