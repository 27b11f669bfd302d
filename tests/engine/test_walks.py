"""How far a request for tokens, a push and a pause go through genserve, so that no way grows unnoticed.

A bound that a change exceeds is raised with a reason in its commit; `scripts/walks` prints what is on the way.
"""

import pytest

from tests.support.walks import Walk, Walks, execute

pytestmark = pytest.mark.long("genserve")


@pytest.fixture(scope="module")
async def walks(tmp_path_factory: pytest.TempPathFactory) -> Walks:
    """All ways, each walked five times."""
    return await execute(tmp_path_factory.mktemp("walks"))


BOUNDS = {
    "generate": (30, 13),
    "push": (181, 41),
    "pause": (44, 17),
    "pause_on_router": (118, 19),
}
"""Functions and files of each way, with a few for what runs beside it on a busy machine."""


@pytest.mark.parametrize("way", BOUNDS)
def test_a_way_has_at_most_so_many_functions_and_files(walks: Walks, way: str) -> None:
    walk: Walk = getattr(walks, way)
    num_functions, num_files = BOUNDS[way]
    assert 5 < len(walk.functions) <= num_functions, walk.functions
    assert 3 < len(walk.files) <= num_files, walk.files


def test_a_token_and_a_chunk_cost_at_most_so_many_calls(walks: Walks) -> None:
    assert 1 < walks.per_token <= 15
    assert 1 < walks.per_chunk <= 15
