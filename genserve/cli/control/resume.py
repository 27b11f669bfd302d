"""`genserve resume`: ends a pause."""

import argparse
import sys

from genserve.cli.options import Subparsers, add_connection_options, open_client


def add_parser(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser("resume", help="end a pause", description="Ends a pause.")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("lease_id", metavar="LEASE", nargs="?", help="the lease that `genserve pause` printed")
    which.add_argument("--force", action="store_true", help="end every pause, whoever holds it")
    add_connection_options(parser)


def run(args: argparse.Namespace) -> int:
    """Resumes and says whether the engine runs."""
    with open_client(args) as client:
        resumed = client.resume("" if args.force else args.lease_id, force=args.force)
    if resumed.lease_expired:
        print("the lease had expired: the engine may have run meanwhile", file=sys.stderr)
    others = "".join(f"; {lease.lease_id} of {lease.holder} is still held" for lease in resumed.state.pauses)
    print(f"{resumed.state.phase}{others}")
    return 0
