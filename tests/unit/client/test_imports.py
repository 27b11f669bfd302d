"""The client is light, and what it stands on."""

import pkgutil
import subprocess
import sys

import pytest

import genserve.tensors

TENSORS = sorted(f"genserve.tensors.{module.name}" for module in pkgutil.iter_modules(genserve.tensors.__path__))


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


def _run(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
