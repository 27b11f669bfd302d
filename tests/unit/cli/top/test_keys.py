"""What a key does: nothing is done before it is confirmed."""

import pytest

from genserve.cli.top.keys import pressed
from genserve.cli.top.questions import Action, Kind
from genserve.cli.top.screen import Screen
from tests.unit.cli.top.screens import fleet, info, lease, replica, rows, screen, status


def router() -> Screen:
    """With two replicas."""
    shown = screen(status())
    shown.took_replicas(fleet(replica("a:1"), replica("b:1")))
    return shown


@pytest.mark.parametrize(("key", "mode"), [("k", "keep"), ("w", "wait"), ("a", "abort")])
def test_a_pause_asks_what_happens_to_requests(key: str, mode: str) -> None:
    """And for how long."""
    shown = Screen("t", 0.0, pause_ttl_s=90.0)
    assert pressed(shown, "p", 1.0) is None
    assert rows(shown)[-2:] == [
        "Pause for 90 s? What happens to the requests in flight:",
        "k keep them  w wait for them  a abort them  n no",
    ]
    assert pressed(shown, key, 1.0) == Action(Kind.PAUSE, mode)  # type: ignore[arg-type]
    assert shown.question is None


@pytest.mark.parametrize("key", ["n", "escape", "enter", "p", "q", "y", "r"])
def test_every_other_key_means_no(key: str) -> None:
    """Also the one that has asked."""
    shown = Screen("t", 0.0)
    pressed(shown, "p", 1.0)
    assert pressed(shown, key, 1.0) is None
    assert shown.question is None


def test_a_resume_ends_the_own_lease_or_that_of_others_by_another_key() -> None:
    """Their holders are named."""
    shown = screen(status(leases=(lease("mine", "me"), lease("theirs", "trainer"))))
    shown.own_leases.append("mine")
    pressed(shown, "r", 1.0)
    assert rows(shown)[-1] == "y end your lease  f end all 2, held by me, trainer  n no"
    assert pressed(shown, "y", 1.0) == Action(Kind.RESUME, lease_ids=("mine",))
    pressed(shown, "r", 1.0)
    assert pressed(shown, "f", 1.0) == Action(Kind.RESUME)


def test_caller_without_a_lease_can_only_end_all_leases() -> None:
    """A lease that has ended is not one's own any more."""
    shown = screen(status(leases=tuple(lease(str(number), f"h{number}") for number in range(5))))
    shown.own_leases.append("mine")
    pressed(shown, "r", 1.0)
    assert rows(shown)[-1] == "f end all 5, held by h0, h1, h2, ...  n no"
    assert pressed(shown, "y", 1.0) is None


def test_what_cannot_be_done_is_told_and_not_asked() -> None:
    """No lease to end, no replica to drain."""
    shown = screen(status())
    for key, told in (("r", "no lease is held"), ("d", "not known yet whether this is a daemon or a router")):
        assert pressed(shown, key, 1.0) is None
        assert shown.question is None and told in shown.notes[-1].text
    shown.took_replicas(fleet())
    assert pressed(shown, "d", 1.0) is None
    assert "no replica" in shown.notes[-1].text


def test_a_drain_is_of_the_chosen_replica() -> None:
    """The one that was chosen when it was asked."""
    shown = router()
    pressed(shown, "down", 1.0)
    pressed(shown, "d", 1.0)
    assert rows(shown)[-2] == "Drain b:1? It gets no new requests."
    assert pressed(shown, "y", 1.0) == Action(Kind.DRAIN, address="b:1")


def test_a_daemon_is_shut_down_itself() -> None:
    """There is nothing to choose."""
    shown = screen(status())
    shown.took_info(info())
    pressed(shown, "d", 1.0)
    assert rows(shown)[-2:] == ["Shut this daemon down?", "y let its requests end, and then its process  n no"]
    assert pressed(shown, "y", 1.0) == Action(Kind.DRAIN)
    assert Action(Kind.DRAIN).label == "drain the daemon"


def test_a_key_that_was_refused_says_so() -> None:
    """It can be tried again: another token may be in force by now."""
    shown = router()
    shown.refused.add("pause")
    assert rows(shown)[-1].startswith("p pause (not allowed)  r resume  d drain")
    assert pressed(shown, "p", 1.0) is None and shown.question is not None


def test_commands_without_an_answer_are_few() -> None:
    """A daemon that is slow is not asked again and again."""
    shown = router()
    shown.pending += ["pause (keep)"] * 4
    assert pressed(shown, "p", 1.0) is None
    assert shown.question is None and "4 commands are not answered yet" in shown.notes[-1].text
    assert "pause (keep) ..." in rows(shown, height=None)
