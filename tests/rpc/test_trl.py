"""New weights through the client that has TRL's methods: all of a loop's calls are one push, or none of them counts."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from genserve.errors import ManifestMismatchError, PushRolledBackError, UnsupportedError
from genserve.integrations.trl import VLLMClient
from genserve.settings.config import ServeConfig
from tests.support.credentials import Authority
from tests.support.patience import STEP_S
from tests.support.refusals import refuses
from tests.support.scripted_daemon import Daemon, serving

METADATA = [("a", "float32", [4]), ("b", "bfloat16", [8])]


@pytest.fixture
async def client(daemon: Daemon) -> AsyncIterator[VLLMClient]:
    """One of the server, made as TRL makes it."""
    made = await asyncio.to_thread(VLLMClient, base_url=f"http://{daemon.address}", group_port=1, connection_timeout=5)
    yield made
    await asyncio.to_thread(made.close)


async def test_https_takes_the_authorities_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL makes the client, and passes it nothing of the kind."""
    authority = Authority(tmp_path)
    pair = authority.issue("127.0.0.1")
    monkeypatch.setenv("GENSERVE_CA_FILE", authority.ca_file)
    async with serving(ServeConfig(port=0, ssl_certfile=pair.cert_file, ssl_keyfile=pair.key_file)) as daemon:
        client = await asyncio.to_thread(VLLMClient, f"https://{daemon.address}", connection_timeout=STEP_S)
        await asyncio.to_thread(client.close)


class Model(torch.nn.Module):
    """A module with the tensors of the server's checkpoint."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.full((4,), value))
        self.b = torch.nn.Parameter(torch.full((8,), value, dtype=torch.bfloat16))


def live(value: float) -> dict[str, bytes]:
    """What the engine holds when it serves that."""
    return {
        name: tensor.view(torch.uint8).numpy().tobytes()
        for name, tensor in Model(value).requires_grad_(False).state_dict().items()
    }


def loop(client: VLLMClient, value: float, names: str = "ab") -> None:
    """As VLLMGeneration.sync_weights does, with memory that is gone after each call, as gathered parameters are."""
    for name, parameter in Model(value).named_parameters():
        if name in names:
            gathered = parameter.data.clone()
            client.update_named_param(name, gathered)
            gathered.zero_()


async def test_a_loop_is_applied_by_the_reset_that_follows_it(daemon: Daemon, client: VLLMClient) -> None:
    """Again and again, each time as the next version; not before."""
    await asyncio.to_thread(client.init_communicator, "cuda:0")
    for step in (1, 2, 3):
        await asyncio.to_thread(loop, client, float(step))
        assert daemon.engine.weight_version == step - 1
        await asyncio.to_thread(client.reset_prefix_cache)
        assert (daemon.engine.weight_version, daemon.engine.live) == (step, live(float(step)))
    assert daemon.engine.misuses == []
    await asyncio.to_thread(client.close_communicator)


async def test_a_reset_without_a_loop_resets_the_cache(daemon: Daemon, client: VLLMClient) -> None:
    """And applies nothing."""
    await asyncio.to_thread(client.reset_prefix_cache)
    assert daemon.engine.calls == ["reset_prefix_cache False"]


async def test_a_loop_that_broke_off_is_not_applied(daemon: Daemon, client: VLLMClient) -> None:
    """The error names what is missing; nothing of it is left for the next loop."""
    await asyncio.to_thread(loop, client, 1.0)
    await asyncio.to_thread(client.reset_prefix_cache)
    for names in ("a", "b"):
        await asyncio.to_thread(loop, client, 2.0, names)
        with refuses(ManifestMismatchError, field=f'header.manifest.tensors["{"a" if names == "b" else "b"}"]'):
            await asyncio.to_thread(client.reset_prefix_cache)
        assert (daemon.engine.weight_version, daemon.engine.live) == (1, live(1.0))
    await asyncio.to_thread(loop, client, 3.0)
    await asyncio.to_thread(client.reset_prefix_cache)
    assert daemon.engine.live == live(3.0)


async def test_a_part_is_applied_where_it_is_asked_for(daemon: Daemon, client: VLLMClient) -> None:
    """The other tensors keep their values."""
    await asyncio.to_thread(client.update_model_params, Model(1.0))
    client = await asyncio.to_thread(VLLMClient, daemon.address, partial=True)
    await asyncio.to_thread(loop, client, 2.0, "b")
    await asyncio.to_thread(client.reset_prefix_cache)
    assert daemon.engine.live == {"a": live(1.0)["a"], "b": live(2.0)["b"]}
    await asyncio.to_thread(client.close)


async def test_a_block_is_applied_at_its_end(daemon: Daemon, client: VLLMClient) -> None:
    """Whatever brings the tensors; what was left over from before is not a part of it."""

    def update(*, fails: bool) -> None:
        client.update_named_param("a", torch.zeros(4))
        with client.weight_update():
            loop(client, 1.0, "b")
            client.reset_prefix_cache()
            client.update_named_params(METADATA[:1], iter([("a", torch.ones(4))]))
            assert daemon.engine.weight_version == 0
            if fails:
                raise KeyError("left")

    with pytest.raises(KeyError, match="left"):
        await asyncio.to_thread(update, fails=True)
    await asyncio.to_thread(client.reset_prefix_cache)
    assert (daemon.engine.weight_version, daemon.engine.live) == (0, {})
    await asyncio.to_thread(update, fails=False)
    assert (daemon.engine.weight_version, daemon.engine.live) == (1, live(1.0))


async def test_what_brings_everything_is_applied_at_once(daemon: Daemon, client: VLLMClient) -> None:
    """Without a reset, and once."""
    updates: list[Callable[[], Any]] = [
        lambda: client.update_model_params(Model(1.0)),
        lambda: client.update_named_params(METADATA, Model(2.0).named_parameters()),
    ]
    for version, update in enumerate(updates, 1):
        await asyncio.to_thread(update)
        assert (daemon.engine.weight_version, daemon.engine.live) == (version, live(float(version)))
    with pytest.raises(ValueError, match=r"a\[4\] is announced, b\[8\] came"):
        await asyncio.to_thread(client.update_named_params, METADATA, reversed(list(Model(3.0).named_parameters())))
    with pytest.raises(ValueError, match="shorter"):
        await asyncio.to_thread(client.update_named_params, METADATA, iter([("a", torch.ones(4))]))
    await asyncio.to_thread(client.reset_prefix_cache)
    assert (daemon.engine.weight_version, daemon.engine.live) == (2, live(2.0))


async def test_a_push_that_fails_is_forgotten(daemon: Daemon, client: VLLMClient) -> None:
    """What is served stays; the next loop counts as if there had been none."""
    daemon.engine.fails["prepare_weights"] = RuntimeError("no room")
    await asyncio.to_thread(loop, client, 1.0)
    with pytest.raises(PushRolledBackError):
        await asyncio.to_thread(client.reset_prefix_cache)
    await asyncio.to_thread(client.reset_prefix_cache)
    assert (daemon.engine.weight_version, daemon.engine.live) == (0, {})
    await asyncio.to_thread(loop, client, 2.0)
    await asyncio.to_thread(client.reset_prefix_cache)
    assert (daemon.engine.weight_version, daemon.engine.live) == (1, live(2.0))


async def test_the_server_describes_itself_as_vllm_does(client: VLLMClient) -> None:
    """GRPOTrainer reads `logprobs_mode` when it is constructed."""
    info = await asyncio.to_thread(client.get_server_info)
    assert info["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert info["model_config"]["model"] == "scripted"
    assert info["parallel_config"]["tensor_parallel_size"] == 1
    assert info["weight_transfer_config"] is None


def test_a_prompt_without_images_has_no_image_features(client: VLLMClient) -> None:
    """One answer for each prompt, as TRL's; an image is refused."""
    assert client.image_features([None, [], None]) == [None, None, None]
    with refuses(UnsupportedError, says="images"):
        client.image_features([None, ["image"]])


