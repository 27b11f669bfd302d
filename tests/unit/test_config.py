"""Settings that depend on the machine."""

import pytest

from genserve.config import ServeConfig


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
