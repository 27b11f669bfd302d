"""A plugin of vLLM for every engine that tests start, warm or cold, in whatever way: `light_waits`.

vLLM finds it through this folder on PYTHONPATH, as it finds an installed one. Nothing else may lie here that a program
could import: programs that tests start with an installed genserve have the folder too.
"""

import os
from pathlib import Path


def load_in_engines() -> None:
    """In those that this process starts from now on, and in what they start."""
    folders = [os.fspath(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, folders)))
