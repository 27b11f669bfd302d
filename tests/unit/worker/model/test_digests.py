"""Digests of live weights, read a part at a time."""

import gc
import hashlib
import weakref

import pytest
import torch
from torch import nn

from genserve.worker.model.contents import digest
from genserve.worker.model.digests import DigestReader, digesting, weight_digests

BLOCK_BYTES = 4 << 20
BLOCK_FLOATS = BLOCK_BYTES // 4


class Model(nn.Module):
    """With a tensor of three blocks and a bit, and small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.arange(3.0 * BLOCK_FLOATS + 5))
        self.small = nn.Linear(2, 3)


def plain(tensor: torch.Tensor) -> str:
    """All at once."""
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(2.0 * BLOCK_FLOATS),
        torch.arange(2.0 * BLOCK_FLOATS + 1),
        torch.arange(3.0 * BLOCK_FLOATS).view(3, 2, -1).transpose(1, 2),
        torch.arange(2.0 * BLOCK_FLOATS).view(2, -1)[:, 1:],
        torch.arange(2.0 * BLOCK_FLOATS)[::2],
        torch.tensor(3.0),
        torch.empty(0),
    ],
    ids=["two blocks", "and a bit", "transposed", "cut", "with a stride", "scalar", "empty"],
)
def test_a_digest_is_that_of_the_bytes_in_order(tensor: torch.Tensor) -> None:
    """However large the tensor is, and however it lies in memory."""
    assert digest(tensor) == plain(tensor)


def test_reading_stops_after_a_few_mib_and_reports_nothing_before_its_end() -> None:
    """Of one tensor, too. In the end it says what a reading at once does, and from then on without reading."""
    model = Model()
    live = DigestReader(lambda: digesting(model))
    num_stops = 0
    while (found := live.read_on(0.0)) is None:
        num_stops += 1
    assert num_stops == 4 + 2  # the blocks of the large tensor, and two small ones
    assert found == weight_digests(model)
    assert found["large"] == plain(model.large)
    model.large = nn.Parameter(torch.zeros(1))
    assert live.read_on(0.0) == found


@pytest.mark.parametrize("ended", [False, True])
def test_what_was_read_is_forgotten_when_the_weights_change(*, ended: bool) -> None:
    """In the middle of a reading and after it. The tensors of before are not held."""
    model = Model()
    live = DigestReader(lambda: digesting(model))
    before = live.read_on(60.0 if ended else 0.0)
    assert (before is not None) is ended
    live.forget()
    replaced = weakref.ref(model.large)
    model.large = nn.Parameter(torch.zeros(4))
    gc.collect()
    assert replaced() is None
    found = live.read_on(60.0)
    assert found is not None and found["large"] == plain(torch.zeros(4))


class Packed(nn.Module):
    """A linear layer as vLLM packs one on the CPU: its weight is where only a product reads it."""

    input_size = 150

    def __init__(self) -> None:
        super().__init__()
        packed = nn.Parameter(torch.arange(float(3 * self.input_size)).view(self.input_size, 3))
        self.weight = nn.Parameter(torch.empty(0))

        def cpu_linear(x: torch.Tensor, weight: torch.Tensor, bias: None) -> torch.Tensor:
            assert not torch.is_grad_enabled(), "the weights would be kept for a gradient"
            return x @ packed

        self.cpu_linear = cpu_linear


def test_a_packed_weight_is_read_back_a_few_rows_at_a_time() -> None:
    """It is what its product with the identity is."""
    model = nn.ModuleDict({"layer": Packed()})
    live = DigestReader(lambda: digesting(model))
    num_stops = 0
    while (found := live.read_on(0.0)) is None:
        num_stops += 1
    assert num_stops == 3  # 64 rows at a time
    assert found["layer.cpu_linear"] == plain(torch.arange(float(3 * Packed.input_size)))


def test_a_parameter_that_holds_nothing_has_no_digest() -> None:
    """It would be that of nothing, for every packed layer the same."""
    assert weight_digests(nn.ModuleDict({"layer": Packed()})).keys() == {"layer.cpu_linear"}


def test_what_runs_between_two_parts_may_have_gradients() -> None:
    """As it may without a reading."""
    live = DigestReader(lambda: digesting(Model()))
    live.read_on(0.0)
    assert torch.is_grad_enabled()


def test_a_reading_that_fails_is_begun_anew() -> None:
    """By whoever asks next."""
    numbers = iter([RuntimeError("cannot be read"), None])

    def begin():  # type: ignore[no-untyped-def]
        if (error := next(numbers)) is not None:
            raise error
        return digesting(Model())

    live = DigestReader(begin)
    with pytest.raises(RuntimeError, match="cannot be read"):
        live.read_on(60.0)
    assert live.read_on(60.0)
