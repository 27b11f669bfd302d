"""Where a client finds its daemon, its token and its certificates."""

from pathlib import Path

import pytest

from genserve.errors import InvalidFieldError
from genserve.net import DEFAULT_TARGET
from genserve.transport.settings import reach, target_of
from tests.support.credentials import Authority
from tests.support.refusals import refuses


def environment(directory: Path, config: str | None = None, **variables: str) -> dict[str, str]:
    """Variables, and the content of the file of the user."""
    path = directory / "genserve" / "client.toml"
    path.parent.mkdir(exist_ok=True)
    if config is not None:
        path.write_text(config)
    return {"XDG_CONFIG_HOME": str(directory), **variables}


def test_target_is_from_the_caller_then_environment_then_file(tmp_path: Path) -> None:
    of_file = environment(tmp_path, 'target = "file:1"')
    of_both = {**of_file, "GENSERVE_TARGET": "environment:1"}
    assert target_of("caller:1", of_both) == "caller:1"
    assert target_of(None, of_both) == "environment:1"
    assert target_of(None, of_file) == "file:1"
    assert target_of(None, {}) == DEFAULT_TARGET
    assert target_of(None, {}, default="other:1") == "other:1"


def test_first_source_of_a_token_wins(tmp_path: Path) -> None:
    (tmp_path / "mine.token").write_text("of-a-file\n")
    (tmp_path / "genserve").mkdir()
    (tmp_path / "genserve" / "beside.token").write_text("of-the-configuration\r\n")
    of_file = environment(tmp_path, 'token_file = "beside.token"')
    of_both = {**of_file, "GENSERVE_TOKEN": "of-the-environment"}
    assert reach(None, {"token": "of-the-caller"}, of_both).caller.token == "of-the-caller"
    assert reach(None, {"token_file": str(tmp_path / "mine.token")}, of_both).caller.token == "of-a-file"
    assert reach(None, {}, of_both).caller.token == "of-the-environment"
    assert reach(None, {}, of_file).caller.token == "of-the-configuration"
    assert reach(None, {}, {}).caller.metadata == ()


def test_what_the_file_has_for_its_target_is_for_no_other(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    config = environment(tmp_path, f'target = "unix:/run/mine"\ntoken_file = "{tmp_path / "token"}"')
    assert reach(None, {}, config).caller.token == "secret"
    assert reach("unix:/run/mine", {}, config).caller.token == "secret"
    assert reach("unix:/run/other", {}, config).caller.token == ""


@pytest.mark.parametrize("target", ["10.0.0.1:50051", "dns:///example.org:1", "[2001:db8::1]:1", "localhost.example:1"])
def test_a_token_does_not_leave_the_host_unencrypted(target: str, tmp_path: Path) -> None:
    with refuses(InvalidFieldError, field="token") as raised:
        reach(target, {"token": "secret"}, {})
    assert "secret" not in str(raised.value)
    reach(target, {"token": "secret", "allow_insecure": True}, {})
    reach(target, {"token": "secret", "tls": True}, {})
    reach(target, {"token": "secret"}, {"GENSERVE_CA_FILE": Authority(tmp_path).ca_file})


@pytest.mark.parametrize("target", [DEFAULT_TARGET, "localhost:1", "[::1]:1", "unix:/run/x", "dns:///localhost:1"])
def test_on_this_host_it_may(target: str) -> None:
    assert reach(target, {"token": "secret"}, {}).caller.metadata == (("authorization", "Bearer secret"),)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"ca_file": "missing.pem"}, "ca_file"),
        ({"cert_file": "missing.pem"}, "cert_file"),
        ({"key_file": "missing.pem"}, "key_file"),
        ({"token_file": "missing"}, "token"),
        ({"ca_file": 1}, "ca_file"),
        ({"tls": "yes"}, "tls"),
        ({"token": 1}, "token"),
        ({"token": "a\nb"}, "token"),
    ],
)
def test_what_is_wrong_is_named(settings: dict[str, object], field: str) -> None:
    with refuses(InvalidFieldError, field=field):
        reach(None, settings, {})


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("target", "client.toml"),
        ('token = "x"', "'token'"),
        ("target = 1", "target"),
        ('tls = "x"', "tls"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path: Path, config: str, says: str) -> None:
    with refuses(InvalidFieldError, says=says) as raised:
        reach(None, {}, environment(tmp_path, config))
    assert "client.toml" in raised.value.message


def test_a_file_that_is_named_must_be_there(tmp_path: Path) -> None:
    with refuses(InvalidFieldError, says="missing.toml"):
        reach(None, {}, {"GENSERVE_CONFIG": str(tmp_path / "missing.toml")})
    assert reach(None, {}, {"GENSERVE_CONFIG": ""}).target == DEFAULT_TARGET


def test_a_variable_that_is_wrong_is_named() -> None:
    with refuses(InvalidFieldError, says="GENSERVE_TLS"):
        reach(None, {}, {"GENSERVE_TLS": "maybe"})


def test_a_setting_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match="tokn"):
        reach(None, {"tokn": "x"}, {})


@pytest.mark.parametrize(("word", "allows"), [("1", True), ("true", True), ("yes", True), ("No", False), ("0", False)])
def test_a_switch_is_a_word(word: str, allows: bool) -> None:
    """A token goes over an open connection to another host only where that is allowed."""
    variables = {"GENSERVE_ALLOW_INSECURE": word, "GENSERVE_TOKEN": "t" * 40}
    if allows:
        assert reach("gpu-7:50051", {}, variables).target == "gpu-7:50051"
    else:
        with refuses(InvalidFieldError):
            reach("gpu-7:50051", {}, variables)
