"""Copies of a trainer's tensors on the host, collected one by one for one push."""

from typing import Any


class HostCopies:
    """`fresh` are the tensors to push, by name. The memory of earlier copies is reused, because the kernel would have
    to clear new pages."""

    def __init__(self) -> None:
        self.fresh: dict[str, Any] = {}
        self._spare: dict[str, Any] = {}

    def add(self, name: str, tensor: Any) -> None:
        """Copies a torch tensor, because the trainer may free it, or overwrite it by the next gather."""
        tensor = whole(name, tensor)
        kept = self.fresh.pop(name, None)
        kept = self._spare.pop(name, None) if kept is None else kept
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
            self.fresh[name] = tensor.to("cpu", copy=True)
        else:
            self.fresh[name] = kept.copy_(tensor)

    def forget(self) -> None:
        """Forgets the tensors but keeps the memory."""
        self._spare |= self.fresh
        self.fresh = {}


def whole(name: str, tensor: Any) -> Any:
    """A torch tensor without its autograd history. Raises TypeError for a DTensor, of which this process has only a
    part."""
    if hasattr(tensor, "full_tensor"):
        raise TypeError(
            f"{name}: a DTensor is one rank's part; call full_tensor() on every rank first, or push from every rank "
            "with genserve.client.Client"
        )
    return tensor.detach()
