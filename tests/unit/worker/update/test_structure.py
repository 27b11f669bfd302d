"""Where a layer has its tensors if the model was built on the host. torch's meta device stands for a GPU."""

from typing import Any

import torch
from torch import nn

from genserve.worker.update.structure import Structure, tensors_elsewhere

META = torch.device("meta")


class Norm(nn.Module):
    """Without a weight, as in Gemma: its ones are neither a parameter nor a buffer."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.ones = torch.ones(2, device=device)
        self.on_host = torch.ones(2)


def test_a_tensor_that_construction_makes_lies_where_the_live_model_has_it() -> None:
    """Else an update in place would find it on the host, and refuse the push; what the live one has there stays."""
    live, built = Norm(META), Norm(torch.device("cpu"))
    nothing: Any = None
    modules = [(built, dict(vars(built)))]
    structure = Structure(
        built, nothing, nothing, [], modules, [], frozenset(), elsewhere=tensors_elsewhere(built, live)
    )
    ((_, attributes),) = structure.layer(built, [built], META).modules
    assert (attributes["ones"].device, attributes["on_host"].device) == (META, torch.device("cpu"))
