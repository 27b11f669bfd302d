"""Certificates of an authority of our own, tokens, and the files that daemons and clients read them from."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import trustme

from genserve.security.access import token_digest
from tests.support.known_secrets import known_token


@dataclass(frozen=True)
class Pair:
    """Paths of a certificate with its chain, and of its key."""

    cert_file: str
    key_file: str


class Authority:
    """Issues certificates into a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ca = trustme.CA()
        self.ca_file = str(directory / f"ca-{secrets.token_hex(4)}.pem")
        self._ca.cert_pem.write_to_path(self.ca_file)

    def issue(self, *names: str, expires: datetime | None = None, into: Pair | None = None) -> Pair:
        """A certificate for these names, in new files or `into` those of another one."""
        issued = self._ca.issue_cert(*names, not_after=expires)
        stem = self._directory / secrets.token_hex(4)
        pair = Pair(f"{stem}.crt", f"{stem}.key") if into is None else into
        Path(pair.cert_file).write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(pair.key_file)
        return pair

    def replaces(self, other: "Authority", pair: Pair, *names: str) -> None:
        """Its own certificate, and one for these names, take the place of another authority's in their files."""
        self.issue(*names, into=pair)
        self._ca.cert_pem.write_to_path(other.ca_file)


@dataclass(frozen=True)
class Callers:
    """A list of callers, and the token of each by its name."""

    auth_file: str
    tokens: dict[str, str]

    def token_file(self, name: str) -> str:
        """A file with the token of a caller."""
        path = Path(self.auth_file).with_name(f"{name}.token")
        path.write_text(self.tokens[name] + "\n")
        return str(path)


def list_callers(directory: Path, sans: dict[str, Sequence[str]] | None = None, **roles: Sequence[str]) -> Callers:
    """Lists a caller with a token for each name, and certificates by their names, all with these roles."""
    tokens = {name: known_token() for name in roles}
    entries = [
        f'[[token]]\nname = "{name}"\nroles = {list(roles[name])}\nsha256 = "{token_digest(token).hex()}"'
        for name, token in tokens.items()
    ]
    entries += [
        f'[[certificate]]\nname = "of-{san.strip("*")}"\nroles = {list(of)}\nsan = "{san}"'
        for san, of in ({} if sans is None else sans).items()
    ]
    path = directory / "callers.toml"
    path.write_text("\n\n".join(entries) + "\n")
    path.chmod(0o600)
    return Callers(str(path), tokens)


def one_each(directory: Path) -> Callers:
    """A caller for each role, with its name, and one with all."""
    every = ("generate", "trainer", "operator")
    named: dict[str, Any] = {role: (role,) for role in every}
    return list_callers(directory, **named, router=every)
