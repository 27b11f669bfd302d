"""What is written down of a fleet has a bound where it comes in, so that a commit of weights never meets it."""

from genserve.errors import InvalidFieldError
from genserve.fleet.leases import MAX_WRITTEN_BYTES
from tests.fleet.routers import hold, push, routed
from tests.support.refusals import refuses

LONG_NAME = "\N{GRINNING FACE}" * 250


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
