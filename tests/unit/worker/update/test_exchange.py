"""Exchanging weights of small modules, without an engine."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from genserve.worker.model.tree import holdings
from genserve.worker.update.device import Device
from genserve.worker.update.exchange import Buffer, exchange
from tests.support.kept_device import KeptDevice
from tests.unit.worker.update.exchanges import CPU, Plain, addresses, exchange_of


class Packed(nn.Module):
    """A layer as vLLM leaves it on the CPU: an empty parameter, and the weight in a closure."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.full((4,), value))
        self.register_buffer("scale", torch.full((2,), value))
        self.derived = torch.full((3,), value)
        self.kv_cache = torch.zeros(2)
        weight = torch.full((1,), value)
        self.cpu_linear = lambda x: x * weight

    def seen(self) -> list[float]:
        """What the layer computes with, by place."""
        packed = self.cpu_linear(torch.ones(1))
        return [float(t[0]) for t in (self.norm, self.scale, self.derived, packed)]


def test_a_commit_exchanges_every_place_and_a_rollback_puts_it_back() -> None:
    """Parameters, buffers, derived tensors and closures change together; the KV cache never."""
    live, prepared = Packed(1.0), Packed(2.0)
    norm, cache = live.norm, live.kv_cache
    exchanged = exchange_of(live, prepared)
    exchanged.commit()
    assert live.seen() == [2.0] * 4
    exchanged.rollback()
    assert live.seen() == [1.0] * 4
    assert live.norm is norm
    assert live.kv_cache is cache


class Fixed(nn.Parameter):
    """Keeps the memory that it has."""

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        pass


def test_a_value_that_is_not_put_in_place_is_noticed() -> None:
    """No exchange is acknowledged that did not happen."""
    live, prepared = Packed(1.0), Packed(2.0)
    for each in (live, prepared):
        each.norm = Fixed(each.norm.detach())
    with pytest.raises(RuntimeError, match="norm did not take"):
        exchange_of(live, prepared).commit()


@pytest.mark.parametrize("device", [CPU, KeptDevice()])
def test_a_rollback_without_a_commit_changes_nothing(device: Device) -> None:
    """A rank whose commit never began is rolled back like the others."""
    live = Plain(1.0)
    exchange_of(live, Plain(2.0), device).rollback()
    assert live.seen() == {1.0}


def with_attribute(name: str, value: Any) -> Packed:
    """A prepared layer that differs in one place."""
    layer = Packed(2.0)
    if isinstance(value, nn.Parameter):
        layer.norm = value
    else:
        layer.__dict__[name] = value
    return layer


@pytest.mark.parametrize(
    ("prepared", "says"),
    [
        (with_attribute("extra", torch.ones(1)), "only prepared"),
        (with_attribute("norm", nn.Parameter(torch.ones(5))), "norm is"),
        (with_attribute("norm", nn.Parameter(torch.ones(4, dtype=torch.float16))), "norm is"),
        (
            with_attribute("norm", nn.Parameter(torch.ones(4, device="meta"))),
            "norm is on cpu live and on meta prepared",
        ),
        (with_attribute("derived", lambda x: x), "derived is"),
    ],
)
def test_a_prepared_model_of_another_structure_is_refused(prepared: Packed, says: str) -> None:
    """Before anything is exchanged, naming the place."""
    live = Packed(1.0)
    with pytest.raises(ValueError, match=says):
        exchange_of(live, prepared)
    assert live.seen() == [1.0] * 4


@pytest.mark.parametrize("device", [CPU, KeptDevice()])
def test_what_is_empty_is_not_compared(device: Device) -> None:
    """MLA leaves an empty tensor in the place of a weight, of whatever type is the default just then."""
    live, prepared = Plain(1.0), Plain(2.0)
    live.packed = nn.Parameter(torch.empty(0, dtype=torch.bfloat16))
    prepared.packed = nn.Parameter(torch.empty(0, 3))
    exchange_of(live, prepared, device).commit()
    assert live.seen() == {2.0}
    assert live.packed.dtype == torch.bfloat16


@pytest.mark.parametrize("device", [CPU, KeptDevice()])
def test_empty_tensors_of_two_types_are_the_same(device: Device) -> None:
    """vLLM packs latent attention on the CPU and leaves an empty weight without saying its type: it gets the default
    one, which is another one in a background thread than while a model is loaded."""
    live, prepared = Plain(1.0), Plain(2.0)
    for model, dtype in ((live, torch.bfloat16), (prepared, torch.float32)):
        model.packed = nn.Parameter(torch.empty(0, dtype=dtype))
    exchange_of(live, prepared, device).commit()
    assert (live.seen(), live.packed.dtype) == ({2.0}, torch.bfloat16)


def test_where_addresses_are_kept_contents_change_places() -> None:
    """Each byte once, though a tie and a view have it too; the prepared tensors hold what was live, which is the way
    back. The device is waited for before the first copy, which prepared tensors need too, and after the last one."""
    live, device = Plain(1.0), KeptDevice()
    before = addresses(live)
    exchanged = exchange_of(live, Plain(2.0), device)
    exchanged.commit()
    assert live.seen() == {2.0}
    assert addresses(live) == before
    assert device.log == ["synchronize", *["copy"] * 12, "synchronize"]  # three for each of four tensors
    exchanged.rollback()
    assert live.seen() == {1.0}
    assert addresses(live) == before


@pytest.mark.parametrize("fails_at", range(12))
def test_a_copy_that_fails_is_undone(fails_at: int) -> None:
    """Whichever it is: the old version is live after the rollback, to the byte."""
    live, device = Plain(1.0), KeptDevice(fails_at)
    exchanged = exchange_of(live, Plain(2.0), device)
    with pytest.raises(torch.OutOfMemoryError):
        exchanged.commit()
    exchanged.rollback()
    assert live.seen() == {1.0}


