"""Ways around the list of callers, and what goes wrong around it."""

import argparse
from pathlib import Path

import pytest

from genserve.config import ServeConfig
from genserve.security.access_list import AccessSource, open_access_list, take_environment
from tests.support.credentials import Authority


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
