"""The files that connections need: their paths. Pure: nothing is read."""

from dataclasses import dataclass
from typing import Final


class CertificateError(ValueError):
    """A certificate, a key, or both together are invalid. The message names the flags."""


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Paths of PEM files. `certfile` has the certificate with its chain, and the key, too, if there is no `keyfile`.
    `ca_certs` has the authorities of clients; with `requires_clients`, a client without a certificate of theirs cannot
    connect."""

    certfile: str
    keyfile: str = ""
    ca_certs: str = ""
    requires_clients: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(path for path in (self.certfile, self.keyfile, self.ca_certs) if path)


@dataclass(frozen=True, slots=True)
class CallerFiles:
    """Paths, "" = none. `ca_file`: the authorities of servers, instead of those of the system; `cert_file`: our own
    certificate with its chain, and its key if there is no `key_file`; `token_file`: holds the token alone.
    `server_name`: what the certificate of a server must name, if that is not the host in its address. `tls`: whether
    to use TLS; the files of certificates imply it. `allow_insecure`: send the token unencrypted, too."""

    tls: bool = False
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    server_name: str = ""
    token_file: str = ""
    allow_insecure: bool = False

    def __post_init__(self) -> None:
        if self.key_file and not self.cert_file:
            raise CertificateError(f"{self.key_file} is the key of no certificate: name its certificate, too")

    @property
    def uses_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.tls or bool(self.ca_file or self.cert_file)

    @property
    def certificate_paths(self) -> tuple[str, ...]:
        """The files that a connection needs."""
        return tuple(path for path in (self.ca_file, self.cert_file, self.key_file) if path)


PLAINTEXT: Final = CallerFiles()
