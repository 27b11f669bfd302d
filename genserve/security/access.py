"""Callers and their roles, as a file or the environment lists them, their limit of calls per second, and the caller of
the running call. Pure otherwise: bytes in, a decision out, and the caller of a function has the clock.

A token is listed by its SHA-256, so that a reader of the list cannot use it. A hash without salt is enough: tokens are
long and random, and `genserve token` makes them.
"""

import hashlib
import hmac
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from genserve.security.roles import ROLE_NAMES, Role


@dataclass(slots=True)
class Rate:
    """A token bucket: `per_s` calls per second, and as many at once as a second has, or one."""

    per_s: float
    _allowance: float = field(init=False)
    _at_s: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._allowance = self._burst

    def take(self, now_s: float) -> float:
        """Takes one call. Returns 0.0 if it is within the limit; else seconds until one is, and nothing is taken."""
        if self._at_s is not None:
            self._allowance = min(self._burst, self._allowance + max(0.0, now_s - self._at_s) * self.per_s)
        self._at_s = now_s
        if self._allowance < 1.0:
            return (1.0 - self._allowance) / self.per_s
        self._allowance -= 1.0
        return 0.0

    @property
    def _burst(self) -> float:
        return max(1.0, self.per_s)


TOKENS_VARIABLE: Final = "GENSERVE_AUTH_TOKENS"
"""Lists callers as `parse_environment` reads them."""
MAX_ENTRIES: Final = 1000
MAX_LIST_BYTES: Final = 1 << 20
TOKEN: Final = re.compile(r"[!-~]+")
"""What every token is: printable ASCII without spaces."""
MIN_TOKEN_CHARS: Final = 16
MAX_TOKEN_CHARS: Final = 4096

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@/-]{0,63}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


class AccessError(ValueError):
    """The list of callers is invalid. The message names the entry, and contains no token."""


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller. `name` is for logs."""

    name: str
    roles: frozenset[Role]


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token that is valid until `expires_s`, seconds since the epoch; None = for ever."""

    principal: Principal
    sha256: bytes
    expires_s: float | None = None


@dataclass(frozen=True, slots=True)
class CertificateEntry:
    """Certificates with this subject alternative name. `*` at its beginning or end stands for any text."""

    principal: Principal
    san: str

    def matches(self, san: str) -> bool:
        """Whether this is the entry of a name."""
        if self.san.startswith("*"):
            return san.endswith(self.san[1:]) and len(san) >= len(self.san)
        if self.san.endswith("*"):
            return san.startswith(self.san[:-1]) and len(san) >= len(self.san)
        return san == self.san


@dataclass(frozen=True, slots=True)
class Access:
    """All callers."""

    tokens: tuple[TokenEntry, ...] = ()
    certificates: tuple[CertificateEntry, ...] = ()

    def of_token(self, token: str, now_s: float) -> Principal | None:
        """The caller with this token. `now_s`: seconds since the epoch. Takes the same time for every token."""
        digest = token_digest(token)
        found: TokenEntry | None = None
        for entry in self.tokens:
            if hmac.compare_digest(entry.sha256, digest):
                found = entry
        if found is None or (found.expires_s is not None and now_s >= found.expires_s):
            return None
        return found.principal

    def of_certificate(self, sans: Iterable[str]) -> Principal | None:
        """The caller of the first entry that matches one of these subject alternative names of a certificate."""
        names = tuple(sans)
        for entry in self.certificates:
            if any(entry.matches(name) for name in names):
                return entry.principal
        return None

    def joined(self, other: "Access") -> "Access":
        """Both lists. Raises AccessError if they are too long together, or list a token twice."""
        return _checked((*self.tokens, *other.tokens), (*self.certificates, *other.certificates))


NOBODY: Final = Access()


def token_digest(token: str) -> bytes:
    """The SHA-256 of a token."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


def check_token(token: str) -> None:
    """Raises AccessError for a text that is no token. The message does not contain it."""
    if not MIN_TOKEN_CHARS <= len(token) <= MAX_TOKEN_CHARS:
        raise AccessError(f"must have {MIN_TOKEN_CHARS} to {MAX_TOKEN_CHARS} characters, has {len(token)}")
    if not TOKEN.fullmatch(token):
        raise AccessError("must be printable ASCII without spaces")


def check_name(what: str, name: Any) -> None:
    """Raises AccessError unless it can be the name of a caller."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise AccessError(f"{what} must be 1 to 64 letters, digits and . _ @ / -")


