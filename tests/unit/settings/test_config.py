"""Settings that depend on the machine."""

from typing import Any

import pytest

from genserve.cli import make_parser
from genserve.cli.route import make_config
from genserve.fleet.config import RouteConfig
from genserve.settings.config import ServeConfig
from genserve.settings.flags import settings_of


@pytest.mark.parametrize(
    ("asked", "num_cores", "expected"),
    [(-1, 1, 0), (-1, 4, 0), (-1, 8, 2), (-1, 16, 4), (-1, 200, 4), (0, 64, 0), (3, 2, 3)],
)
def test_receiving_processes_are_for_machines_that_have_cores(asked: int, num_cores: int, expected: int) -> None:
    """Unless a number is asked for."""
    assert ServeConfig(ingest_processes=asked).num_ingest_processes(num_cores) == expected


def test_a_daemon_without_a_tcp_port_has_none() -> None:
    """They would open what was not asked for."""
    assert ServeConfig(port=-1, uds="/run/x").num_ingest_processes(64) == 0


def test_the_openai_port_listens_on_tcp_as_well() -> None:
    """So an address that others can reach needs consent, even if gRPC listens on a Unix socket only."""
    with pytest.raises(ValueError, match="--allow-insecure"):
        ServeConfig(host="0.0.0.0", port=-1, uds="/run/x", openai_port=8000)
    assert ServeConfig(port=-1, uds="/run/x", openai_port=8000).openai_port == 8000


@pytest.mark.parametrize(("port", "says"), [(-2, "be in"), (65536, "be in"), (50051, "not be the port of gRPC")])
def test_wrong_openai_ports_are_refused(port: int, says: str) -> None:
    """By the name of the flag."""
    with pytest.raises(ValueError, match=f"--openai-port must {says}"):
        ServeConfig(openai_port=port)


@pytest.mark.parametrize("count", [-2, 65])
def test_absurd_numbers_of_processes_are_refused(count: int) -> None:
    """By the name of the flag."""
    with pytest.raises(ValueError, match="--ingest-processes"):
        ServeConfig(ingest_processes=count)


@pytest.mark.parametrize(
    ("asked", "num_cores", "expected"),
    [(-1, 2, 0), (-1, 8, 0), (-1, 16, 2), (-1, 32, 4), (-1, 200, 4), (0, 64, 0), (1, 2, 1), (3, 2, 3)],
)
def test_front_ends_are_for_machines_that_have_cores(asked: int, num_cores: int, expected: int) -> None:
    """Unless a number is asked for. They need a port."""
    assert ServeConfig(frontends=asked).num_frontends(num_cores) == expected
    assert ServeConfig(port=-1, uds="/run/x").num_frontends(num_cores) == 0


@pytest.mark.parametrize("name", ["frontends", "ingest_processes"])
def test_processes_that_need_ports_are_refused_without_one(name: str) -> None:
    """They would silently not be there. None may be asked for."""
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(ValueError, match=f"^{flag} needs TCP ports, and --port -1 has none"):
        ServeConfig(port=-1, uds="/run/x", **{name: 1})  # type: ignore[arg-type]
    for count in (0, -1):
        ServeConfig(port=-1, uds="/run/x", **{name: count})  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [-2, 65])
def test_absurd_numbers_of_front_ends_are_refused(count: int) -> None:
    """By the name of the flag."""
    with pytest.raises(ValueError, match="--frontends"):
        ServeConfig(frontends=count)


TLS = {"ssl_certfile": "c"}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "without encryption: pass --ssl-certfile and --auth-file"),
        ({"auth_file": "a"}, "without encryption"),
        ({"environment_lists_callers": True}, "without encryption"),
        (TLS, "without authentication: pass --auth-file or --ssl-ca-certs"),
        ({**TLS, "ssl_ca_certs": "a", "ssl_cert_reqs": 0}, "without authentication"),
    ],
)
def test_what_others_can_reach_is_encrypted_and_knows_its_callers(settings: dict[str, Any], says: str) -> None:
    """Unless it is asked for by its name."""
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(ValueError, match=says):
            ServeConfig(host=host, **settings)
        with pytest.raises(ValueError, match=says):
            RouteConfig(host=host, **settings)
        ServeConfig(host=host, allow_insecure=True, **settings)
    for host in ("127.0.0.1", "::1", "localhost"):
        ServeConfig(host=host, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {**TLS, "auth_file": "a"},
        {**TLS, "ssl_ca_certs": "a"},
        {**TLS, "environment_lists_callers": True},
    ],
)
def test_what_is_protected_may_be_reached(settings: dict[str, Any]) -> None:
    assert ServeConfig(host="0.0.0.0", **settings).may_be_reached
    assert RouteConfig(host="0.0.0.0", **settings).may_be_reached


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"ssl_keyfile": "k"}, "--ssl-keyfile needs --ssl-certfile"),
        ({"ssl_ca_certs": "k"}, "--ssl-ca-certs needs --ssl-certfile"),
        ({**TLS, "ssl_cert_reqs": 1}, "--ssl-cert-reqs must be"),
        ({**TLS, "ssl_cert_reqs": 2}, "needs --ssl-ca-certs"),
        ({"open_services": "health,metrics"}, "--open-services: metrics"),
        ({"peer_tls": "maybe"}, "--peer-tls"),
        ({"max_connections": 0}, "--max-connections"),
        ({"max_streams": 1 << 31}, "--max-streams"),
        ({"max_metadata_bytes": 0}, "--max-metadata-bytes"),
        ({"max_request_rates": "admin=1"}, "'admin' is none of the roles"),
        ({"max_request_rates": "trainer"}, "trainer must have calls per second"),
        ({"max_request_rates": "trainer=nan"}, "trainer must have calls per second"),
        ({"max_request_rates": "trainer=0"}, "trainer must have calls per second"),
    ],
)
def test_wrong_settings_of_access_are_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ServeConfig(**settings)


def test_peers_are_called_as_this_one_is() -> None:
    """With TLS if it has a certificate, which it presents if clients have to."""
    assert not ServeConfig().peers.uses_tls
    assert ServeConfig(peer_tls="on").peers.uses_tls
    assert not ServeConfig(**TLS, peer_tls="off").peers.uses_tls
    assert ServeConfig(**TLS).peers.cert_file == ""
    mutual = ServeConfig(**TLS, ssl_ca_certs="a", peer_name="n", peer_token_file="t").peers
    assert (mutual.ca_file, mutual.cert_file, mutual.server_name, mutual.token_file) == ("a", "c", "n", "t")


@pytest.mark.parametrize(("listed", "is_listed"), [(None, False), ("", False), (" ", False), ("trainer:t0k3n", True)])
def test_an_empty_list_of_callers_lists_nobody(
    listed: str | None, is_listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it does not count as authentication where other hosts can connect: everybody would be let in."""
    monkeypatch.delenv("GENSERVE_AUTH_TOKENS", raising=False)
    if listed is not None:
        monkeypatch.setenv("GENSERVE_AUTH_TOKENS", listed)
    values = {each.name: each.default for each in settings_of(ServeConfig)}
    for config in (ServeConfig.from_flags(values), make_config(make_parser().parse_args(["route"]))):
        assert config.lists_callers is is_listed


def test_what_is_not_there_cannot_be_kept() -> None:
    """Both flags are named."""
    with pytest.raises(ValueError, match=r"--keep-committed.*--no-resident-weights"):
        ServeConfig(keep_committed="/d", no_resident_weights=True)
