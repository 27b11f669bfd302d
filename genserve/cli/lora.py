"""`genserve lora`: the LoRA adapters of a daemon."""

import argparse
import sys
from typing import TYPE_CHECKING

from genserve.cli.options import Subparsers, add_connection_options, open_client
from genserve.cli.push import ProgressDisplay
from genserve.errors import InvalidFieldError

if TYPE_CHECKING:
    from genserve.client import Client, Lora


def add_parser(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "lora", help="push, load, list or unload LoRA adapters", description="Manages the LoRA adapters of a daemon."
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action, described in {
        "list": "show the adapters that requests can use",
        "push": "send an adapter that PEFT saved on this host",
        "load": "load an adapter that PEFT saved on the daemon's host",
        "unload": "remove an adapter; running requests keep it",
    }.items():
        one = actions.add_parser(action, help=described, description=f"{described[0].upper()}{described[1:]}.")
        if action != "list":
            one.add_argument("name", metavar="NAME", help="name that requests use (--lora-name)")
        if action in ("push", "load"):
            one.add_argument(
                "path", metavar="DIRECTORY", help="directory with adapter_config.json and adapter_model.safetensors"
            )
        if action == "push":
            help_version = "version of the adapter, above 0 (default: the next one)"
            one.add_argument("--version", type=int, metavar="N", help=help_version)
            one.add_argument("--force", action="store_true", help="accept a version that is not above the loaded one")
        add_connection_options(one)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the action and prints the adapters that are loaded afterwards."""
    with open_client(args) as client:
        match args.action:
            case "push":
                _push(client, args)
            case "load":
                client.load_lora(args.name, args.path)
            case "unload":
                client.unload_lora(args.name)
        loras = client.list_loras()
    print(lora_table(loras))
    return 0


def _push(client: "Client", args: argparse.Namespace) -> None:
    progress = ProgressDisplay(sys.stderr)
    try:
        client.push_lora(args.name, args.path, version=args.version, force=args.force, progress=progress.show)
    except ValueError as error:  # a file is not what it claims to be
        raise InvalidFieldError(str(error)) from error
    finally:
        progress.end()


def lora_table(loras: "list[Lora]") -> str:
    """One line per adapter."""
    rows = [("NAME", "VERSION", "RANK", "SIZE", "REQUESTS", "FROM")]
    for each in loras:
        size = f"{each.size_bytes / 1e6:.1f} MB"
        rows.append((each.name, str(each.version), str(each.rank), size, str(each.running_requests), each.source))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines) if loras else "no adapter is loaded"
