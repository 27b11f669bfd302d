"""Versions of a few tensors, and the files of a model beside them."""

from pathlib import Path

import numpy as np

from genserve.memory.arena import Arena
from genserve.tensors.content import content_digest, tensor_digest
from genserve.tensors.manifest import Manifest
from genserve.weights.resident import ArenaBytes, ResidentVersion

MANIFEST = Manifest.end_to_end(
    [("a.weight", "F32", (64, 64), 1 << 14), ("b.weight", "BF16", (256, 256), 1 << 17), ("c", "U8", (3,), 3)]
)
SMALL_FILES = ("config.json", "tokenizer.json", "chat_template.jinja", "1_Pooling/config.json")
OTHER_FILES = ("model.safetensors", "model.safetensors.index.json", "optimizer.pt", "step-1/model.safetensors")


def bytes_of(number: int) -> bytes:
    """Those of a version, which tell one from another."""
    return np.random.default_rng(number).bytes(MANIFEST.total_bytes)


def digest_of_version(number: int) -> str:
    """The content digest of a version."""
    data = memoryview(bytes_of(number))
    return content_digest((each, tensor_digest(each, lambda start, end: data[start:end])) for each in MANIFEST.tensors)


def resident(number: int, content_digest: str = "") -> ResidentVersion:
    """The version as a push has left it."""
    arena = Arena.allocate(MANIFEST.total_bytes)
    arena.write(0, bytes_of(number))
    return ResidentVersion(number, MANIFEST, ArenaBytes(arena), f"push {number}", content_digest)


def text_of(name: str) -> str:
    """What is in a file of the model: a configuration has to be JSON."""
    return f'{{"name": "{name}"}}'


def model_files(directory: Path) -> Path:
    """What a model's directory has, weights and all: each file names itself."""
    for name in (*SMALL_FILES, *OTHER_FILES):
        (path := directory / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text_of(name))
    return directory
