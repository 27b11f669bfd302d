"""Certificates of a server: what its files hold, for gRPC, and read again when they change."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import grpc

from genserve.observe.notices import say
from genserve.security.files import CertificateError, CertificateFiles, WatchedContent, read_bounded

MAX_PEM_BYTES: Final = 1 << 20
_NOT_FOUND: Final = "no certificate with its key in PEM is there; a key in another file must be named, too"
_STAYS: Final = "The certificate of before stays"


def server_credentials(files: CertificateFiles) -> grpc.ServerCredentials:
    """What a server of gRPC needs. A connection that is made after the files have changed gets the new ones; files that
    have become invalid change nothing, and stderr says why. Raises CertificateError."""
    held = WatchedContent(files.paths, lambda: _configuration(files), _STAYS)

    def changed() -> Any:
        # Called by gRPC on a thread of its own, at each handshake. None, which its types do not have: as before.
        if not held.refresh():
            return None
        say(f"{files.certfile}: the certificate has changed")
        return held.content

    return grpc.dynamic_ssl_server_credentials(
        held.content, changed, require_client_authentication=files.requires_clients
    )


def server_context(files: CertificateFiles) -> ssl.SSLContext:
    """The same for a server of HTTP."""
    held = WatchedContent(files.paths, lambda: _context(files), _STAYS)

    def changed(connection: Any, name: str | None, context: ssl.SSLContext) -> None:
        # Called at each handshake, also of a client that names no host.
        held.refresh()
        connection.context = held.content

    first = _context(files)
    first.sni_callback = changed
    return first


def check_files(files: CertificateFiles) -> None:
    """Raises CertificateError unless the certificate is the key's, and the authorities are certificates."""
    _context(files)


def say_who_may_connect(files: CertificateFiles) -> None:
    """Says that clients need certificates, if they do: --ssl-ca-certs alone asks for them."""
    if files.requires_clients:
        say(f"clients must present a certificate of {files.ca_certs} (--ssl-cert-reqs 0 asks for none)")


def check_accepted(files: CertificateFiles) -> None:
    """Shakes hands in memory with a client that trusts the certificate itself. Raises CertificateError if it refuses it
    all the same: it has expired, is not valid yet, or is not for servers."""
    check_files(files)
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.load_cert_chain(files.certfile, files.keyfile or None, password=_refuse_password)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(files.certfile)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours, theirs = client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
    with _naming(f"--ssl-certfile {files.certfile}"):
        for side in (ours, theirs, ours):  # hello, certificate, verdict
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()


def check_own(ca_file: str, cert_file: str, key_file: str) -> None:
    """The same for a caller; "" = no file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca_file:
        with _naming(ca_file):
            context.load_verify_locations(ca_file)
    if cert_file:
        with _naming(cert_file, key_file):
            context.load_cert_chain(cert_file, key_file or None, password=_refuse_password)


def _context(files: CertificateFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with _naming(f"--ssl-certfile {files.certfile}", f"--ssl-keyfile {files.keyfile}" if files.keyfile else ""):
        context.load_cert_chain(files.certfile, files.keyfile or None, password=_refuse_password)
    if files.ca_certs:
        with _naming(f"--ssl-ca-certs {files.ca_certs}"):
            context.load_verify_locations(files.ca_certs)
    if files.requires_clients:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@contextmanager
def _naming(*files: str) -> Iterator[None]:
    """Turns what ssl raises for files into a CertificateError that names them; "" = no file."""
    named = [name for name in files if name]
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise CertificateError(f"{' and '.join(named)}: {error.verify_message}") from None
    except ssl.SSLError as error:
        raise CertificateError(f"{' and '.join(named)}: {error.reason or _NOT_FOUND}") from None
    except OSError as error:
        raise CertificateError(f"{' or '.join(named)}: {error.strerror or error}") from None
    except CertificateError:
        raise  # the key has a password
    except ValueError as error:  # a zero byte in a path
        raise CertificateError(f"{' and '.join(named)}: {error}") from None


def read_pem(path: str) -> bytes:
    """The content of a PEM file. Raises CertificateError."""
    try:
        content = read_bounded(path, MAX_PEM_BYTES)
    except OSError as error:
        raise CertificateError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise CertificateError(str(error)) from None
    if not content:  # gRPC aborts the process for an empty key, and takes the system's authorities for an empty file
        raise CertificateError(f"{path} is empty")
    return content


def _configuration(files: CertificateFiles) -> "grpc.ServerCertificateConfiguration":
    # A certificate and a key are two files: one of them may be new already.
    check_files(files)
    chain, key = read_pem(files.certfile), read_pem(files.keyfile or files.certfile)
    roots = read_pem(files.ca_certs) if files.ca_certs else None
    return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=roots)


def _refuse_password() -> str:
    raise CertificateError("a key with a password cannot be used")
