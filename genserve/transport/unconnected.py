"""Why there is no connection to a daemon: what gRPC says, in words for people, and the settings that may mend it."""

import re
from collections.abc import Sequence
from typing import Final

from genserve.security.caller import Caller

_REFUSED: Final = re.compile(
    r"failed to connect to all addresses; last error: \w+: \S+: (?:Failed to connect to remote host: )?"
)
"""How gRPC begins, before what the operating system says, when nobody listens: the address is in our own words."""
_CAUSES: Final[tuple[tuple[re.Pattern[str], str, tuple[str, ...]], ...]] = (
    (re.compile(".*Hostname Verification Check failed.*"), "its certificate is for another name", ("server_name",)),
    (re.compile(".*CERTIFICATE_VERIFY_FAILED: certificate has expired.*"), "its certificate has expired", ()),
    (re.compile(".*CERTIFICATE_VERIFY_FAILED: certificate is not yet.*"), "its certificate is not valid yet", ()),
    (re.compile(".*CERTIFICATE_VERIFY_FAILED.*"), "its certificate is of no authority known here", ("ca_file",)),
    (re.compile(".*an http1.x server.*"), "it speaks HTTP/1, and is no daemon", ()),
    (re.compile(r"errors resolving .*\[.*address lookup failed for .*"), "its name has no address", ()),
)
"""What gRPC says, what it means, and the client's settings that it is about."""
_CLOSED: Final = re.compile(r"Socket closed|(?:\w+: ?)?(?:Connection reset by peer|Broken pipe)(?: \(\d+\))?")
_PLAINTEXT: Final = "WRONG_VERSION_NUMBER"


def why_unconnected(details: str, caller: Caller | None) -> tuple[str, Sequence[str]]:
    """The reason, and the names of ConnectionSettings that it is about, which it ends with. `caller`: how a client has
    made the call, None = it was made otherwise, by a router say, which has other names for them."""
    said = _REFUSED.sub("", details)
    if _CLOSED.fullmatch(said):
        words, settings = _why_closed(caller)
    elif _PLAINTEXT in said:
        words, settings = _why_plaintext(caller)
    else:
        found = ((words, settings) for pattern, words, settings in _CAUSES if pattern.fullmatch(said))
        words, settings = next(found, (said, ()))
    if caller is None:
        settings = ()
    return f"{words}{named(settings)}", settings


def _why_plaintext(caller: Caller | None) -> tuple[str, tuple[str, ...]]:
    words = "it has no TLS, or is no daemon"
    if caller is None:
        return words, ()
    return f"{words}: leave out what asks for it", caller.ask_for_tls


def named(settings: Sequence[str]) -> str:
    """How a reason ends that is about these."""
    return f" ({' or '.join(settings)})" if settings else ""


def _why_closed(caller: Caller | None) -> tuple[str, tuple[str, ...]]:
    """A daemon closes a connection without TLS at once, and one with a certificate that it does not accept after the
    handshake. gRPC hears no reason."""
    closed = "it closed the connection: it may"
    if caller is None:
        return f"{closed} need TLS, or a certificate", ()
    if not caller.uses_tls:
        return f"{closed} need TLS", ("tls", "ca_file")
    if not caller.has_certificate:
        return f"{closed} require a certificate of its clients", ("cert_file",)
    return f"{closed} not accept this client's certificate, which may have expired, or be of another authority", (
        "cert_file",
    )
