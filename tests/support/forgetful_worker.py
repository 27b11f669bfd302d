"""A worker extension that forgets at a sleep what a GPU does: `ForgetfulExtension` for --worker-extension-cls.

vLLM's worker does nothing at a sleep on the CPU. This one does what its worker does on a GPU, in place: the KV cache is
lost at every level from 1, the weights and everything else that lies in their pool at level 2, but for the buffers,
which come back with the weights. So whoever restores nothing serves garbage. It writes what it did to the file named by
GENSERVE_SLEEPS.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

FORGETFUL_EXTENSION = "tests.support.forgetful_worker.ForgetfulExtension"
SLEEPS_VARIABLE = "GENSERVE_SLEEPS"
GARBAGE = 7

if TYPE_CHECKING or SLEEPS_VARIABLE in os.environ:  # tests import this module too, where no worker is
    from genserve.worker.extension import WeightExchangeExtension
    from genserve.worker.model.slept import loose_tensors
    from genserve.worker.model.tree import holdings
else:
    WeightExchangeExtension = object


class ForgetfulExtension(WeightExchangeExtension):
    """The extension; its worker forgets."""

    def genserve_attach(self, wire: dict[str, Any]) -> dict[str, Any]:
        """As ever; and from now on sleep and wake-up are these."""
        self._forgotten_buffers: dict[str, torch.Tensor] = {}
        self.sleep, self.wake_up = self._forget, self._remember
        return super().genserve_attach(wire)

    def _forget(self, level: int = 1) -> None:
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        with torch.inference_mode():
            for cache in self.model_runner.kv_caches:  # type: ignore[attr-defined]
                cache.fill_(1)
            count = 0
            if level == 2:
                self._forgotten_buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
                count = _spoil(model)
        _note(f"sleep {level}: {count} spoiled")

    def _remember(self, tags: list[str] | None = None) -> None:
        if tags is None or "weights" in tags:
            model = self.model_runner.get_model()  # type: ignore[attr-defined]
            with torch.inference_mode():
                for name, buffer in model.named_buffers():
                    if name in self._forgotten_buffers:
                        buffer.data.copy_(self._forgotten_buffers.pop(name))
        _note(f"wake_up {'all' if tags is None else '+'.join(tags)}")


def _spoil(model: nn.Module) -> int:
    """Writes garbage over everything that may be a weight; how much that was."""
    tensors = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers(), *loose_tensors(model)]}
    tensors |= {id(tensor): tensor for tensor in _lora_stacks(model)}
    for tensor in tensors.values():
        if not tensor.is_meta:
            tensor.data.fill_(GARBAGE)
    # Weights that the CPU packs are the closures of their layers, and cannot be written to.
    packed = [place for name, place in holdings(model).items() if name.endswith("cpu_linear")]
    for place in packed:
        place.owner.__dict__[place.key] = _garbled(place.value)
    return len(tensors) + len(packed)


def _garbled(function: Callable[..., torch.Tensor]) -> Any:
    def garbled(*args: Any, **kwargs: Any) -> Any:
        return torch.full_like(function(*args, **kwargs), GARBAGE)

    return garbled


def _lora_stacks(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        for name in ("lora_a_stacked", "lora_b_stacked"):
            yield from getattr(module, name, ())


def _note(line: str) -> None:
    with Path(os.environ[SLEEPS_VARIABLE]).open("a") as file:
        file.write(f"{line}\n")
