"""What follows from what was told."""

from datetime import timedelta

import pytest

from genserve.cli.top.lines import Tone
from genserve.cli.top.screen import LinkState, Screen
from genserve.client import Status
from genserve.v1 import control_pb2, types_pb2
from tests.unit.cli.top.screens import HERE, MB, fleet, lease, outcome, pushing, replica, rows, screen, status


def test_times_are_by_the_clock_of_the_daemon() -> None:
    """A countdown goes on between two answers, and ends at nothing."""
    shown = screen(status(leases=(lease("l", expires_s=130),), time_s=100))
    assert "28 s" in rows(shown, now_s=12.0)[12]
    assert " 0 s" in rows(shown, now_s=99.0)[12]


def test_a_daemon_without_a_clock_is_shown_by_that_of_this_machine() -> None:
    """As before daemons told theirs."""
    told = Status.of(control_pb2.GetStatusResponse(state=types_pb2.EngineState(weight_version=1)))
    shown = screen(told)
    assert shown.daemon_time(13.0) == HERE + timedelta(seconds=3)
    assert Screen("t", 0.0).daemon_time(1.0) is None


@pytest.mark.parametrize("time_s", [253402300799, 2**60, -(2**60)])
def test_times_that_are_none_are_shown_as_far_as_they_go(time_s: int) -> None:
    """A daemon may tell anything: the screen goes on."""
    push = pushing()
    push.begin_time.seconds = push.state_time.seconds = time_s
    for clock_s in (100, time_s):
        shown = screen(status(push, leases=(lease("l", expires_s=time_s),), time_s=clock_s))
        assert any("trainer" in row for row in rows(shown, now_s=99.0))


def test_the_age_of_a_version_is_known_from_when_it_was_seen_to_begin() -> None:
    """Before, it is at least as old as the screen; a daemon that restarts begins anew, and that is told."""
    shown = screen(status(version=42))
    assert "version 42 for over 5 s" in rows(shown, now_s=15.0)[1]
    shown.took_status(status(version=43), 16.0, HERE)
    shown.took_status(status(version=43), 18.0, HERE)
    assert "version 43 for 4 s" in rows(shown, now_s=20.0)[1]
    shown.took_status(status(version=43, instance_id="instance-2"), 21.0, HERE)
    assert "version 43 for over 1 s" in rows(shown, now_s=22.0)[1]
    assert [note.text for note in shown.notes] == ["it has restarted"]


def test_lag_counts_from_the_newest_version_that_is_served_or_on_its_way() -> None:
    """A replica may be behind what others serve; an adapter is no version."""
    shown = screen(status(pushing(version=44), version=42))
    assert (shown.served_version, shown.newest_version) == (42, 44)
    assert "2 behind version 44" in rows(shown)[1]
    adapter = pushing(version=99)
    adapter.lora_name = "poet"
    shown = screen(status(adapter, version=42))
    shown.took_replicas(fleet(replica("a:1", 41), replica("b:1", 43)))
    assert (shown.served_version, shown.newest_version) == (43, 43)
    assert [row.split()[3] for row in rows(shown, height=None) if ":1 " in row] == ["2", "0"]


def test_a_gap_in_the_history_is_when_nobody_answered() -> None:
    """The last values are not repeated."""
    shown = screen(status(tokens_per_s=10.0), status(tokens_per_s=20.0))
    shown.lost("gone", 12.0)
    shown.sample(12.0)
    shown.took_status(status(tokens_per_s=30.0), 13.0, HERE)
    shown.sample(13.0)
    assert shown.link.state is LinkState.LIVE
    assert shown.history.of("tokens_per_s") == [10.0, 20.0, None, 30.0]


def test_the_history_has_what_arrived_between_two_samples() -> None:
    """In bytes per second, over all pushes."""
    shown = screen(status(pushing("a", received_mb=0)))
    shown.took_status(status(pushing("a", received_mb=50), pushing("b", received_mb=50)), 11.0, HERE)
    shown.sample(12.0)
    assert shown.history.of("pushed_bytes_per_s")[-1] == 50 * MB


def test_bytes_of_a_push_that_was_applied_have_all_arrived() -> None:
    """Those of the last moment were never told. Of one that has failed nobody knows."""
    for result, arrived_mb in ((outcome(), 400), (outcome(failed="x"), 100), (None, 100)):
        shown = screen(status(pushing(received_mb=100)))
        (gone,) = shown.took_status(status(), 11.0, HERE)
        shown.push_ended(gone, result)
        assert shown.transfers.arrived_bytes == arrived_mb * MB


def test_the_time_of_a_connection_counts_from_its_beginning() -> None:
    """Neither further answers nor further failures begin it anew."""
    shown = screen(status(), status())
    assert shown.link.since_s == 10.0
    shown.lost("a", 20.0)
    shown.lost("b", 30.0)
    assert (shown.link.since_s, shown.link.reason) == (20.0, "b")
    shown.took_status(status(), 40.0, HERE)
    assert shown.link.since_s == 40.0


def test_the_chosen_replica_stays_chosen_when_others_come_and_go() -> None:
    """If it goes itself, the first one is."""
    shown = screen(status())
    shown.select(1)
    assert shown.selected == ""
    shown.took_replicas(fleet(replica("a:1"), replica("b:1"), replica("c:1")))
    assert shown.selected == "a:1"
    shown.select(1)
    shown.select(-1)
    shown.select(1)
    assert shown.selected == "b:1"
    shown.took_replicas(fleet(replica("b:1"), replica("c:1")))
    assert shown.selected == "b:1"
    shown.select(9)
    assert shown.selected == "c:1"
    shown.select(-9)
    shown.took_replicas(fleet(replica("c:1")))
    assert shown.selected == "c:1"


def test_notes_and_outcomes_are_few() -> None:
    """However long it runs."""
    shown = screen(status(pushing()))
    (gone,) = shown.took_status(status(), 11.0, HERE)
    for number in range(100):
        shown.note(str(number), Tone.PLAIN, 0.0)
        shown.push_ended(gone, None)
        shown.own_leases.append(str(number))
    assert max(map(len, (shown.notes, shown.ended, shown.own_leases))) <= 20
    assert shown.notes[-1].text == "99"
