"""`genserve token`: makes a token, and its entry for --auth-file."""

import argparse
import secrets
import sys
from pathlib import Path
from typing import Final

from genserve.cli.options import Subparsers
from genserve.security.access import AccessError, check_name, token_digest
from genserve.security.roles import ROLE_NAMES

_BYTES: Final = 32


def add_parser(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "token",
        help="make a token for a caller, and its entry for --auth-file",
        description="Makes a random token. Writes the token to --out, which only you can read, or to standard error, "
        "and its entry for the file of genserve serve --auth-file to standard output: genserve token --name trainer "
        "--role trainer --out trainer.token >> callers.toml",
    )
    parser.add_argument("--name", required=True, help="name of the caller, for logs")
    parser.add_argument(
        "--role", action="append", required=True, choices=ROLE_NAMES, help="what the caller may do; may be repeated"
    )
    parser.add_argument("--out", metavar="FILE", help="file for the token; it must not exist yet")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Writes the token and its entry."""
    try:
        check_name("--name", args.name)
    except AccessError as error:
        print(f"genserve token: error: {error}", file=sys.stderr)
        return 2
    token = secrets.token_urlsafe(_BYTES)
    if args.out is None:
        print(f"token (shown once): {token}", file=sys.stderr)
    else:
        path = Path(args.out)
        try:
            path.touch(0o600, exist_ok=False)
        except FileExistsError:
            print(f"genserve token: error: --out {path} is there already: name a new file", file=sys.stderr)
            return 2
        path.write_text(token + "\n")
    roles = ", ".join(f'"{role}"' for role in dict.fromkeys(args.role))
    print(f'[[token]]\nname = "{args.name}"\nroles = [{roles}]\nsha256 = "{token_digest(token).hex()}"\n')
    return 0
