"""When a transfer that breaks is tried again."""

from genserve.client.weights.resumes import MIN_RESUMES, RESUME_TIMEOUT_S, Resumes


def test_a_transfer_without_progress_ends_when_number_and_time_are_used_up() -> None:
    """Neither alone: attempts may take minutes, or fail within milliseconds."""
    now_s = 0.0
    resumes = Resumes(lambda: now_s)
    for _ in range(MIN_RESUMES):
        assert resumes.next_pause_s() is not None
        now_s += RESUME_TIMEOUT_S
    assert resumes.next_pause_s() is None
    assert resumes.num_resumes == MIN_RESUMES


def test_pauses_grow_and_fill_the_time() -> None:
    now_s, pauses_s = 0.0, []
    resumes = Resumes(lambda: now_s)
    while (pause_s := resumes.next_pause_s()) is not None:
        pauses_s.append(pause_s)
        now_s += pause_s
    assert RESUME_TIMEOUT_S <= sum(pauses_s) < 2 * RESUME_TIMEOUT_S
    assert pauses_s == sorted(pauses_s)


def test_progress_begins_the_count_anew() -> None:
    now_s = 0.0
    resumes = Resumes(lambda: now_s)
    for _ in range(3 * MIN_RESUMES):
        first_s = resumes.next_pause_s()
        now_s += RESUME_TIMEOUT_S
        resumes.progress()
    assert first_s == Resumes(lambda: now_s).next_pause_s()
