"""How this process calls a daemon or a router: TLS, and the token that goes with every call."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import grpc
import grpc.aio

from genserve.net import is_local, is_socket
from genserve.security.access import TOKEN
from genserve.security.certificates import check_own, read_pem
from genserve.security.files import PLAINTEXT, CallerFiles, WatchedContent, read_bounded

_MAX_TOKEN_FILE_BYTES: Final = 8 << 10
_ASK_FOR_TLS: Final = ("tls", "ca_file", "cert_file")

Options = Sequence[tuple[str, str | int]]


class TokenError(ValueError):
    """A token cannot be used. The message names where it comes from, and does not contain it."""


@dataclass(frozen=True, slots=True)
class _Certificates:
    """What the files of a caller hold; None = no file."""

    roots: bytes | None
    key: bytes | None
    chain: bytes | None

    @classmethod
    def read(cls, files: CallerFiles) -> Self:
        """Raises CertificateError unless connections can be made with them."""
        check_own(files.ca_file, files.cert_file, files.key_file)
        return cls(
            read_pem(files.ca_file) if files.ca_file else None,
            read_pem(files.key_file or files.cert_file) if files.cert_file else None,
            read_pem(files.cert_file) if files.cert_file else None,
        )


class TokenFile:
    """The token that a file holds, read again when it changes."""

    def __init__(self, path: str) -> None:
        """Raises TokenError."""
        self._path = path
        self._token = WatchedContent([path], self._read, "The token of before stays")

    @property
    def token(self) -> str:
        """The token. A file that has become invalid changes nothing, and stderr says why."""
        self._token.refresh()
        return self._token.content

    def _read(self) -> str:
        try:
            content = read_bounded(self._path, _MAX_TOKEN_FILE_BYTES)
        except OSError as error:
            raise TokenError(f"the token file {self._path}: {error.strerror or error}") from None
        except ValueError as error:
            raise TokenError(f"the token file {error}") from None
        text = content.decode("latin-1").strip()
        if not TOKEN.fullmatch(text):
            raise TokenError(f"the token file {self._path} must hold one token: printable ASCII without spaces")
        return text


class Caller:
    """Opens channels, and knows the token that goes with every call. Channels to Unix sockets are not encrypted."""

    def __init__(
        self, files: CallerFiles = PLAINTEXT, *, credentials: grpc.ChannelCredentials | None = None, token: str = ""
    ) -> None:
        """`credentials` instead of the files of certificates, and `token` instead of its file. Creates nothing of gRPC.
        Raises CertificateError and TokenError."""
        self._files = files
        self._credentials = credentials
        self._token = TokenFile(files.token_file) if files.token_file and not token else None
        self._fixed_token = token
        if token and not TOKEN.fullmatch(token):
            raise TokenError("must be printable ASCII without spaces")
        self._certificates = WatchedContent(
            files.certificate_paths, lambda: _Certificates.read(files), "The certificates of before stay"
        )
        self._certificate_number = 0

    @property
    def uses_tls(self) -> bool:
        """Whether connections to hosts are encrypted."""
        return self._credentials is not None or self._files.uses_tls

    @property
    def ask_for_tls(self) -> tuple[str, ...]:
        """The settings of a client without which connections were not encrypted."""
        asking = {"credentials": self._credentials, **{name: getattr(self._files, name) for name in _ASK_FOR_TLS}}
        return tuple(name for name, value in asking.items() if value)

    @property
    def has_certificate(self) -> bool:
        """Whether servers can ask for a certificate, as far as that is known here."""
        return self._credentials is not None or bool(self._files.cert_file)

    @property
    def token(self) -> str:
        """The token; "" = none."""
        return self._fixed_token if self._token is None else self._token.token

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call."""
        token = self.token
        return (("authorization", f"Bearer {token}"),) if token else ()

    @property
    def certificate_number(self) -> int:
        """Grows when the files of certificates change. A channel has the certificates of when it was opened, also when
        it connects anew. Files that have become invalid change nothing, and stderr says why."""
        if self._certificates.refresh():
            self._certificate_number += 1
        return self._certificate_number

    def aio_channel(self, address: str, options: Options) -> grpc.aio.Channel:
        """A channel for asyncio. Raises TokenError if the token would leave this host unencrypted."""
        credentials = self._credentials_for(address)
        options = (*options, *_options_of(self._files))
        if credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, credentials, options=options)

    def channel(self, address: str, options: Options) -> grpc.Channel:
        """The same for threads."""
        credentials = self._credentials_for(address)
        options = (*options, *_options_of(self._files))
        if credentials is None:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, credentials, options=options)

    def check_address(self, address: str) -> None:
        """Raises TokenError if the token would leave this host unencrypted."""
        if self.token and not self.uses_tls and not self._files.allow_insecure and not is_local(address):
            raise TokenError(f"would go to {address} unencrypted, where others could read it: use TLS")

    def _credentials_for(self, address: str) -> grpc.ChannelCredentials | None:
        self.check_address(address)
        if is_socket(address):
            return None
        if self._credentials is not None or not self.uses_tls:
            return self._credentials
        _ = self.certificate_number  # reads those of now
        held = self._certificates.content
        return grpc.ssl_channel_credentials(held.roots, held.key, held.chain)


def _options_of(files: CallerFiles) -> Options:
    return (("grpc.ssl_target_name_override", files.server_name),) if files.server_name else ()
