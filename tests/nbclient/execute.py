"""Executes a notebook as Jupyter does, in the folder that it is in, and prints it with its outputs."""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

path = Path(sys.argv[1])
notebook = nbformat.read(path, as_version=4)
NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(path.parent)}}).execute()
print(nbformat.writes(notebook))