def parse_file(content: bytes) -> Access:
    """The callers that a TOML file lists. Raises AccessError."""
    try:
        document = tomllib.loads(content.decode())
    except UnicodeDecodeError:
        raise AccessError("is not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise AccessError(f"is not TOML: {error}") from None
    _refuse_unknown("the file", document, ("token", "certificate"))
    tokens = [_token_entry(f"token {number}", entry) for number, entry in _entries(document, "token")]
    certificates = [
        _certificate_entry(f"certificate {number}", entry) for number, entry in _entries(document, "certificate")
    ]
    return _checked(tokens, certificates)


def parse_environment(text: str) -> Access:
    """The callers that a variable lists: ROLE[,ROLE]:TOKEN, separated by spaces. Raises AccessError."""
    tokens = []
    for number, part in enumerate(text.split(), start=1):
        where = f"entry {number}"
        roles, colon, token = part.partition(":")
        if not colon:
            raise AccessError(f"{where}: must be ROLE[,ROLE]:TOKEN")
        try:
            check_token(token)
        except AccessError as error:
            raise AccessError(f"{where}: the token {error}") from None
        principal = Principal(f"environment-{number}", _roles(where, roles.split(",")))
        tokens.append(TokenEntry(principal, token_digest(token)))
    return _checked(tokens, ())


def environment_lists_callers(environment: Mapping[str, str]) -> bool:
    """Whether the environment lists somebody; a variable without an entry is as none."""
    return bool(environment.get(TOKENS_VARIABLE, "").split())


def _entries(document: Mapping[str, Any], kind: str) -> Iterable[tuple[int, Mapping[str, Any]]]:
    entries = document.get(kind, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise AccessError(f"{kind} must be a list of tables: write [[{kind}]]")
    return enumerate(entries, start=1)


def _token_entry(where: str, entry: Mapping[str, Any]) -> TokenEntry:
    if "token" in entry:
        raise AccessError(f"{where}: write the sha256 of the token and not the token: genserve token prints both")
    _refuse_unknown(where, entry, ("name", "roles", "sha256", "expires"))
    sha256 = entry.get("sha256")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256.lower()):
        raise AccessError(f"{where}: sha256 must have 64 hexadecimal digits")
    expires = entry.get("expires")
    if expires is not None:
        if not isinstance(expires, datetime):
            raise AccessError(f"{where}: expires must be a time such as 2027-01-31T00:00:00Z")
        expires = (expires if expires.tzinfo is not None else expires.replace(tzinfo=UTC)).timestamp()
    return TokenEntry(_principal(where, entry), bytes.fromhex(sha256), expires)


def _certificate_entry(where: str, entry: Mapping[str, Any]) -> CertificateEntry:
    _refuse_unknown(where, entry, ("name", "roles", "san"))
    san = entry.get("san")
    if not isinstance(san, str) or not san or len(san) > 1024:
        raise AccessError(f"{where}: san must be a subject alternative name, such as trainer.example.org")
    if "*" in (san[1:] if san.startswith("*") else san[:-1]) or san == "*":
        raise AccessError(f"{where}: san may have one *, at its beginning or its end, and not alone")
    return CertificateEntry(_principal(where, entry), san)


def _principal(where: str, entry: Mapping[str, Any]) -> Principal:
    name, roles = entry.get("name"), entry.get("roles")
    check_name(f"{where}: name", name)
    if not isinstance(roles, list):
        raise AccessError(f"{where}: roles must be a list of {', '.join(ROLE_NAMES)}")
    return Principal(str(name), _roles(where, roles))


def _roles(where: str, names: Sequence[Any]) -> frozenset[Role]:
    if not names:
        raise AccessError(f"{where}: has no role")
    for name in names:
        if name not in ROLE_NAMES:
            raise AccessError(f"{where}: the role {str(name)[:40]!r} is not one of {', '.join(ROLE_NAMES)}")
    return frozenset(map(Role, names))


def _refuse_unknown(where: str, entry: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in entry:
        if key not in known:
            raise AccessError(f"{where}: unknown key {key[:40]!r}, known are {', '.join(known)}")


def _checked(tokens: Sequence[TokenEntry], certificates: Sequence[CertificateEntry]) -> Access:
    if len(tokens) + len(certificates) > MAX_ENTRIES:
        raise AccessError(f"has {len(tokens) + len(certificates)} entries, the limit is {MAX_ENTRIES}")
    known: dict[bytes, str] = {}
    for entry in tokens:
        if entry.sha256 in known:
            raise AccessError(
                f"lists the token of {entry.principal.name} twice: it is that of {known[entry.sha256]}, too"
            )
        known[entry.sha256] = entry.principal.name
    return Access(tuple(tokens), tuple(certificates))


@dataclass(frozen=True, slots=True)
class Calling:
    """The caller of a call, where callers are listed. `principal` is None for an anonymous call that needs no role."""

    principal: Principal | None


_calling: Final[ContextVar[Calling | None]] = ContextVar("calling", default=None)


def calling() -> Calling | None:
    """The caller of the running call; None where no callers are listed, and every call is allowed."""
    return _calling.get()


def tell_calling(principal: Principal | None) -> None:
    """Says who makes the running call, to its handler."""
    _calling.set(Calling(principal))
