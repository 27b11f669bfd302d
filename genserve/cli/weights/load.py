"""`genserve load`: makes the daemon fetch weights itself, from its own host or from other daemons."""

import argparse

from genserve.cli.options import Subparsers, open_client
from genserve.cli.weights.push import add_push_options, print_result, push_options, version_of


def add_parser(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "load",
        help="make the daemon fetch weights from its disk or from other daemons",
        description="Makes the daemon fetch weights itself, and apply them while it serves.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        default="",
        help="absolute path of a .safetensors file or a checkpoint directory, on the daemon's host",
    )
    source.add_argument(
        "--peer",
        metavar="HOST:PORT",
        action="append",
        default=[],
        help="another daemon that serves them; may be repeated: the next one goes on where one fails",
    )
    parser.add_argument(
        "--peer-push", metavar="ID", default="", help="what the peers have of this push, not what they serve"
    )
    parser.add_argument("--push-id", metavar="ID", default="", help="go on with a load that was interrupted")
    add_push_options(parser, default="the served one + 1; of peers, theirs")


def run(args: argparse.Namespace) -> int:
    """Loads, and prints the steps."""
    with open_client(args) as client:
        result = client.load_weights(
            args.path,
            peers=args.peer,
            peer_push_id=args.peer_push,
            push_id=args.push_id,
            version=args.version if args.peer else version_of(args, client),
            timeout_s=args.timeout,
            **push_options(args),
        )
    return print_result(result, args)
