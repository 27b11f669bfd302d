"""The thread that prepares and frees versions."""

import os
import threading

import pytest

from genserve.worker.background import Background

CPUS = sorted(os.sched_getaffinity(0))


def test_work_is_done_in_order_and_by_one_thread() -> None:
    """So that what one push has freed is there for the next one: memory belongs to threads."""
    background, done = Background(CPUS), list[tuple[int, int]]()
    for number in range(100):
        background.do(lambda number=number: done.append((number, threading.get_native_id())))  # type: ignore[misc]
    assert background.wait(30)
    assert [number for number, _ in done] == list(range(100))
    assert len({thread for _, thread in done}) == 1
    assert done[0][1] != threading.get_native_id()


def test_work_that_fails_is_logged_and_the_next_is_done(caplog: pytest.LogCaptureFixture) -> None:
    """A report that cannot be sent must not end pushes for ever."""
    background = Background(CPUS)

    def fail() -> None:
        raise OSError("no socket")

    background.do(fail)
    assert background.wait(30)
    assert "no socket" in caplog.text


def test_a_wait_for_work_that_hangs_ends() -> None:
    """The caller is the live model's thread."""
    background, hangs = Background(CPUS), threading.Event()
    background.do(lambda: hangs.wait(30) and None)
    assert not background.wait(0.05)
    hangs.set()
    assert background.wait(30)


def test_it_may_use_the_cpus_that_it_is_given() -> None:
    """vLLM binds the thread that makes it, and new threads inherit that."""
    background, seen = Background(CPUS[:1]), list[set[int]]()
    background.do(lambda: seen.append(os.sched_getaffinity(0)))
    assert background.wait(30)
    assert seen == [{CPUS[0]}]
    assert os.sched_getaffinity(0) == set(CPUS)


def test_work_whose_turn_does_not_come_is_given_up() -> None:
    """And not done later; other work is."""
    background, hangs, done = Background(CPUS), threading.Event(), list[str]()
    background.do(lambda: hangs.wait(30) and None)
    late = threading.Event()
    background.do_within(0.05, lambda: done.append("late"), late.set)
    assert late.wait(30)
    background.do_within(60, lambda: done.append("in time"), lambda: done.append("given up"))
    hangs.set()
    assert background.wait(30)
    assert done == ["in time"]


def test_work_that_has_begun_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes."""
    background, done, began, over = Background(CPUS), list[str](), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        over.wait(30)
        done.append("done")

    class Late(threading.Timer):
        """Whose time is over when the work has begun, and not before."""

        def run(self) -> None:
            assert began.wait(30)
            self.function()
            over.set()

    monkeypatch.setattr(threading, "Timer", Late)
    background.do_within(0.01, work, lambda: done.append("given up"))
    assert over.wait(30) and background.wait(30)
    assert done == ["done"]


def test_work_that_may_wait_is_not_given_up() -> None:
    """Until it may not any more."""
    background, hangs, said, impatient = Background(CPUS), threading.Event(), list[str](), threading.Event()
    asked, late = threading.Semaphore(0), threading.Event()

    def may_wait() -> bool:
        asked.release()
        return not impatient.is_set()

    def give_up() -> None:
        said.append("late")
        late.set()

    background.do(lambda: hangs.wait(30) and None)
    background.do_within(0.01, lambda: said.append("done"), give_up, may_wait=may_wait)
    for _ in range(3):
        assert asked.acquire(timeout=30)
    assert said == []
    impatient.set()
    assert late.wait(30)
    hangs.set()
    assert background.wait(30)
    assert said == ["late"]
