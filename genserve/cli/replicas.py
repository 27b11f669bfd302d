"""`genserve replicas`: the replicas of a router."""

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from genserve.cli.options import Subparsers, add_connection_options, add_timeout, count, open_client
from genserve.cli.streams import print_json
from genserve.errors import DeadlineError, UnavailableError, UnsupportedError
from genserve.net import DEFAULT_ROUTER

if TYPE_CHECKING:
    from genserve.client import Client, FleetReplica, Replicas

_ACTIONS = {
    "list": "show the replicas and what they serve",
    "add": "add a daemon; it gets requests when it serves the version of the fleet",
    "drain": "remove a replica when its requests have ended",
    "remove": "remove a replica at once; its requests are cut off",
    "wait": "wait until this many replicas get requests",
}


def add_parser(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "replicas",
        help="list, add, drain or remove the replicas of a router",
        description="Manages the replicas of a router (genserve route), whose address is --target.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action, described in _ACTIONS.items():
        one = actions.add_parser(action, help=described, description=f"{described[0].upper()}{described[1:]}.")
        if action == "list":
            one.add_argument("--watch", action="store_true", help="show every change until Ctrl-C")
            one.add_argument("--json", action="store_true", help="print the replicas as one line of protobuf JSON")
        elif action == "wait":
            one.add_argument("count", type=count, metavar="COUNT", help="how many replicas have to be ready")
        else:
            one.add_argument("address", metavar="HOST:PORT", help="address of the daemon, which names the replica")
        if action in ("drain", "wait"):
            add_timeout(one, 300.0)
        if action in ("drain", "remove"):
            one.add_argument(
                "--force",
                action="store_true",
                help="even if no other replica has the version of the fleet, which is then lost",
            )
        add_connection_options(one, of="the router", target=DEFAULT_ROUTER)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the action and prints the replicas that belong to the fleet afterwards."""
    with open_client(args) as client, _naming_daemons():
        match args.action:
            case "add":
                client.add_replica(args.address)
            case "drain":
                _drain(client, args.address, args.timeout, force=args.force)
            case "remove":
                client.remove_replica(args.address, force=args.force)
            case "wait":
                _wait(client, args.count, args.timeout)
        watches, as_json = (args.watch, args.json) if args.action == "list" else (False, False)
        shown: Iterable[Replicas] = client.watch_replicas() if watches else [client.list_replicas()]
        for number, replicas in enumerate(shown):
            if as_json:
                print_json(replicas.message)
                continue
            if number > 0:
                print("\x1b[H\x1b[2J" if sys.stdout.isatty() else "", end="" if sys.stdout.isatty() else "\n")
            print(replica_table(replicas), flush=True)
    return 0


@contextmanager
def _naming_daemons() -> Iterator[None]:
    try:
        yield
    except UnsupportedError as error:
        raise UnsupportedError(f"--target is not the address of a router: {error.message}") from None


def _drain(client: "Client", address: str, timeout_s: float, *, force: bool) -> None:
    listed = "if `genserve replicas list` shows it as draining"
    goes_on = f"{listed}, it goes on: `genserve replicas add {address}` ends that"
    try:
        client.drain_replica(address, force=force, timeout_s=timeout_s)
    except KeyboardInterrupt:
        print(f"genserve: stopped waiting for {address}: {goes_on}", file=sys.stderr)
        raise
    except DeadlineError:
        raise DeadlineError(
            f"{address} still has requests after {timeout_s:g} s, or no other replica is known to have the version of "
            f"the fleet: {goes_on}"
        ) from None


def _wait(client: "Client", num_ready: int, timeout_s: float) -> None:
    replicas: list[FleetReplica] | None = None
    is_late = False
    try:
        for shown in client.watch_replicas(timeout_s=timeout_s):
            replicas = shown.replicas
            if sum(each.state == "ready" for each in replicas) >= num_ready:
                return
    except DeadlineError:
        is_late = True
    if replicas is None:
        if not is_late:
            raise UnavailableError("the router has shut down before it named its replicas")
        raise DeadlineError(f"the router did not name its replicas within {timeout_s:g} s")
    ready = f"{sum(each.state == 'ready' for each in replicas)} of {num_ready} replicas"
    others = "".join(f"; {each.address}: {remark(each)}" for each in replicas if each.state != "ready")
    if len(replicas) < num_ready:
        others += f"; the fleet has {len(replicas)} in all: genserve replicas add ADDRESS"
    if not is_late:
        raise UnavailableError(f"the router has shut down: {ready} were ready{others}")
    raise DeadlineError(f"{ready} are ready after {timeout_s:g} s{others}")


def replica_table(replicas: "Replicas") -> str:
    """The version of the fleet, one line per replica, and how many requests each policy has placed."""
    rows = [["REPLICA", "STATE", "VERSION", "RUNNING", "WAITING", "INFLIGHT", "TOKENS/S", ""]]
    rows += [_row(each) for each in replicas.replicas]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [version_row(replicas)]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if not replicas.replicas:
        lines[1:] = ["no replica belongs to the fleet"]
    if any(replicas.decisions.values()):
        lines.append("decided by " + ", ".join(f"{policy} {count}" for policy, count in replicas.decisions.items()))
    return "\n".join(lines)


def _row(replica: "FleetReplica") -> list[str]:
    version = "-" if replica.engine is None else str(replica.engine.weight_version)
    load = replica.load
    counts = ("-", "-") if load is None else (str(load.running), str(load.waiting))
    tokens_per_s = "-" if load is None else f"{load.tokens_per_second:.0f}"
    return [replica.address, replica.state, version, *counts, str(replica.inflight), tokens_per_s, remark(replica)]


def version_row(replicas: "Replicas") -> str:
    """The version of the fleet, and a remark if no replica serves it."""
    version = replicas.weight_version
    serving = [each.engine for each in replicas.replicas if each.engine is not None and each.engine.startup is None]
    if not replicas.replicas or any(engine.weight_version == version for engine in serving):
        return f"version {version}"
    if not version:
        return "version not known yet"
    if any(each.engine is None for each in replicas.replicas):
        return f"version {version}, which no replica that answers serves: push it again if the others do not come back"
    return f"version {version}, which no replica serves: push it again"


def remark(replica: "FleetReplica") -> str:
    """Why a replica is not ready, or why a ready one generates nothing."""
    engine = replica.engine
    if engine is not None and engine.startup is not None and engine.startup.step:
        return f"its engine is starting: {engine.startup.described(datetime.now(UTC))}"
    return replica.reason or ("" if engine is None or engine.phase == "running" else f"it is {engine.phase}")
