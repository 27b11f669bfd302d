"""A small model, whose loader is any function, and what pushes into it leave."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from genserve.worker.update.plan.loading import PlannedLoading
from genserve.worker.update.structure import Slot, Structure

CPU = torch.device("cpu")
Tensors = Iterable[tuple[str, torch.Tensor]]
Loader = Callable[["Model", Tensors], set[str] | None]


class Model(nn.Module):
    """`weight` and `bias`, which a checkpoint has in two parts each, `padded`, of which it has the first rows, and
    `total`, which it does not have."""

    def __init__(self, loader: Loader) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.padded = nn.Parameter(torch.zeros(3, 4), requires_grad=False)
        self.total = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("buffer", torch.zeros(4))
        self.order = torch.tensor([3, 2, 1, 0])
        self.notes: dict[str, Any] = {}
        self.zero = 0.0
        self._loader = [loader]  # in a list, so that it is no attribute of a kind that torch looks at

    def load_weights(self, tensors: Tensors) -> set[str] | None:
        """The loader."""
        with torch.no_grad():
            return self._loader[0](self, tensors)


def copies(model: Model, tensors: Tensors) -> set[str]:
    """As most of vLLM's loaders: views, conversions by a copy, and zeros where a vocabulary was padded."""
    loaded = set()
    for name, tensor in tensors:
        key, _, part = name.partition(".")
        parameter = getattr(model, key)
        if part:
            half = len(parameter) // 2
            parameter.data.narrow(0, 0 if part == "first" else half, half).copy_(tensor.t())
        else:
            parameter.data[: len(tensor)].copy_(tensor)
            parameter.data[len(tensor) :].fill_(0)
        loaded.add(key)
    return loaded


def elsewhere(part: str) -> Loader:
    """As `copies`, but one tensor is copied in another thread."""

    def load(model: Model, tensors: Tensors) -> set[str]:
        for each in tensors:
            if each[0] == part:
                thread = threading.Thread(target=copies, args=(model, [each]))
                thread.start()
                thread.join()
            else:
                copies(model, [each])
        return {"weight", "bias", "padded"}

    return load


def version(seed: int) -> list[tuple[str, torch.Tensor]]:
    """A checkpoint. One tensor is stored in a wider type, and two lie in the memory of one."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    first, second = random(8).split(4)
    return [
        ("weight.first", random(4, 2, dtype=torch.float32)),
        ("weight.second", random(4, 2)),
        ("bias.first", first[:2]),
        ("bias.second", second[:2]),
        ("padded", random(2, 4, dtype=torch.float32)),
    ]


class Pushed:
    """A structure that is loaded time and again. `num_loads` counts how often its loader did it."""

    def __init__(self, loader: Loader) -> None:
        self.num_loads = 0
        self.model = Model(self._counting(loader))
        config: Any = None
        slots = [Slot(each, each.shape, each.dtype, None) for each in self.model.parameters()]
        modules = [(self.model, dict(vars(self.model)))]
        self.structure = Structure(self.model, config, config, slots, modules, [], frozenset())
        self.loading = PlannedLoading(self.structure, CPU)

    def push(self, tensors: Tensors, *, in_pause: bool = False) -> dict[str, Any]:
        """Loads a version, as `Shadow` does. Returns what it leaves on the model, and what the loader said."""
        vars(self.model)["zero"] = 0.0
        self.structure.allocate(CPU)
        with torch.no_grad():
            loaded = self.loading.load(tensors, in_pause=in_pause)
        left = {name: each.view(-1).view(torch.uint8).tolist() for name, each in self.model.state_dict().items()}
        left |= {"notes": dict(self.model.notes), "step": getattr(self.model, "step", None), "loaded": loaded}
        left["zero"] = str(self.model.zero)
        return left

    def _counting(self, loader: Loader) -> Loader:
        def count(model: Model, tensors: Tensors) -> set[str] | None:
            self.num_loads += 1
            return loader(model, tensors)

        return count


def loaded_anew(loader: Loader, tensors: Tensors) -> dict[str, Any]:
    """What the first push into a structure leaves."""
    return Pushed(loader).push(tensors)
