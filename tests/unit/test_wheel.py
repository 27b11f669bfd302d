"""What an installed genserve has for clients in other languages: the proto files and the service config, by path."""

import json
import re
import subprocess
import sys
import sysconfig
import zipfile
from importlib import resources
from pathlib import Path
from typing import Final

import pytest

from tests.support.built_wheel import ROOT, build_wheel

PROTOS: Final = ROOT / "protos" / "genserve" / "v1"
NAMES: Final = sorted(path.name for path in PROTOS.iterdir())


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the wheel has."""
    built = tmp_path_factory.mktemp("built")
    wheel = build_wheel(tmp_path_factory.mktemp("wheel"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(built)
    return built


@pytest.mark.slow
def test_a_wheel_has_the_protos_and_the_service_config(installed: Path) -> None:
    """Byte for byte, where `importlib.resources` finds them."""
    program = (
        "from importlib.resources import files; import json, sys; "
        "print(json.dumps({name: (files('genserve.v1') / name).read_text() for name in sys.argv[1:]}))"
    )
    assert {"weights.proto", "service_config.json", "default_timeouts.json"} <= set(NAMES)
    command = [sys.executable, "-c", program, *NAMES]
    done = subprocess.run(command, cwd=installed, capture_output=True, text=True, check=True, timeout=60, env={})
    assert json.loads(done.stdout) == {name: (PROTOS / name).read_text() for name in NAMES}


def test_a_checkout_has_them_in_the_same_place() -> None:
    """Also one that is installed as editable."""
    for name in NAMES:
        assert (resources.files("genserve.v1") / name).read_text(encoding="utf-8") == (PROTOS / name).read_text()


def described(module: Path) -> str:
    """The messages of a module that a protoc has made, in which the protoc's own version differs."""
    (descriptor,) = re.findall(r"AddSerializedFile\((.*)\)", module.read_text())
    return str(descriptor)


@pytest.mark.slow
def test_protoc_compiles_what_a_wheel_brings(installed: Path, tmp_path: Path) -> None:
    """With site-packages as its path: google/rpc is there too, of a package that genserve needs."""
    googles = sysconfig.get_path("purelib")
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(installed), "-I", googles]
    command += [f"--python_out={tmp_path}", *(f"genserve/v1/{name}" for name in NAMES if name.endswith(".proto"))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    made = {path.name: described(path) for path in (tmp_path / "genserve" / "v1").iterdir()}
    assert made == {name: described(ROOT / "genserve" / "v1" / name) for name in made}
    assert len(made) == sum(name.endswith(".proto") for name in NAMES)


def test_every_import_of_a_proto_is_of_a_package_that_genserve_needs() -> None:
    """protobuf brings google/protobuf to every language, googleapis-common-protos google/rpc."""
    imported = {
        line.split('"')[1]
        for name in NAMES
        for line in (PROTOS / name).read_text().splitlines()
        if line.startswith("import ")
    }
    assert {name.rpartition("/")[0] for name in imported} == {"genserve/v1", "google/protobuf", "google/rpc"}
