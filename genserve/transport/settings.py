"""How a client reaches a daemon, from what its caller says, the environment and a file, in this order.

The variables are GENSERVE_ and the name of a setting in upper case, such as GENSERVE_TARGET or GENSERVE_TOKEN_FILE. The
file is $GENSERVE_CONFIG, or genserve/client.toml in $XDG_CONFIG_HOME or ~/.config. It has the same settings, but no
token.
"""

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypedDict, cast

import grpc

from genserve.errors import InvalidFieldError
from genserve.net import DEFAULT_TARGET
from genserve.security.caller import Caller, TokenError
from genserve.security.files import CallerFiles, CertificateError, read_bounded
from genserve.transport.fields import refuse_unknown
from genserve.transport.timeouts import Timeouts

TLS_SETTINGS: Final = ("tls", "ca_file", "cert_file", "key_file", "server_name")
CONFIG_VARIABLE: Final = "GENSERVE_CONFIG"
_MAX_CONFIG_BYTES: Final = 64 << 10
_TEXTS: Final = ("target", "token_file", "ca_file", "cert_file", "key_file", "server_name")
_SWITCHES: Final = ("tls", "allow_insecure")
_OF_TLS: Final = ("credentials", *TLS_SETTINGS)
_WORDS: Final[Mapping[str, bool]] = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


class ConnectionSettings(TypedDict, total=False):
    """How to reach the daemon; keyword arguments of `AsyncClient` and `Client`. What is not given comes from the
    environment or from the configuration file, as docs/security.md says."""

    credentials: grpc.ChannelCredentials | None
    """TLS credentials, from `grpc.ssl_channel_credentials`, instead of the files below."""
    tls: bool
    """TLS with the system's root certificates."""
    ca_file: str
    """PEM file with the certificate authorities of the daemon, instead of the system's; implies TLS."""
    cert_file: str
    """PEM file with the client's own certificate and its chain, for a daemon that requires one; implies TLS."""
    key_file: str
    """PEM file with its key, unless `cert_file` has it."""
    server_name: str
    """Name that the daemon's certificate has, if it is not the host in the address."""
    token: str | None
    """Bearer token, sent with every call."""
    token_file: str
    """File that holds the token alone. It is read again when it changes."""
    allow_insecure: bool
    """Send the token to another host without TLS, too."""
    metadata: Mapping[str, str]
    """Further metadata, sent with every call."""
    timeouts: Timeouts
    """Limits of calls without a `timeout_s`."""
    options: Sequence[tuple[str, str | int]]
    """Channel options of gRPC, which override those set here."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Where a daemon is, and how it is called."""

    target: str
    caller: Caller


def target_of(target: str | None, environment: Mapping[str, str] = os.environ, default: str = DEFAULT_TARGET) -> str:
    """Where the daemon is: `target`, what the environment or the file says, or `default`."""
    said = (target, _of_environment(environment).get("target"), _of_file(environment).get("target"))
    return next((each for each in said if each is not None), default)


def reach(target: str | None, settings: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Reach:
    """What settings, environment and file say together. Of TLS, and of the token, the first that says anything decides
    alone. Raises InvalidFieldError naming what is wrong."""
    refuse_unknown(settings, ConnectionSettings)
    if not isinstance(target, str | None):
        raise InvalidFieldError.of(
            "target", f"must be a text such as {DEFAULT_TARGET}, and not {type(target).__name__}"
        )
    where = target_of(target, environment)
    sources = _sources(where, settings, environment)
    tls = _first_with(_OF_TLS, *sources)
    tokens = _first_with(("token", "token_file"), *sources)
    insecure = _first_with(("allow_insecure",), *sources)
    for name, kind in (*((name, str) for name in (*_TEXTS, "token")), *((name, bool) for name in _SWITCHES)):
        value = {**tls, **tokens, **insecure}.get(name)
        if value is not None and not isinstance(value, kind):
            raise InvalidFieldError.of(name, f"must be a {kind.__name__}, and not {type(value).__name__}")
    try:
        files = CallerFiles(
            tls=bool(tls.get("tls", False)),
            token_file=tokens.get("token_file", "") if not tokens.get("token") else "",
            allow_insecure=bool(insecure.get("allow_insecure", False)),
            **{name: tls.get(name, "") for name in TLS_SETTINGS if name != "tls"},
        )
        caller = Caller(files, credentials=tls.get("credentials"), token=tokens.get("token", ""))
        caller.check_address(where)
    except TokenError as error:
        raise InvalidFieldError.of("token", str(error)) from None
    except CertificateError as error:
        raise InvalidFieldError.of(_named_by(str(error), tls), str(error)) from None
    return Reach(where, caller)


def tls_of(target: str, settings: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> ConnectionSettings:
    """What is said of TLS to this address, by the first of settings, environment and file that says anything."""
    return cast("ConnectionSettings", _first_with(_OF_TLS, *_sources(target, settings, environment)))


def _sources(target: str, settings: Mapping[str, Any], environment: Mapping[str, str]) -> Sequence[Mapping[str, Any]]:
    """The first has precedence."""
    named = {name: value for name, value in settings.items() if value is not None}
    ours, theirs = _of_environment(environment), _of_file(environment)
    is_for_it = theirs.get("target", target) == target  # what the file has for its own target is for no other
    return named, ours, theirs if is_for_it else {}


def _named_by(message: str, tls: Mapping[str, Any]) -> str:
    """The setting whose file alone a message about certificates is about."""
    files = {name: tls[name] for name in ("ca_file", "cert_file", "key_file") if name in tls}
    about = (name for name, path in files.items() if message.startswith((f"{path}: ", f"{path} is ")))
    return next(about, "credentials")


def _first_with(names: Sequence[str], *sources: Mapping[str, Any]) -> Mapping[str, Any]:
    for source in sources:
        if found := {name: source[name] for name in names if source.get(name) is not None}:
            return found
    return {}


def _of_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in (*_TEXTS, "token", *_SWITCHES):
        variable = f"GENSERVE_{name.upper()}"
        text = environment.get(variable, "")
        if not text:
            continue
        if name not in _SWITCHES:
            found[name] = text
        elif (value := _WORDS.get(text.lower())) is None:
            raise InvalidFieldError.of(f"${variable}", f"must be 1 or 0, is {text!r}")
        else:
            found[name] = value
    return found


def _of_file(environment: Mapping[str, str]) -> dict[str, Any]:
    named = environment.get(CONFIG_VARIABLE)
    directory = environment.get("XDG_CONFIG_HOME") or os.path.join(environment.get("HOME", "/nonexistent"), ".config")
    path = Path(named) if named else Path(directory) / "genserve" / "client.toml"
    if named == "" or (named is None and not path.is_file()):
        return {}
    try:
        document = tomllib.loads(read_bounded(str(path), _MAX_CONFIG_BYTES).decode())
    except OSError as error:
        raise InvalidFieldError.of(str(path), error.strerror or str(error)) from None
    except ValueError as error:
        raise InvalidFieldError.of(str(path), f"is not valid: {error}") from None
    for key, value in document.items():
        kind = str if key in _TEXTS else bool if key in _SWITCHES else None
        if kind is None:
            raise InvalidFieldError.of(str(path), f"unknown key {key!r}, known are {', '.join((*_TEXTS, *_SWITCHES))}")
        if not isinstance(value, kind):
            raise InvalidFieldError.of(str(path), f"{key} must be a {kind.__name__}, and not {type(value).__name__}")
    base = path.parent
    return {k: str(base / v) if k.endswith("_file") else v for k, v in document.items()}
