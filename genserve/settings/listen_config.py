"""Where a daemon or a router listens, who may call it, and how much: settings that both have."""

import ssl
from dataclasses import dataclass
from typing import Final

from genserve.net import is_loopback
from genserve.observe.log_lines import FORMATS, TEXT
from genserve.security.files import CallerFiles, CertificateFiles
from genserve.security.roles import OPENABLE, ROLE_NAMES, Role
from genserve.settings.flags import flag_of, setting

MAX_RATE: Final = 1_000_000.0
PEER_TLS: Final = ("auto", "on", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenConfig:
    """The flags that `genserve serve`, `genserve route` and `genserve up` share."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(50051, "TCP port to listen on; 0 picks a free one, -1 listens only on --uds")
    uds: str = setting("", "path of a Unix socket to listen on in addition, which only this user can open")
    allow_insecure: bool = setting(
        False, "listen on an address that others can reach, without TLS or without authentication"
    )
    metrics_port: int = setting(
        -1, "TCP port, at --host, at which Prometheus scrapes /metrics over HTTP; 0 picks a free one, -1 = none"
    )
    log_format: str = setting(
        TEXT, "what lines on stderr are: text for people, or one JSON object on each for programs", FORMATS
    )
    channelz: bool = setting(False, "serve grpc.channelz.v1, too: connections with their peers and counters")
    ssl_certfile: str = setting(
        "", "PEM file with the certificate and its chain, for TLS on all ports. Read again when it changes"
    )
    ssl_keyfile: str = setting("", "PEM file with the key of the certificate, if --ssl-certfile does not have it")
    ssl_ca_certs: str = setting(
        "",
        "PEM file with certificate authorities: clients must present a certificate of theirs (mTLS), and so must the "
        "daemons that this one calls",
    )
    ssl_cert_reqs: int = setting(
        -1,
        "whether clients must present a certificate: 2 = yes, 0 = no, -1 = if --ssl-ca-certs names their authorities",
    )
    auth_file: str = setting(
        "",
        "TOML file with the callers and their roles, by token or certificate; genserve token makes entries. "
        "$GENSERVE_AUTH_TOKENS can list tokens, too. Without either, everybody who connects may do everything",
    )
    open_services: str = setting(
        "health,reflection", f"services that need no token: {', '.join(OPENABLE)}, separated by commas, or none"
    )
    peer_tls: str = setting(
        "auto", "TLS to other daemons, such as replicas; auto = if this one has a certificate itself", PEER_TLS
    )
    peer_name: str = setting(
        "", "name that the certificates of other daemons have, if it is not the host in their address"
    )
    peer_token_file: str = setting("", "file with the token that goes with calls to other daemons")
    max_connections: int = setting(4096, "limit of connections to a port; more are closed at once")
    max_streams: int = setting(
        16384, "limit of running calls on one connection; a client waits with more until one has ended"
    )
    max_message_bytes: int = setting(64 << 20, "limit of the size of a message, in bytes")
    max_metadata_bytes: int = setting(16 << 10, "limit of the metadata of a call, in bytes")
    max_request_rates: str = setting(
        "",
        "limit of calls per second for all callers of a role together, such as generate=2000,trainer=100; a role that "
        "is not named has none",
    )

    environment_lists_callers: bool = False
    """Whether $GENSERVE_AUTH_TOKENS lists callers, too. It is not a flag."""

    def __post_init__(self) -> None:
        if not -1 <= self.port <= 65535:
            raise ValueError(f"--port must be in [-1, 65535], is {self.port}")
        if self.port == -1 and not self.uds:
            raise ValueError("--port -1 listens only on a Unix socket: pass --uds too")
        if not -1 <= self.metrics_port <= 65535:
            raise ValueError(f"--metrics-port must be in [-1, 65535], is {self.metrics_port}")
        if self.metrics_port > 0 and self.metrics_port == self.port:
            raise ValueError(f"--metrics-port must not be the port of gRPC (--port), is {self.metrics_port} too")
        if self.log_format not in FORMATS:
            raise ValueError(f"--log-format must be one of {', '.join(FORMATS)}, is {self.log_format!r}")
        for name in ("max_connections", "max_streams", "max_message_bytes", "max_metadata_bytes"):
            if not 1 <= getattr(self, name) < 1 << 31:
                raise ValueError(f"{flag_of(name)} must be in [1, {(1 << 31) - 1}], is {getattr(self, name)}")
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(self, name) and not self.ssl_certfile:
                raise ValueError(f"{flag_of(name)} needs --ssl-certfile")
        if self.ssl_cert_reqs not in (-1, ssl.CERT_NONE, ssl.CERT_REQUIRED):
            raise ValueError(f"--ssl-cert-reqs must be 0, 2 or -1, is {self.ssl_cert_reqs}")
        if self.ssl_cert_reqs == ssl.CERT_REQUIRED and not self.ssl_ca_certs:
            raise ValueError("--ssl-cert-reqs 2 needs --ssl-ca-certs")
        if self.peer_tls not in PEER_TLS:
            raise ValueError(f"--peer-tls must be one of {', '.join(PEER_TLS)}, is {self.peer_tls!r}")
        if unknown := set(self.open_service_names) - set(OPENABLE):
            known = ", ".join(OPENABLE)
            raise ValueError(f"--open-services: {', '.join(sorted(unknown))} is none of {known}, none")
        self._check_rates()
        self._check_reachable()

    @property
    def open_service_names(self) -> tuple[str, ...]:
        """The names in --open-services."""
        names = tuple(name.strip() for name in self.open_services.split(",") if name.strip())
        return () if names == ("none",) else names

    @property
    def rates(self) -> dict[Role, float]:
        """Calls per second of the roles that have a limit."""
        return {Role(role): float(rate) for role, rate in self._rate_parts()}

    @property
    def certificate(self) -> CertificateFiles | None:
        """What the ports need for TLS; None = no TLS."""
        if not self.ssl_certfile:
            return None
        requires = self.ssl_cert_reqs == ssl.CERT_REQUIRED or (self.ssl_cert_reqs == -1 and bool(self.ssl_ca_certs))
        return CertificateFiles(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs, requires)

    @property
    def lists_callers(self) -> bool:
        """Whether callers are listed with their roles."""
        return bool(self.auth_file) or self.environment_lists_callers

    @property
    def peers(self) -> CallerFiles:
        """How this process calls other daemons."""
        if self.peer_tls == "off" or (self.peer_tls == "auto" and not self.ssl_certfile):
            return CallerFiles(token_file=self.peer_token_file, allow_insecure=self.allow_insecure)
        return CallerFiles(
            tls=True,
            ca_file=self.ssl_ca_certs,
            cert_file=self.ssl_certfile if self.ssl_ca_certs else "",
            key_file=self.ssl_keyfile if self.ssl_ca_certs else "",
            server_name=self.peer_name,
            token_file=self.peer_token_file,
        )

    @property
    def listens_on_tcp(self) -> bool:
        """Whether there is a port, and not only a Unix socket."""
        return (self.port, self.metrics_port) != (-1, -1)

    @property
    def may_be_reached(self) -> bool:
        """Whether other hosts may reach it: it is protected, or need not be."""
        return self.allow_insecure or (self.certificate is not None and self._knows_callers)

    @property
    def _knows_callers(self) -> bool:
        certificate = self.certificate
        requires_clients = certificate is not None and certificate.requires_clients
        return self.lists_callers or requires_clients

    def _check_reachable(self) -> None:
        if not self.listens_on_tcp or self.may_be_reached or is_loopback(self.host):
            return
        if self.certificate is None:
            raise ValueError(
                f"--host {self.host} can be reached from other hosts, without encryption: pass --ssl-certfile and "
                "--auth-file, listen on 127.0.0.1 or --uds, or pass --allow-insecure"
            )
        raise ValueError(
            f"--host {self.host} can be reached from other hosts, without authentication: pass --auth-file or "
            "--ssl-ca-certs, or --allow-insecure"
        )

    def _rate_parts(self) -> list[tuple[str, str]]:
        parts = [part.partition("=") for part in self.max_request_rates.split(",") if part.strip()]
        return [(role.strip(), rate.strip()) for role, _, rate in parts]

    def _check_rates(self) -> None:
        for role, rate in self._rate_parts():
            if role not in ROLE_NAMES:
                raise ValueError(f"--max-request-rates: {role!r} is none of the roles {', '.join(ROLE_NAMES)}")
            try:
                calls_per_s = float(rate)
            except ValueError:
                calls_per_s = 0.0
            if not 0 < calls_per_s <= MAX_RATE:
                raise ValueError(
                    f"--max-request-rates: {role} must have calls per second in (0, {MAX_RATE:g}], has {rate!r}"
                )
        if self._rate_parts() and not self.lists_callers:
            raise ValueError("--max-request-rates needs --auth-file: without callers there are no roles")
