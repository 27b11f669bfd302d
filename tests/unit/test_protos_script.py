"""scripts/protos, in a checkout of its own: what it notices of a contract that has changed."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
Protos = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that the script reads and writes, and this environment."""
    for name in ("protos", "genserve/v1"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("buf.yaml", "docs/api.md", "scripts/protos", "scripts/api_reference.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "scripts" / "setup").symlink_to("/bin/true")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


@pytest.fixture
def protos(checkout: Path) -> Protos:
    """Runs the script. It finds the repository's own genserve, and no repository of git but the checkout's."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GIT_CEILING_DIRECTORIES": str(checkout.parent)}

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [str(checkout / "scripts" / "protos"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)

    return run


def change(path: Path, old: str, new: str) -> None:
    """Replaces text that must be there."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def git(checkout: Path, *arguments: str) -> None:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com", *arguments]
    subprocess.run(command, cwd=checkout, check=True, capture_output=True, timeout=60)


@pytest.mark.slow
def test_what_is_generated_is_what_the_protos_make(protos: Protos) -> None:
    done = protos("--check")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("arguments", [["--nonesuch"], ["--breaking", "--check"], ["--check", "--check"]])
def test_arguments_are_not_ignored(protos: Protos, arguments: list[str]) -> None:
    """Whoever asks for two checks must not take the first one's answer for both."""
    done = protos(*arguments)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("usage: scripts/protos [--check |")


@pytest.mark.slow
def test_modules_of_a_new_protoc_are_noticed(checkout: Path, protos: Protos) -> None:
    """They would refuse the protobuf of a trainer: not even a module's version may differ."""
    change(
        checkout / "genserve/v1/types_pb2.py", "# Protobuf Python Version: 5.26.1", "# Protobuf Python Version: 7.35.1"
    )
    done = protos("--check")
    assert done.returncode == 1 and "+++ genserve/v1/types_pb2.py" in done.stderr


@pytest.mark.slow
def test_a_generator_that_pip_cannot_install_is_named(checkout: Path, protos: Protos) -> None:
    change(checkout / "scripts/protos", "generator=grpcio-tools==1.65.5", "generator=grpcio-tools==0.0.0")
    done = protos("--check")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("scripts/protos: pip cannot install grpcio-tools==0.0.0, which makes genserve/v1:\n")


@pytest.mark.slow
def test_copies_that_were_edited_are_noticed_and_written_again(checkout: Path, protos: Protos) -> None:
    copies = ("genserve/v1/weights.proto", "genserve/v1/service_config.json", "docs/api.md")
    before = {name: (checkout / name).read_text() for name in copies}
    for name, text in before.items():
        (checkout / name).write_text(text + "\n")
    done = protos("--check")
    assert done.returncode == 1 and all(name in done.stderr for name in copies)
    assert protos().returncode == 0
    assert {name: (checkout / name).read_text() for name in copies} == before


@pytest.mark.slow
def test_a_comment_that_was_edited_is_missed_in_the_reference(checkout: Path, protos: Protos) -> None:
    change(checkout / "protos/genserve/v1/types.proto", "// A list of token ids.", "// Ids of tokens.")
    done = protos("--check")
    assert done.returncode == 1 and "docs/api.md" in done.stderr and "+Ids of tokens." in done.stderr


def test_the_protos_break_no_client_of_the_last_release(protos: Protos) -> None:
    done = protos("--breaking")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("string push_id = 1;", "string push_name = 1;"),
        ("uint32 weight_version = 2;", "uint64 weight_version = 2;"),
        ("bool force = 9;", "bool force = 90;"),
        ("PUSH_STATE_PREPARED = 8;", "PUSH_STATE_READY = 8;"),
        ("rpc GetPush(", "rpc LookUpPush("),
        ("optional uint32 expected_version = 3;", "uint32 expected_version = 3;"),
    ],
    ids=["field renamed", "type changed", "number changed", "enum value renamed", "call renamed", "presence lost"],
)
def test_a_change_that_breaks_clients_fails(checkout: Path, protos: Protos, old: str, new: str) -> None:
    """The place is named."""
    change(checkout / "protos/genserve/v1/weights.proto", old, new)
    done = protos("--breaking")
    assert done.returncode == 1
    assert "protos/genserve/v1/weights.proto:" in done.stdout


def test_a_contract_may_grow(checkout: Path, protos: Protos) -> None:
    """By a field, a value of an enum, a call and a message."""
    weights = checkout / "protos/genserve/v1/weights.proto"
    change(weights, "bool force = 9;", "bool force = 9;\n  // New.\n  bool new = 99;")
    change(weights, "PUSH_STATE_PREPARED = 8;", "PUSH_STATE_PREPARED = 8;\n  // New.\n  PUSH_STATE_NEW = 9;")
    change(weights, "  rpc GetPush(", "  rpc GetNew(GetPushRequest) returns (New);\n  rpc GetPush(")
    change(weights, "enum PushAction", "message New {}\nenum PushAction")
    assert protos("--breaking").returncode == 0


@pytest.mark.slow
def test_a_tag_counts_although_the_file_was_written_again(checkout: Path, protos: Protos) -> None:
    """With the file alone, whoever breaks the contract could say that it was never different."""
    git(checkout, "init", "-q")
    git(checkout, "add", "protos", "buf.yaml")
    git(checkout, "commit", "-q", "-m", "x")
    git(checkout, "tag", "v0.1.0")
    assert protos("--breaking").returncode == 0
    change(checkout / "protos/genserve/v1/weights.proto", "string push_id = 1;", "string push_name = 1;")
    assert protos("--release").returncode == 0
    done = protos("--breaking")
    assert done.returncode == 1 and "protos/genserve/v1/weights.proto:" in done.stdout
    git(checkout, "tag", "-d", "v0.1.0")
    assert protos("--breaking").returncode == 0
