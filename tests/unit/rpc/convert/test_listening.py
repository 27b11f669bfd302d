"""What is told of the ports, as the flags say."""

from typing import Any

import pytest

from genserve.fleet.config import RouteConfig
from genserve.rpc.convert.listening import ListeningFacts
from genserve.settings.config import ServeConfig
from genserve.settings.listen_config import ListenConfig


def test_the_limits_of_the_flags_are_reported() -> None:
    """Each under its own name."""
    config = ServeConfig(
        max_connections=11,
        max_streams=12,
        max_metadata_bytes=13,
        max_request_rates="trainer=2.5,generate=400",
        environment_lists_callers=True,
    )
    facts = ListeningFacts.of(config, 14.5)
    assert (facts.max_connections, facts.max_streams, facts.max_metadata_bytes) == (11, 12, 13)
    assert facts.request_rates == {"trainer": 2.5, "generate": 400.0}
    assert facts.write_timeout_s == 14.5


@pytest.mark.parametrize("kind", [ServeConfig, RouteConfig])
@pytest.mark.parametrize(
    ("settings", "protection"),
    [
        ({}, (False, False, False)),
        ({"ssl_certfile": "a"}, (True, False, False)),
        ({"ssl_certfile": "a", "ssl_ca_certs": "b"}, (True, True, False)),
        ({"ssl_certfile": "a", "ssl_ca_certs": "b", "ssl_cert_reqs": 0}, (True, False, False)),
        ({"auth_file": "c"}, (False, False, True)),
        ({"environment_lists_callers": True}, (False, False, True)),
    ],
)
def test_what_protects_the_ports_is_reported(
    kind: type[ListenConfig], settings: dict[str, Any], protection: tuple[bool, bool, bool]
) -> None:
    """TLS, whether clients need a certificate, and whether callers are listed."""
    facts = ListeningFacts.of(kind(**settings), 0)
    assert (facts.has_tls, facts.requires_certificates, facts.has_roles) == protection