async def test_what_cannot_be_served_is_refused(daemon: Daemon, client: VLLMClient) -> None:
    """Here, before anything is sent."""

    class Sharded:
        full_tensor = None

    with pytest.raises(TypeError, match=r"w: .*every rank"):
        client.update_named_param("w", Sharded())
    for images in ({"images": [["image"]]}, {"features": [{"image": 1}]}):
        with refuses(UnsupportedError, says="images"):
            client.generate([[1]], **images)
    with pytest.raises(TypeError, match="get_json_schema"):
        client.chat([[{"role": "user", "content": "hi"}]], tools=[print])
    assert await asyncio.to_thread(client.get_world_size) == 1
    assert (client.model, daemon.engine.calls) == ("scripted", [])


async def test_addresses() -> None:
    """Those of TRL; nobody is there."""
    with pytest.raises(ConnectionError, match="genserve serve"):
        await asyncio.to_thread(VLLMClient, host="127.0.0.1", server_port=1)
    with pytest.raises(ValueError, match="HOST:PORT"):
        VLLMClient("http://nowhere")


@pytest.mark.parametrize("forgets", ["init_communicator", "close_communicator", "weight_update", "update_model_params"])
async def test_what_was_left_over_is_no_part_of_the_next_update(
    daemon: Daemon, client: VLLMClient, forgets: str
) -> None:
    """A tensor of a loop that broke off would have the next one refused: the model has none of its name."""

    def update() -> None:
        client.update_named_param("left over", torch.zeros(1))
        if forgets == "weight_update":
            with client.weight_update():
                loop(client, 1.0)
        elif forgets == "update_model_params":
            client.update_model_params(Model(1.0))
            client.reset_prefix_cache()
        else:
            getattr(client, forgets)()
            loop(client, 1.0)
            client.reset_prefix_cache()

    await asyncio.to_thread(update)
    assert (daemon.engine.weight_version, daemon.engine.live) == (1, live(1.0))
