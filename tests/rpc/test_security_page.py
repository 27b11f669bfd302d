"""docs/security.md and SECURITY.md: their examples run, and their tables are those of the code."""

import ast
import asyncio
import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from genserve.cli import make_parser
from genserve.cli.serve import check_flags
from genserve.fleet.config import RouteConfig
from genserve.rpc.reflection import MAX_STREAMS
from genserve.rpc.watchers import MAX_WATCHERS, budgets
from genserve.security.access import parse_file
from genserve.security.roles import FIELDS, METHODS, Role
from genserve.settings.config import ServeConfig
from genserve.settings.flags import flag_of, settings_of
from genserve.settings.listen_config import ListenConfig
from genserve.transport.settings import ConnectionSettings
from tests.support.scripted_daemon import Daemon, serving

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
THREATS = (ROOT / "SECURITY.md").read_text()
BIN = Path(sys.executable).parent
WRITTEN_ADDRESS = "gpu1.example.org:50051"


def blocks(language: str) -> list[str]:
    """The examples that are executed."""
    return re.findall(rf"test_security_page.py -->\n```{language}\n(.*?)```", PAGE, re.DOTALL)


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading."""
    text = re.split(r"\n## ", PAGE.split(f"\n## {heading}\n")[1])[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def run(command: str, directory: Path) -> str:
    """What a command of the page says."""
    environment = {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HOME": str(directory)}
    done = subprocess.run(
        ["bash", "-euc", command],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
async def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Daemon]:
    """As the quick start makes it, at a free port of 127.0.0.1."""
    preparation, serve = blocks("sh")[0].split("\ngenserve serve ")
    run(preparation, tmp_path)
    monkeypatch.chdir(tmp_path)
    config = check_flags(serve.split(), "genserve serve")
    assert config is not None and config.host == "0.0.0.0"
    async with serving(dataclasses.replace(config, host="127.0.0.1", port=0)) as started:
        yield started


@pytest.mark.slow
async def test_the_quick_start(daemon: Daemon, tmp_path: Path) -> None:
    """From the terminal, from Python and with grpcurl."""
    status, grpcurl = (each.replace(WRITTEN_ADDRESS, daemon.address) for each in blocks("sh")[1:])
    program = f"{sys.executable} - <<'END'\n{blocks('python')[0].replace(WRITTEN_ADDRESS, daemon.address)}END"
    for command, says in ((status, "running"), (program, "0"), (grpcurl, "PHASE_RUNNING")):
        assert says in await run_beside(command, tmp_path)


async def run_beside(command: str, directory: Path) -> str:
    """While the daemon serves in this thread."""
    return await asyncio.to_thread(run, command, directory)


def test_the_example_of_a_list_is_valid() -> None:
    """With everything that an entry can have."""
    access = parse_file(blocks("toml")[0].encode())
    assert access.tokens[0].expires_s is not None
    assert access.of_certificate(["one.workers.example.org"]) is not None


def test_the_table_of_roles_is_that_of_the_code() -> None:
    """Method by method, and the fields that not all who may call a method may set."""
    told: dict[str, set[Role]] = {}
    told_of_fields: dict[str, dict[str, set[Role]]] = {}
    for service, methods, *columns in rows("Roles"):
        roles = {role for role, may in zip(Role, columns, strict=True) if may == "yes"}
        names = [f"/{service.strip('`')}/{name}" for name in re.findall(r"`(\w+)`", methods.partition(" with ")[0])]
        if fields := re.findall(r"`(\w+)`", methods.partition(" with ")[2]):
            told_of_fields |= {name: dict.fromkeys(fields, roles) for name in names}
        else:
            told |= dict.fromkeys(names, roles)
    assert told == METHODS
    assert told_of_fields == FIELDS


def test_the_budgets_of_streams_are_those_of_the_code() -> None:
    """Of each role, for what it watches and for reflection."""
    table = PAGE.partition("| callers |")[2].partition("\n\n")[0].splitlines()[2:]
    told = [tuple(map(int, re.findall(r"\d+", row))) for row in table]
    assert told == list(zip(budgets(MAX_WATCHERS), budgets(MAX_STREAMS), strict=True))


def test_the_limits_are_those_of_the_code() -> None:
    """Each with its default."""
    defaults = {flag_of(each.name): str(each.default) for each in settings_of(ServeConfig) if "max_" in each.name}
    told = {flag.strip("`"): default for flag, default, _ in rows("Limits") if flag.startswith("`--")}
    assert told == {
        **defaults,
        "--max-staging-bytes": "twice the checkpoint + 256 MiB, and an adapter with `--enable-lora`",
    }
    assert str(RouteConfig().max_message_bytes) in PAGE


def test_every_setting_that_servers_share_is_described() -> None:
    """Where they listen apart, and how they log."""
    for each in settings_of(ListenConfig):
        assert each.name in ("host", "port", "log_format") or f"`{flag_of(each.name)}" in PAGE, each.name


def test_every_setting_of_clients_is_described() -> None:
    """Under all of its names."""
    told = rows("Clients")
    others = {"credentials", "metadata", "timeouts", "options"}
    assert {row[0].strip("`") for row in told} == {*ConnectionSettings.__annotations__, "target"} - others
    flags = {action for each in told for action in re.findall(r"`(--[a-z-]+)`", each[1])}
    assert flags <= set(make_parser().parse_args(["status"]).__dict__ and _flags_of("status"))
    assert all(row[2] == f"`GENSERVE_{row[0].strip('`').upper()}`" for row in told)


def _flags_of(command: str) -> list[str]:
    (subparsers,) = (each for each in make_parser()._actions if each.choices and command in each.choices)
    return list(subparsers.choices[command]._option_string_actions)  # type: ignore[index,call-overload]


def test_every_claim_of_the_threat_model_names_tests_that_are_there() -> None:
    """By their files and names."""
    claims = [line for line in THREATS.splitlines() if line.startswith("| ") and "`tests/" in line]
    assert len(claims) > 20
    for line in claims:
        for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", line):
            functions = [each for each in ast.walk(ast.parse((ROOT / path).read_text())) if hasattr(each, "name")]
            assert name in {each.name for each in functions}, f"{path}::{name}"
        assert line.count("`tests/") == len(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", line)), line


def test_every_row_of_the_threat_model_has_a_test() -> None:
    """Or says that nothing is claimed."""
    tables = re.findall(r"^\| claim \| held by \|\n\|---\|---\|\n((?:\|.*\n)+)", THREATS, re.MULTILINE)
    assert tables
    assert [line for table in tables for line in table.splitlines() if "`tests/" not in line] == []
