"""The programs of clients/python/grpo as modules. They are run as files, so only their own directory finds them."""

import sys
from importlib import import_module
from pathlib import Path

DIRECTORY = Path(__file__).parents[2] / "clients" / "python" / "grpo"
sys.path.insert(0, str(DIRECTORY))

fidelity = import_module("fidelity")
tiny_model = import_module("tiny_model")
train = import_module("train")
