"""Columns out of vLLM's flat log-probabilities."""

from vllm.logprobs import FlatLogprobs, append_logprobs_for_next_position

from genserve.engine.vllm.requests.logprobs import columns


def flat(*positions: tuple[list[int], list[float], int]) -> FlatLogprobs:
    """As vLLM builds them: the sampled token, then the alternatives; and the sampled token's rank."""
    made = FlatLogprobs()
    for token_ids, logprobs, rank in positions:
        append_logprobs_for_next_position(made, token_ids, logprobs, [None] * len(token_ids), rank, len(token_ids) - 1)
    return made


ROWS = flat(([7, 7, 8], [-0.1, -0.1, -2.0], 1), ([9, 3, 4], [-5.0, -0.2, -0.3], 11))


def test_the_sampled_token_stands_apart_from_the_alternatives() -> None:
    """Whether or not it is one of them."""
    got = columns(ROWS, 2)
    assert (got.sampled, got.ranks, got.width) == ([-0.1, -5.0], [1, 11], 2)
    assert got.token_ids == [7, 8, 3, 4]
    assert got.values == [-0.1, -2.0, -0.2, -0.3]


def test_rows_that_a_slow_reader_made_dictionaries_of_give_the_same_columns() -> None:
    """vLLM merges unread outputs through dictionaries, in which a sampled token that is an alternative stands once."""
    merged = FlatLogprobs()
    merged.extend(ROWS)
    assert len(merged.token_ids) < len(ROWS.token_ids)
    assert columns(merged, 2) == columns(ROWS, 2)


def test_width_zero_gives_the_sampled_tokens_alone() -> None:
    """No alternatives were asked for."""
    got = columns(flat(([7], [-0.1], 1), ([9], [-5.0], 11)), 0)
    assert (got.sampled, got.ranks, got.width, got.token_ids, got.values) == ([-0.1, -5.0], [1, 11], 0, [], [])


def test_the_first_token_of_a_prompt_has_no_row() -> None:
    """Nothing was predicted there."""
    prompt = FlatLogprobs()
    prompt.append(None)
    prompt.extend(ROWS)
    assert columns(prompt, 2) == columns(ROWS, 2)
