"""Answers while replicas come and go: whole and exact, or none, or a beginning with an error."""

import asyncio
import random
from dataclasses import replace

import pytest

from genserve.client import AsyncClient, Generation
from genserve.errors import ReplicaLostError
from tests.fleet.scripted_fleet import SETTINGS, ScriptedFleet, scripted_fleet
from tests.fleet.talking_engine import Made, continued, let_talk
from tests.support.patience import until

NUM_TOKENS = 250
PROMPTS = [[number, 7] for number in range(24)]


async def until_made(engines: list[Made], num_tokens: int) -> None:
    """Waits for so many tokens of all of them."""
    await until(lambda: sum(made.num_tokens for made in engines) >= num_tokens)


async def break_links(router: ScriptedFleet, engines: list[Made], rng: random.Random) -> None:
    """One at a time; the replica is back soon after. Counts tokens and not seconds, so that answers get on between two
    cuts, however slow the machine is."""
    while True:
        next_cut = sum(made.num_tokens for made in engines) + rng.randrange(1000, 1600)
        await until_made(engines, next_cut)
        rng.choice(router.links).cut()


async def told(client: AsyncClient, engines: list[Made], position: int, *, resume: bool) -> Generation:
    """One answer by Generate, with its error if it has one. It begins when others have got on."""
    await until_made(engines, 10 * position)
    generation = Generation()
    stream = client.stream(PROMPTS[position], max_tokens=NUM_TOKENS, text=False, resume=resume, timeout_s=50)
    try:
        async for delta in stream:
            generation.add(delta)
    except ReplicaLostError as error:
        generation.error = error
    return generation


@pytest.mark.slow
@pytest.mark.parametrize("many", [False, True], ids=["Generate", "GenerateMany"])
@pytest.mark.parametrize("resume", [False, True], ids=["lost", "resumed"])
async def test_answers_are_exact(*, many: bool, resume: bool) -> None:
    """Each token follows from those before it, and the versions tell who sampled which."""
    settings = replace(SETTINGS, wait_ready_s=20.0)
    # All serve version 2: a request goes on with weights that are not older than those of its last token.
    async with scripted_fleet(settings=settings, versions=(2, 2, 2)) as router, AsyncClient(router.address) as client:
        engines = [let_talk(daemon.engine, version) for version, daemon in enumerate(router.daemons)]
        breaking = asyncio.create_task(break_links(router, engines, random.Random(5)))
        try:
            if many:
                options = {"max_tokens": NUM_TOKENS, "text": False, "resume": resume, "stream_interval": 1}
                generations = await client.generate_many(PROMPTS, raise_errors=False, timeout_s=50, **options)  # type: ignore[arg-type]
            else:
                tellings = [told(client, engines, position, resume=resume) for position in range(len(PROMPTS))]
                generations = await asyncio.gather(*tellings)
        finally:
            breaking.cancel()
        num_versions = 0
        for prompt, generation in zip(PROMPTS, generations, strict=True):
            expected = continued(prompt, NUM_TOKENS)
            if generation.error is not None:
                assert isinstance(generation.error, ReplicaLostError) and not resume, generation.error
                assert list(generation.token_ids) == expected[: len(generation.token_ids)]
                continue
            assert list(generation.token_ids) == expected
            output = generation.sequences[0]
            spans = [(span.version, span.start, span.end) for span in output.weight_spans]
            assert [0, *(end for _, _, end in spans)] == [*(start for _, start, _ in spans), NUM_TOKENS]
            assert generation.prompt.num_tokens == generation.usage.num_prompt_tokens == len(prompt)
            assert generation.usage.num_output_tokens == NUM_TOKENS
            num_versions = max(num_versions, len(spans))
        broken = [each for each in generations if each.error is not None]
        assert num_versions > 1 if resume else broken, "no link broke in the middle of an answer"
        await until(lambda: all(member.inflight == 0 for member in router.fleet.members))
