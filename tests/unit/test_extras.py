"""The commands that messages give to people: they install from where this genserve is from."""

import json
from pathlib import Path
from typing import Any

import pytest

from genserve.extras import pip_install, pip_install_engine


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, 'pip install "genserve[push]"'),
        ({"url": "file:///src/a%20b", "dir_info": {}}, 'pip install "genserve[push] @ file:///src/a%20b"'),
        ({"url": "file:///src/a%20b", "dir_info": {"editable": True}}, 'pip install -e "/src/a b[push]"'),
        ({"url": "file:///g.whl", "archive_info": {}}, 'pip install "genserve[push] @ file:///g.whl"'),
        (
            {"url": "https://host/g.git", "vcs_info": {"vcs": "git", "commit_id": "1f"}},
            'pip install "genserve[push] @ git+https://host/g.git@1f"',
        ),
    ],
    ids=["index", "checkout", "editable", "wheel", "repository"],
)
def test_an_extra_is_from_where_genserve_is_from(
    origin: dict[str, Any] | None, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pip has recorded it: https://packaging.python.org/en/latest/specifications/direct-url/."""
    metadata = tmp_path / "genserve-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.4\nName: genserve\nVersion: 0.1.0\n")
    if origin is not None:
        (metadata / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(tmp_path)
    assert pip_install("push") == command
    assert pip_install(options="--no-deps") == command.replace("install", "install --no-deps").replace("[push]", "")


def test_a_checkout_that_is_not_installed_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As with PYTHONPATH."""
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert pip_install("push") == f'pip install "genserve[push] @ {Path(__file__).parents[2].as_uri()}"'


def test_the_engine_for_cpus_is_reported_with_torchs_own_index() -> None:
    """PyPI has no torch for it."""
    gpu, cpu = pip_install_engine().split(", or without a GPU ")
    assert gpu == pip_install("cuda")
    assert cpu.startswith(f'PIP_EXTRA_INDEX_URL="$TORCH_CPU" {pip_install("cpu")}')