class Allocated(TorchDispatchMode):
    """Bytes of new tensors."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not func.is_view and made is not args[0]:
            self.num_bytes += made.nbytes
        return made


def test_a_commit_and_a_rollback_allocate_nothing() -> None:
    """The buffer, as large as the largest tensor, is there before the KV cache is."""
    live, device = Plain(1.0), KeptDevice()
    buffer = Buffer(holdings(live), device)
    larger = torch.zeros(live.fused.nbytes + 1, dtype=torch.uint8)
    assert buffer.fits(live.fused) and not buffer.fits(larger)
    exchanged = exchange_of(live, Plain(2.0), device)
    with torch.no_grad(), Allocated() as allocated:
        exchanged.commit()
        exchanged.rollback()
    assert allocated.num_bytes == 0
    assert not Buffer(holdings(live), CPU).fits(live.norm)


def test_overwriting_needs_no_buffer() -> None:
    """One copy for each tensor, and no way back."""
    live, device = Plain(1.0), KeptDevice()
    exchange(holdings(live), holdings(Plain(2.0)), device).overwrite()
    assert live.seen() == {2.0}
    assert device.copies == 4


def test_what_captured_code_cannot_see_change_is_refused() -> None:
    """Numbers and closures are constants of compiled code."""
    live, prepared = Plain(1.0), Plain(2.0)
    live.__dict__["k_scale"], prepared.__dict__["k_scale"] = 1.0, 2.0
    with pytest.raises(ValueError, match=r"^k_scale "):
        exchange_of(live, prepared, KeptDevice())
    assert live.seen() == {1.0}


def test_memory_that_is_shared_in_another_way_is_refused() -> None:
    """Copied one after the other, one of them would be torn."""
    live, prepared = Plain(1.0), Plain(2.0)
    prepared.part = torch.full((2, 2), 2.0)
    with pytest.raises(ValueError, match=r"^part .*fused"):
        exchange_of(live, prepared, KeptDevice())


def test_a_tensor_on_a_third_device_is_refused() -> None:
    """The host is good: versions may be built there."""
    live, prepared = Plain(1.0), Plain(2.0)
    prepared.scale = torch.ones((), device="meta")
    with pytest.raises(ValueError, match=r"^scale .*meta prepared"):
        exchange_of(live, prepared, KeptDevice())


class Scaled(nn.Module):
    """A layer on a device, which keeps numbers on the host, as attention does. Nothing is computed on torch's meta
    device, and a tensor is on it or not, as on a GPU."""

    def __init__(self, value: float, on_host: str = "cpu") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, device="meta"))
        self.k_scale_cpu = torch.full((3,), value, device=on_host)
        self.v_scale_cpu = torch.full((2,), -value, device=on_host)

    def seen(self) -> list[float]:
        """The numbers on the host."""
        return [*self.k_scale_cpu.tolist(), *self.v_scale_cpu.tolist()]


class Gpu(KeptDevice):
    """Torch's meta device in the place of a GPU."""

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__(fails_at)
        self.device = torch.device("meta")


def test_tensors_on_the_host_are_exchanged_there_and_put_back() -> None:
    """At their addresses, beside a model on a device. The prepared version keeps what was live."""
    live, prepared = Scaled(1.0), Scaled(2.0)
    before = live.k_scale_cpu.data_ptr()
    exchanged = exchange_of(live, prepared, Gpu())
    exchanged.commit()
    assert (live.seen(), prepared.seen()) == (Scaled(2.0).seen(), Scaled(1.0).seen())
    assert live.k_scale_cpu.data_ptr() == before
    exchanged.rollback()
    assert live.seen() == Scaled(1.0).seen()


@pytest.mark.parametrize("fails_at", range(6))
def test_a_copy_on_the_host_that_fails_is_undone(fails_at: int) -> None:
    """Three copies for each of the two tensors; the device takes part in none."""
    live = Scaled(1.0)
    exchanged = exchange_of(live, Scaled(2.0), Gpu(fails_at))
    with pytest.raises(torch.OutOfMemoryError):
        exchanged.commit()
    exchanged.rollback()
    assert live.seen() == Scaled(1.0).seen()


def test_equal_tensors_on_the_host_are_left_alone() -> None:
    """Loading makes such constants again for each version. NaN is equal to itself: bits are compared."""
    for value in (1.0, float("nan")):
        device = Gpu()
        exchange_of(Scaled(value), Scaled(value), device).commit()
        assert device.copies == 0


@pytest.mark.parametrize("built_at", [None, torch.device("cpu")])
def test_a_tensor_on_the_wrong_side_is_refused(built_at: torch.device | None) -> None:
    """What vLLM leaves on the host must have been built there, wherever the rest was."""
    live, prepared = Scaled(1.0), Scaled(2.0, on_host="meta")
    device = Gpu()
    with pytest.raises(ValueError, match=r"^k_scale_cpu .*cpu was expected"):
        exchange(holdings(live), holdings(prepared), device, Buffer(holdings(live), device), built_at=built_at)
    prepared = Scaled(2.0)
    prepared.weight = nn.Parameter(torch.empty(2))
    with pytest.raises(ValueError, match=r"^weight .*meta was expected"):
        exchange(holdings(live), holdings(prepared), device, Buffer(holdings(live), device))


def test_the_buffer_is_given_up_and_taken_again() -> None:
    """Around a sleep."""
    live = Plain(1.0)
    buffer = Buffer(holdings(live), KeptDevice())
    buffer.release_memory()
    with pytest.raises(KeyError):
        buffer.like(live.fused)
    buffer.take()
    assert buffer.like(live.fused).shape == live.fused.shape
