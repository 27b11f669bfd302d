"""How processes that import vLLM end."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, os, sys
import genserve.process.interpreter

class Leaked:
    def __del__(self, write=os.write):  # as libraries in C++ do: they write to the file, not to sys.stderr
        write(2, b"leaked")

sys.leaked = Leaked()
atexit.register(print, "draining", file=sys.stderr)
raise SystemExit({status})
"""


@pytest.mark.parametrize(("status", "says"), [("3", ""), ("'the root cause'", "the root cause\n")])
def test_nothing_is_said_after_the_last_words(status: str, says: str) -> None:
    """What libraries say of objects that are left would come after the line that tells why a daemon has ended."""
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(status=status)], capture_output=True, text=True)
    assert done.stderr == f"{says}draining\n"
    assert done.returncode == (3 if status == "3" else 1)
