"""Facts about the ports of a daemon or a router for clients: protection and limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Self

from genserve.settings.listen_config import ListenConfig
from genserve.v1 import control_pb2
from genserve.wire.conversions import duration_of


@dataclass(frozen=True, slots=True)
class ListeningFacts:
    """`request_rates`: calls per second by role. `write_timeout_s`: 0 = none. `has_roles`: callers are listed."""

    max_connections: int = 0
    max_streams: int = 0
    max_metadata_bytes: int = 0
    request_rates: Mapping[str, float] = field(default_factory=dict)
    write_timeout_s: float = 0.0
    has_tls: bool = False
    requires_certificates: bool = False
    has_roles: bool = False

    @classmethod
    def of(cls, config: ListenConfig, write_timeout_s: float) -> Self:
        """As the flags say."""
        certificate = config.certificate
        return cls(
            max_connections=config.max_connections,
            max_streams=config.max_streams,
            max_metadata_bytes=config.max_metadata_bytes,
            request_rates={role.value: calls_per_s for role, calls_per_s in config.rates.items()},
            write_timeout_s=write_timeout_s,
            has_tls=certificate is not None,
            requires_certificates=certificate is not None and certificate.requires_clients,
            has_roles=config.lists_callers,
        )


NOWHERE: Final = ListeningFacts()
"""Of a server without ports."""


def set_listening(info: control_pb2.GetServerInfoResponse, facts: ListeningFacts) -> None:
    """Writes the facts over those in `info`."""
    limits = info.limits
    limits.max_connections = facts.max_connections
    limits.max_streams = facts.max_streams
    limits.max_metadata_bytes = facts.max_metadata_bytes
    rates = [
        control_pb2.RequestRate(role=role, calls_per_second=calls_per_s)
        for role, calls_per_s in facts.request_rates.items()
    ]
    del limits.request_rates[:]
    limits.request_rates.extend(rates)
    limits.ClearField("write_timeout")
    if facts.write_timeout_s > 0:
        limits.write_timeout.CopyFrom(duration_of(facts.write_timeout_s))
    info.protection.CopyFrom(
        control_pb2.Protection(
            tls=facts.has_tls, client_certificates_required=facts.requires_certificates, roles=facts.has_roles
        )
    )
