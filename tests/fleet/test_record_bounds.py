"""What is written down of a fleet has a bound where it comes in, so that a commit of weights never meets it."""

import asyncio
import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

from genserve.errors import InvalidFieldError, UnsupportedError
from genserve.fleet.desired import MAX_LORAS_BYTES
from genserve.fleet.leases import MAX_WRITTEN_BYTES
from tests.fleet.routers import hold, over, push, replica, routed
from tests.support.kept import kept
from tests.support.refusals import refuses
from tests.support.scripted_adapter import CONFIG, TENSORS

LONG_NAME = "\N{GRINNING FACE}" * 250


@pytest.mark.slow
async def test_a_pause_for_which_the_record_has_no_room_is_refused() -> None:
    """All holders have long names. Pushes under the pauses that are there pass."""
    async with routed(1) as fleet:
        with refuses(InvalidFieldError, field="holder"):
            for _ in range(MAX_WRITTEN_BYTES // 1000 + 1):
                await fleet.client.pause(no_expiry=True, holder=LONG_NAME)
        held = (await fleet.client.status()).state.pauses
        assert len(held) > 50
        assert (await fleet.client.pause(no_expiry=True, holder="me")).lease.holder == "me"
        await push(fleet.running.address, 1)
        assert hold(1, fleet.daemons[0])


async def test_adapters_that_are_loaded_at_once_have_room_together(tmp_path: Path) -> None:
    """Each for itself would fit; a push could not be committed with all of them."""
    save_file(TENSORS, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG | {"target_modules": ["q"]}))
    path = f"{tmp_path}{'/.' * 1900}"
    num = 2 * MAX_LORAS_BYTES // len(path) + 1
    async with replica() as daemon:
        daemon.engine.max_loras = num
        async with over([daemon]) as fleet:
            await fleet.until_ready()
            loads = [fleet.client.load_lora(f"adapter {number}", path) for number in range(num)]
            outcomes = await asyncio.gather(*loads, return_exceptions=True)
            refused = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
            assert (num - len(refused)) * len(path) <= MAX_LORAS_BYTES
            assert {type(each) for each in refused} == {InvalidFieldError}
            await push(fleet.running.address, 1)
            assert hold(1, daemon)


async def test_of_adapters_that_were_refused_nothing_is_kept() -> None:
    """Their names may be as long as a message."""
    async with routed(1) as fleet:
        desired = fleet.running.router.fleet.desired

        def size() -> int:
            return sum(map(len, (*kept(desired, dict), *kept(desired, set))))

        before = size()
        with refuses(UnsupportedError):
            await fleet.client.load_lora("poet" * 1000, "/nowhere")
        assert size() == before
