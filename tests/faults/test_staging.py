"""Pushes that wait to be committed, pushes of a part, and weights that are pulled."""

from pathlib import Path

import pytest
import torch

from genserve.errors import ManifestMismatchError, PushNotFoundError, PushRolledBackError
from tests.support import models
from tests.support.faulty_worker import Fault
from tests.support.subject import Subject

Tensors = dict[str, torch.Tensor]
LONG = pytest.mark.long("genserve/weights", "genserve/worker")


async def test_a_staged_push_waits_until_it_is_committed(subject: Subject) -> None:
    """Nothing changes before; a repeated commit answers the same."""
    version = await subject.oracle.served_version()
    staged = await subject.push("b", action="stage", push_id="staged")
    assert (staged.push.state, staged.applied) == ("staged", None)
    assert await subject.oracle.served_version() == version
    first = await subject.client.commit_push("staged")
    again = await subject.client.commit_push("staged")
    assert first.applied == again.applied and first.applied is not None
    assert first.applied.active_version == version + 1
    await subject.oracle.holds((version + 1, "b"))


async def test_a_discarded_push_is_gone(subject: Subject) -> None:
    """Its bytes are freed at once, and it cannot be committed."""
    version = await subject.oracle.served_version()
    await subject.push("b", action="stage", push_id="unwanted", staging_ttl_s=3600.0)
    await subject.client.discard_push("unwanted")
    for call in (subject.client.commit_push, subject.client.discard_push, subject.client.get_push):
        with pytest.raises(PushNotFoundError):
            await call("unwanted")
    await subject.oracle.holds((version, "a"))


async def test_a_staged_push_that_fails_can_be_committed_again(subject: Subject) -> None:
    """Its bytes stay."""
    version = await subject.oracle.served_version()
    await subject.push("b", action="stage", push_id="second try")
    subject.order(Fault("load", after=1))
    with pytest.raises(PushRolledBackError):
        await subject.client.commit_push("second try")
    subject.release()
    assert (await subject.client.commit_push("second try")).applied is not None
    await subject.oracle.holds((version + 1, "b"))


def part_of(tensors: Tensors, prefix: str) -> Tensors:
    """Those tensors whose name begins so."""
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@pytest.mark.parametrize(
    "prefix",
    [
        pytest.param("model.layers.1.self_attn.k_proj.weight", id="a part of a fused tensor"),
        pytest.param("model.embed_tokens", id="the tied embedding"),
        pytest.param("model.norm", id="a norm", marks=LONG),
        pytest.param("model.layers.0.", id="a layer", marks=LONG),
    ],
)
async def test_a_partial_push_is_completed_from_what_is_served(
    subject: Subject, checkpoints: dict[str, Path], prefix: str
) -> None:
    """What is live then equals a full push of the merged checkpoint: every digest and every token."""
    a, part = models.load_tensors(checkpoints["a"]), part_of(models.load_tensors(checkpoints["b"]), prefix)
    version = await subject.oracle.served_version()
    await subject.client.push_weights({**a, **part}, version=version + 1)
    whole = await subject.oracle.likeness()
    assert whole.digests != subject.oracle.known["a"].digests
    await subject.push("a", version=version + 2)
    await subject.client.push_weights(part, version=version + 3, partial=True)
    assert await subject.oracle.likeness() == whole
    # Parts add up: the rest of b makes it b.
    rest = {name: tensor for name, tensor in models.load_tensors(checkpoints["b"]).items() if name not in part}
    subject.oracle.committed[version + 4] = "b"
    await subject.client.push_weights(rest, version=version + 4, partial=True)
    await subject.oracle.holds((version + 4, "b"))


async def test_a_partial_push_that_fails_changes_nothing(subject: Subject, checkpoints: dict[str, Path]) -> None:
    """Neither the live weights nor the bytes that the next partial push is completed from."""
    b = models.load_tensors(checkpoints["b"])
    version = await subject.oracle.served_version()
    subject.order(Fault("commit", after=3), Fault("rollback", after=0))
    with pytest.raises(PushRolledBackError):
        await subject.client.push_weights(part_of(b, "model.layers.0."), version=version + 1, partial=True, push_id="p")
    subject.release()
    await subject.client.discard_push("p")
    pulled = (await subject.client.pull_weights()).state_dict()
    assert all(torch.equal(pulled[name], tensor) for name, tensor in models.load_tensors(checkpoints["a"]).items())
    await subject.oracle.holds((version, "a"))


async def test_an_unknown_tensor_is_refused_in_a_part_too(subject: Subject) -> None:
    """And an empty part is none."""
    version = await subject.oracle.served_version() + 1
    async with subject.refuses(ManifestMismatchError):
        await subject.client.push_weights({"model.norm.bias": torch.zeros(128)}, version=version, partial=True)


@pytest.mark.parametrize("name", [pytest.param("a", marks=LONG), "b"])
async def test_what_was_pushed_can_be_pulled(subject: Subject, checkpoints: dict[str, Path], name: str) -> None:
    """Bit for bit, and what was pulled can be pushed."""
    version = (await subject.push(name)).push.weight_version
    pulled = await subject.client.pull_weights(version=version)
    pushed = models.load_tensors(checkpoints[name])
    state = pulled.state_dict()
    assert pulled.weight_version == version
    assert state.keys() == pushed.keys()
    for key, tensor in pushed.items():
        assert state[key].dtype == tensor.dtype
        assert torch.equal(state[key], tensor)
    subject.oracle.committed[version + 1] = name
    await subject.client.push_weights(pulled.tensors, version=version + 1)
    await subject.oracle.holds((version + 1, name))
