"""Ways around the list of callers, and what goes wrong around it."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from genserve.client import AsyncClient
from genserve.errors import InvalidFieldError
from genserve.security import files
from genserve.security.access_list import AccessSource, open_access_list, take_environment
from genserve.security.caller import Caller
from genserve.security.certificates import read_pem
from genserve.security.files import CallerFiles, CertificateError
from genserve.settings.config import ServeConfig
from tests.support.credentials import Authority, list_callers
from tests.support.scripted_daemon import serving


@pytest.mark.parametrize("listed", ["", " ", "\n"])
def test_a_variable_that_lists_nobody_does_not_open_a_daemon_to_everybody(tmp_path: Path, listed: str) -> None:
    """As where a secret that should be in it is missing."""
    parser, environment = argparse.ArgumentParser(), {"GENSERVE_AUTH_TOKENS": listed}
    ServeConfig.add_flags(parser)
    certificate = Authority(tmp_path).issue("127.0.0.1")
    flags = [f"--ssl-certfile={certificate.cert_file}", f"--ssl-keyfile={certificate.key_file}"]
    with pytest.raises(ValueError, match="without authentication"):
        ServeConfig.from_flags(vars(parser.parse_args(["--host=0.0.0.0", *flags])), environment)
    local = ServeConfig.from_flags(vars(parser.parse_args(flags)), environment)
    assert not local.environment_lists_callers
    assert open_access_list(AccessSource(local.auth_file, take_environment(environment))) is None
    named = {"GENSERVE_AUTH_TOKENS": "trainer:a-token-of-some-length"}
    assert ServeConfig.from_flags(vars(parser.parse_args(["--host=0.0.0.0", *flags])), named).may_be_reached


def broken(key_file: Path, other: Path) -> Iterator[None]:
    """A key in each state in which a client may find it."""
    whole = key_file.read_bytes()
    for part in (b"", whole[: len(whole) // 2], other.read_bytes()):
        key_file.write_bytes(part)
        yield
    key_file.unlink()
    yield


async def test_half_written_credential_files_do_not_end_a_clients_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It calls with the certificate of before, until both files are there."""
    monkeypatch.setattr(files, "LOOK_EVERY_S", 0.0)
    authority, callers = Authority(tmp_path), list_callers(tmp_path, {"before": ["generate"], "after": ["operator"]})
    server, pair = authority.issue("127.0.0.1"), authority.issue("before")
    config = ServeConfig(
        port=0,
        ssl_certfile=server.cert_file,
        ssl_keyfile=server.key_file,
        ssl_ca_certs=authority.ca_file,
        auth_file=callers.auth_file,
    )
    own = {"ca_file": authority.ca_file, "cert_file": pair.cert_file, "key_file": pair.key_file}
    async with serving(config) as daemon, AsyncClient(daemon.address, **own) as client:  # type: ignore[arg-type]
        watching = client.watch_status(interval_s=0.1)
        await anext(watching)
        for _ in broken(Path(pair.key_file), Path(server.key_file)):
            for _ in range(5):
                await client.status(timeout_s=30.0)
        authority.issue("after", into=pair)
        await client.resume((await client.pause(ttl_s=60.0)).lease.lease_id)
        await anext(watching)
        await watching.aclose()


def test_a_limit_for_roles_that_nobody_has_is_refused() -> None:
    """It would limit nothing."""
    with pytest.raises(ValueError, match="--auth-file"):
        ServeConfig(max_request_rates="generate=5")
    ServeConfig(max_request_rates="generate=5", environment_lists_callers=True)


def test_a_token_that_would_leave_this_host_unencrypted_is_named() -> None:
    with pytest.raises(InvalidFieldError) as refused:
        AsyncClient("daemon.example:50051", token="a-token-of-some-length")
    assert [each.field for each in refused.value.violations] == ["token"]
    assert "a-token-of-some-length" not in str(refused.value)


def test_an_empty_file_is_no_certificate_no_key_and_no_authority(tmp_path: Path) -> None:
    """gRPC would end the process, or trust the authorities of the system."""
    pair, empty = Authority(tmp_path).issue("client"), tmp_path / "empty"
    empty.touch()
    for unusable in (
        CallerFiles(ca_file=str(empty)),
        CallerFiles(cert_file=str(empty)),
        CallerFiles(cert_file=pair.cert_file, key_file=str(empty)),
    ):
        with pytest.raises(CertificateError, match="empty"):
            Caller(unusable)
    with pytest.raises(CertificateError, match="is empty"):
        read_pem(str(empty))
