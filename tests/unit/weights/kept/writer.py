"""A process that keeps one version after the other until it is killed: `python -m tests.unit.weights.kept.writer DIR`.

Prints the number of each when it is kept.
"""

import sys
from itertools import count
from pathlib import Path

from genserve.weights.kept.checkpoint import write_checkpoint
from genserve.weights.kept.directory import KeptDirectory, KeptRecord
from tests.unit.weights.kept.versions import MANIFEST, bytes_of, model_files


def keep(directory: KeptDirectory, number: int, files: Path) -> None:
    """As a daemon does it."""
    data = memoryview(bytes_of(number))
    target = directory.begin()
    digest = write_checkpoint(target, MANIFEST, lambda start, end: data[start:end], files, shard_bytes=1 << 16)
    directory.finish(KeptRecord(number, f"push {number}", digest))


def main() -> None:
    path = Path(sys.argv[1])
    files, directory = model_files(path / "model"), KeptDirectory(path / "kept")
    for number in count(1):
        keep(directory, number, files)
        print(number, flush=True)


if __name__ == "__main__":
    main()
