"""Models that draft with layers of their own checkpoint: what drafts is pushed with what it drafts for."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from genserve.client import AsyncClient
from genserve.errors import ManifestMismatchError
from tests.engine.outputs import next_version, state_of
from tests.support import models
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.matrix import kind_named

pytestmark = pytest.mark.long(
    "genserve/worker",
    "genserve/weights/checkpoint",
    "genserve/engine/vllm/start",
    "tests/support/matrix.py",
    "tests/support/kinds.py",
)

KIND = kind_named("drafts")
Digests = dict[str, str]


class Drafting:
    """A daemon on checkpoint a, and what another one shows that was started on b."""

    def __init__(self, process: DaemonProcess, client: AsyncClient, a: Path, b: Path) -> None:
        self.process = process
        self.client = client
        self.a = models.load_tensors(a)
        self.b = models.load_tensors(b)

    async def push(self, tensors: dict[str, object]) -> None:
        """The next version."""
        await self.client.push_weights(tensors, version=await next_version(self.client))


@pytest.fixture(scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Drafting, tuple[object, Digests]]]:
    """The daemon, and greedy outputs and digests of a cold start of b, which drafts as well."""
    directory = tmp_path_factory.mktemp("drafts")
    a, b = KIND.make(directory)
    async with AsyncExitStack() as stack:
        daemons = []
        for checkpoint in (a, b):
            flags = ["--model", str(checkpoint), *SMALL_ENGINE, *KIND.flags]
            daemons.append(DaemonProcess(flags, directory / f"stderr_{checkpoint.name}"))
            stack.callback(daemons[-1].end)
        served, started_on_b = [await stack.enter_async_context(_client(each)) for each in daemons]
        cold = await state_of(started_on_b)
        daemons[1].end()
        yield Drafting(daemons[0], served, a, b), cold


def _client(daemon: DaemonProcess) -> AsyncClient:
    return AsyncClient(daemon.wait_serving().address)


def drafting(digests: Digests) -> Digests:
    """Those of what drafts."""
    from genserve.worker.model.draft import PREFIX  # imports vLLM

    return {name: digest for name, digest in digests.items() if name.split()[1].startswith(PREFIX)}


async def test_what_drafts_equals_a_cold_start(pair: tuple[Drafting, tuple[object, Digests]]) -> None:
    """There and back: greedy tokens, and the digest of every weight of both models."""
    subject, cold = pair
    first = await state_of(subject.client)
    assert len(drafting(cold[1]).items() - drafting(first[1]).items()) > 10, "the same drafts: nothing is proven"
    for tensors, expected in ((subject.b, cold), (subject.a, first)):
        await subject.push(tensors)
        assert await state_of(subject.client) == expected
    assert "draft-model" not in subject.process.stderr


async def test_a_push_without_weights_for_it_is_refused(pair: tuple[Drafting, tuple[object, Digests]]) -> None:
    """As every push that lacks a tensor of the checkpoint, by its name; both models stay what they were."""
    subject, _ = pair
    before = await state_of(subject.client)
    with pytest.raises(ManifestMismatchError, match=r"model\.mtp_layers\.0\.input_proj\.weight"):
        await subject.push({name: tensor for name, tensor in subject.b.items() if "input_proj" not in name})
    assert await state_of(subject.client) == before
