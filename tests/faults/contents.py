"""What random trainers push: whole checkpoints, and mixes of two as partial pushes make them.

"b" names the tensors of checkpoint b, "b/c" those of b but for PART, which are those of c, and "b+x" those of b with
adapter x merged into them.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from tests.faults.history import START_CONTENT
from tests.support import adapters, models

PART = frozenset(
    {
        # Halves of what the engine keeps as one tensor: the other half has to come from the version before.
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.norm.weight",
    }
)
"""The tensors of a partial push."""

Tensors = Mapping[str, torch.Tensor]


class Contents:
    """The start checkpoint, and four others that greedy outputs tell apart."""

    def __init__(self, directory: Path) -> None:
        start = models.tiny_qwen3(directory / START_CONTENT, seed=0)
        self.directories = {START_CONTENT: start}
        for seed, name in enumerate("bcde"):
            self.directories[name] = models.perturbed(start, directory / name, seed=seed, scale=0.5)
        self._tensors = {name: models.load_tensors(path) for name, path in self.directories.items()}
        self.names = sorted(self._tensors)
        self.adapters = {name: adapters.adapter(start, seed) for seed, name in enumerate("wxyz")}
        self._rests = {_digest(self._items(name, part=False)): name for name in self.names}
        self._parts = {_digest(self._items(name, part=True)): name for name in self.names}

    def whole(self, content: str) -> Tensors:
        """All tensors."""
        base, _, adapter = content.partition("+")
        if adapter:
            return adapters.merged(self.directories[base], self.adapters[adapter])
        rest, _, part = content.partition("/")
        return {**self._tensors[rest], **(self.part(part) if part else {})}

    def part(self, name: str) -> Tensors:
        """The tensors of a partial push."""
        return {name: tensor for name, tensor in self._tensors[name].items() if name in PART}

    def name_of(self, stored: Mapping[str, bytes]) -> str:
        """Which content these bytes are; "?" for none."""
        rest = self._rests.get(_digest((name, data) for name, data in stored.items() if name not in PART))
        part = self._parts.get(_digest((name, data) for name, data in stored.items() if name in PART))
        return "?" if rest is None or part is None else mixed(rest, part)

    def _items(self, content: str, *, part: bool) -> Iterable[tuple[str, bytes]]:
        tensors = self._tensors[content].items()
        return [(n, t.contiguous().view(torch.uint8).numpy().tobytes()) for n, t in tensors if (n in PART) is part]


def mixed(content: str, part: str) -> str:
    """What becomes of `content` when the part of another is pushed."""
    rest = content.partition("/")[0]
    return rest if rest == part else f"{rest}/{part}"


def _digest(items: Iterable[tuple[str, bytes]]) -> str:
    digest = hashlib.sha256()
    for name, data in sorted(items):
        digest.update(name.encode())
        digest.update(data)
    return digest.hexdigest()
