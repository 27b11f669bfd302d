"""What the recorder uses of torch, and takes for granted."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from genserve.worker.update.plan.recorder import VIEWING, Recorder


class Seen(TorchDispatchMode):
    """The operations that a mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(func)
        return func(*args, **(kwargs or {}))


ARGUMENTS = {
    "__get__": (),
    "__getitem__": (1,),
    "narrow": (0, 1, 1),
    "select": (0, 1),
    "t": (),
    "transpose": (0, 1),
    "unbind": (0,),
    "unsqueeze": (0,),
    "view": (2, 8),
}


def test_functions_that_are_left_to_torch_only_make_views() -> None:
    """Of integers, they do nothing that a recorder would record."""
    assert {function.__name__ for function in VIEWING} == ARGUMENTS.keys()
    for function in VIEWING:
        tensor = torch.ones(4, 4)
        with Seen() as seen:
            made = function(tensor, *ARGUMENTS[function.__name__])
        assert seen.operations
        assert all(operation.is_view for operation in seen.operations)
        for each in made if isinstance(made, tuple) else [made]:
            assert each.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def test_torch_can_still_leave_modes_out() -> None:
    """For a block of one thread."""
    tensor = torch.ones(4)
    with Seen() as seen:
        with torch._C._DisableTorchDispatch():
            tensor.narrow(0, 1, 1)
        assert seen.operations == []
        tensor.narrow(0, 1, 1)
        assert len(seen.operations) == 1
    assert not Recorder._should_skip_dynamo()
    assert hasattr(TorchDispatchMode, "_should_skip_dynamo"), "torch has no such guard any more: remove the override"
