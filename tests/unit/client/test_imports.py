"""The client is light, and what it stands on."""

import pkgutil
import subprocess
import sys

import pytest

import genserve.tensors
from genserve.client import Client
from genserve.errors import InvalidFieldError

TENSORS = sorted(f"genserve.tensors.{module.name}" for module in pkgutil.iter_modules(genserve.tensors.__path__))


@pytest.mark.slow
@pytest.mark.parametrize("module", ["genserve.client", "genserve.memory.host", "genserve.memory.ring", *TENSORS])
def test_importing_loads_neither_torch_nor_vllm_nor_numpy(module: str) -> None:
    """In a fresh interpreter: `pip install genserve` has none of them."""
    heavy = "{'torch', 'vllm', 'numpy', 'safetensors', 'google_crc32c'}"
    program = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    assert _run(program) == "[]"


def test_help_loads_not_even_grpc() -> None:
    """`genserve --help` and the help of a command answer at once."""
    program = (
        "import sys, contextlib, io\n"
        "from genserve.cli import main\n"
        "for argv in (['--help'], *([each, '--help'] for each in ('generate', 'push', 'route', 'up'))):\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "        main(argv)\n"
        "print(sorted({'grpc', 'google.protobuf', 'torch', 'vllm'} & set(sys.modules)))"
    )
    assert _run(program) == "[]"


def test_the_client_is_imported_where_there_is_no_linux() -> None:
    """Windows has no fcntl and no fork, and neither Windows nor macOS has memory that a daemon could map."""
    program = (
        "import os, sys\n"
        "for name in ('fcntl', 'grp', 'pwd', 'resource', 'termios'):\n"
        "    sys.modules[name] = None\n"
        "for name in ('fork', 'geteuid', 'getuid', 'memfd_create', 'pipe2', 'preadv', 'register_at_fork'):\n"
        "    delattr(os, name)\n"
        "from genserve.client import Client\n"
        "Client('127.0.0.1:50051').close()\n"
        "print('closed')"
    )
    assert _run(program) == "closed"


@pytest.mark.parametrize("target", ["::1:50051", "fe80::1:50051", "2001:db8::7:50051", "::1"])
def test_an_ipv6_address_without_brackets_is_refused_by_name(target: str) -> None:
    """Nobody knows where it ends and the port begins."""
    with pytest.raises(InvalidFieldError) as caught:
        Client(target)
    assert caught.value.violations[0].field == "target" and "[ADDRESS]:PORT" in caught.value.message


def _run(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
