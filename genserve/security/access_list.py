"""The callers as they are listed now: the file is read again when it changes."""

import os
import stat
import time
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass

from genserve.observe.notices import say
from genserve.security.access import (
    MAX_LIST_BYTES,
    NOBODY,
    TOKENS_VARIABLE,
    Access,
    AccessError,
    Principal,
    parse_environment,
    parse_file,
)
from genserve.security.files import WatchedContent, read_bounded


@dataclass(frozen=True, slots=True)
class AccessSource:
    """Where the callers are listed: a file ("" = none), and what the environment has listed."""

    path: str = ""
    environment: Access = NOBODY

    @property
    def is_empty(self) -> bool:
        """Whether nothing is listed: everybody may do everything then."""
        return not self.path and self.environment == NOBODY


class AccessList:
    """The callers of `source`. A file that becomes invalid or disappears changes nothing: what it said before
    holds, and stderr says why."""

    def __init__(self, source: AccessSource) -> None:
        """Raises AccessError naming the file."""
        self._path = source.path
        self._listed = WatchedContent([source.path], lambda: _read(source), "The callers that it listed before stay")

    def of_token(self, token: str) -> Principal | None:
        """The caller with this token."""
        return self._current().of_token(token, time.time())

    def of_certificate(self, sans: Iterable[str]) -> Principal | None:
        """The caller with a certificate for these subject alternative names."""
        return self._current().of_certificate(sans)

    @property
    def num_tokens(self) -> int:
        """Tokens that are listed."""
        return len(self._current().tokens)

    @property
    def num_certificates(self) -> int:
        """Certificates that are listed."""
        return len(self._current().certificates)

    @property
    def has_certificates(self) -> bool:
        """Whether certificates are listed."""
        return bool(self._current().certificates)

    def _current(self) -> Access:
        is_new, access = self._listed.refresh(), self._listed.content
        if is_new:
            say(f"{self._path} has changed: {len(access.tokens)} tokens, {len(access.certificates)} certificates")
        return access


def take_environment(environment: MutableMapping[str, str] = os.environ) -> Access:
    """The callers that the environment lists. Removes the variable, so that no process that starts later inherits it.
    Raises AccessError."""
    listed = listed_environment(environment)
    environment.pop(TOKENS_VARIABLE, None)
    return listed


def listed_environment(environment: Mapping[str, str] = os.environ) -> Access:
    """The callers that the environment lists. Raises AccessError."""
    try:
        return parse_environment(environment.get(TOKENS_VARIABLE, ""))
    except AccessError as error:
        raise AccessError(f"${TOKENS_VARIABLE}: {error}") from None


def _read(source: AccessSource) -> Access:
    if not source.path:
        return source.environment
    try:
        if os.stat(source.path).st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise AccessError("others can write to it, who could give themselves any role: chmod go-w")
        return parse_file(read_bounded(source.path, MAX_LIST_BYTES)).joined(source.environment)
    except OSError as error:
        raise AccessError(f"--auth-file {source.path}: {error.strerror or error}") from None
    except ValueError as error:
        raise AccessError(f"--auth-file {source.path}: {error}") from None


def open_access_list(source: AccessSource) -> AccessList | None:
    """The callers; None if nobody is listed: everybody may do everything then. Raises AccessError."""
    return None if source.is_empty else AccessList(source)
