"""What the daemon loads when it asks what it has agreed on with its workers."""

import subprocess
import sys

_PROGRAM = """
import importlib, pkgutil, sys
import genserve.worker.contract as contract
names = [module.name for module in pkgutil.iter_modules(contract.__path__)]
for name in names:
    importlib.import_module(f"{contract.__name__}.{name}")
print(len(names) > 3, {"torch", "vllm"} & sys.modules.keys())
"""


def test_the_daemon_reads_the_contract_without_torch_and_vllm() -> None:
    """It imports this, and no code of the workers'."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout == "True set()\n"
