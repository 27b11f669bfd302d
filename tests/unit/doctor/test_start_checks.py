"""What a start would find wrong is found without it."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from genserve.cli import main
from genserve.doctor import start_checks
from genserve.doctor.start_checks import CHECKS, Finding, Start, findings
from genserve.settings.config import ServeConfig
from genserve.tensors.safetensors import read_checkpoint
from genserve.worker.contract.placement import GIB
from tests.support import models
from tests.support.credentials import Authority, one_each

OPEN = ServeConfig(port=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that can be served."""
    return models.tiny_qwen3(tmp_path_factory.mktemp("model"))


def found(config: ServeConfig, model: Path, names: Sequence[str]) -> dict[str, Finding]:
    """What these checks say."""
    chosen = tuple(each for each in CHECKS if each[0] in names)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(start_checks, "CHECKS", chosen)
        start = Start(config, ("--model", str(model)), str(model))
        return {each.name: each for each in findings(start)}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--port", "x"], "argument --port: invalid int value: 'x'"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--model", "/nowhere/at/all"], "--model: no directory /nowhere/at/all"),
    ],
)
def test_wrong_flags_of_ours_are_a_failed_check(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not the usage of the command: a script asks for the status alone."""
    assert main(["serve", "--check", *flags]) == 1
    assert capsys.readouterr().out == f"failed  flags      {says}\n"


def test_a_directory_that_cannot_be_written_has_no_socket(model: Path, tmp_path: Path) -> None:
    """Nor one that is not there. Root may write everywhere."""
    for directory, says in ((tmp_path / "none", "is not a directory"), (tmp_path / "closed", "is not writable")):
        config = ServeConfig(port=-1, uds=str(directory / "sock"))
        if directory.name == "closed":
            directory.mkdir(mode=0o500)
            if os.geteuid() == 0:
                continue
        finding = found(config, model, ["addresses"])["addresses"]
        assert not finding.is_ok and says in finding.text


def test_broken_files_of_a_model_are_named(tmp_path: Path) -> None:
    """A header that is cut, a shard that is missing, and a configuration that is no JSON."""
    cut = models.tiny_qwen3(tmp_path / "cut")
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    missing = models.tiny_qwen3(tmp_path / "missing")
    (missing / "model.safetensors").rename(missing / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "model-00002-of-00001.safetensors"}}
    (missing / "model.safetensors.index.json").write_text(json.dumps(index))
    garbled = models.tiny_qwen3(tmp_path / "garbled")
    (garbled / "config.json").write_text("{")
    for directory, named in (
        (cut, "model.safetensors"),
        (missing, "model-00002-of-00001.safetensors"),
        (garbled, "config.json"),
    ):
        finding = found(OPEN, directory, ["files"])["files"]
        assert not finding.is_ok
        assert named in finding.text
        assert str(finding).startswith("failed  files ")


def test_a_model_that_does_not_fit_is_reported(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what doctor computes."""
    monkeypatch.setattr(start_checks, "nvidia_driver", lambda: "")
    monkeypatch.setattr(start_checks, "available_memory_bytes", lambda: 64 * GIB)
    assert found(OPEN, model, ["memory"])["memory"].is_ok
    monkeypatch.setattr(start_checks, "available_memory_bytes", lambda: GIB)
    for config, says in (
        (OPEN, "the model and a push do not fit: 6.0 of 1.0 GiB are needed"),
        (ServeConfig(port=0, weight_update="inplace"), "--weight-update inplace does not fit"),
    ):
        finding = found(config, model, ["memory"])["memory"]
        assert (finding.is_ok, finding.text) == (False, says)


def test_a_model_that_is_not_on_this_host_is_not_refused() -> None:
    """The engine fetches it."""
    start = Start(OPEN, ("--model", "some/model"), "some/model")
    assert "is looked for when the engine starts" in start_checks.files(start)
    assert start_checks.memory(start) == "not computed: the model's files are not known"


def test_files_of_access_are_checked(model: Path, tmp_path: Path) -> None:
    """And what they mean is told."""
    authority, callers = Authority(tmp_path), one_each(tmp_path)
    pair, other = authority.issue("a.example"), authority.issue("b.example")
    named: dict[str, Any] = {"ssl_certfile": pair.cert_file, "ssl_ca_certs": authority.ca_file}

    def access(**settings: Any) -> Finding:
        return found(ServeConfig(**settings), model, ["access"])["access"]

    good = access(**named, ssl_keyfile=pair.key_file, auth_file=callers.auth_file)
    assert good.is_ok
    assert good.text == "TLS of clients that have a certificate, 4 tokens and 0 certificates are listed"
    assert access().text == "plaintext, everybody who connects may do everything"
    for wrong, says in (
        ({**named, "ssl_keyfile": other.key_file}, "--ssl-certfile"),
        ({"auth_file": str(tmp_path / "missing")}, "--auth-file"),
        ({"peer_token_file": str(tmp_path / "missing")}, "token file"),
    ):
        finding = access(**wrong)
        assert not finding.is_ok
        assert says in finding.text


def kept(model: Path, path: Path | str) -> Finding:
    """What is found of --keep-committed."""
    return found(ServeConfig(keep_committed=str(path)), model, ["keeping"])["keeping"]


def test_where_versions_are_to_be_kept_can_be_written(model: Path, tmp_path: Path) -> None:
    """It is made if it is not there. A file stands in the way, also above it."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "replica-0"):
        finding = kept(model, path)
        assert not finding.is_ok
        assert finding.text == f"--keep-committed {path}: {tmp_path / 'file'} is no directory"
    for path in (tmp_path, tmp_path / "a" / "b"):
        assert kept(model, path).is_ok
    assert not (tmp_path / "a").exists()
    assert kept(model, "").text == "no version is kept: there is no --keep-committed"
    if os.geteuid() != 0:  # root may write everywhere
        (closed := tmp_path / "closed").mkdir(mode=0o500)
        assert f"{closed} is not writable" in kept(model, closed / "kept").text


def test_a_disk_without_room_for_three_versions_is_reported(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less is needed where some lie there already."""
    size = sum(len(each.data) for each in read_checkpoint(model))
    monkeypatch.setattr(start_checks, "disk_usage", lambda path: SimpleNamespace(free=2 * size))
    finding = kept(model, tmp_path / "kept")
    assert not finding.is_ok and "3 more versions" in finding.text
    (tmp_path / "kept" / "current").mkdir(parents=True)
    assert kept(model, tmp_path / "kept").is_ok
