"""`genserve load`: makes the daemon fetch weights itself, from its own host or from other daemons."""

import argparse

from genserve.cli.options import Subparsers, add_apply_options, add_connection_options, open_client, seconds
from genserve.cli.weights.push import add_version_options, print_result


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
    add_version_options(parser, default="the served one + 1; of peers, theirs")
    add_apply_options(parser)
    parser.add_argument("--timeout", type=seconds, default=600.0, metavar="TIME", help="deadline (default: 600s)")
    parser.add_argument("--json", action="store_true", help="print the outcome as protobuf JSON")
    add_connection_options(parser)


def run(args: argparse.Namespace) -> int:
    """Loads, and prints the steps."""
    with open_client(args) as client:
        version = args.version
        if version is None and not args.peer:
            version = client.status().state.weight_version + 1
        result = client.load_weights(
            args.path,
            peers=args.peer,
            peer_push_id=args.peer_push,
            push_id=args.push_id,
            version=version,
            expected_version=args.expected_version,
            action=args.action,
            prepared_ttl_s=args.prepared_ttl,
            force=args.force,
            pause_mode=args.pause_mode,
            kv_policy=args.kv_policy,
            pause_lease_id=args.lease,
            prepare_mode=args.prepare_mode,
            timeout_s=args.timeout,
        )
    return print_result(result, args)
