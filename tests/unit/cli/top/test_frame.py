"""The whole screen, as text."""

from dataclasses import replace

import pytest

from genserve.cli.top.frame import Part, frame, shared, window
from genserve.cli.top.keys import pressed
from genserve.cli.top.lines import Tone, line, plain, width_of
from genserve.cli.top.screen import Screen
from genserve.v1 import types_pb2, weights_pb2
from tests.unit.cli.top.screens import HERE, fleet, info, lease, outcome, pushing, replica, rows, screen, status

PAUSED = types_pb2.PHASE_PAUSED


def busy_router() -> Screen:
    """A router during a push, with pauses, three replicas and an answer to the user."""
    pushes = (pushing(received_mb=100), pushing("step-44", 44, 400, state=weights_pb2.PUSH_STATE_STAGED))
    leases = (lease("lease-1"), lease("lease-2", "ops@host", None))
    shown = screen(*(status(*pushes, leases=leases, phase=PAUSED) for _ in range(2)))
    shown.took_info(info())
    first = replica("10.0.0.1:1", pushes=(pushing(received_mb=100),))
    others = replica("10.0.0.2:1", 41), replica("10.0.0.3:1", 42, "UNHEALTHY", "it has said nothing for 5 s")
    shown.took_replicas(fleet(first, *others))
    shown.note("pause (keep): it is paused", Tone.GOOD, 10.0)
    return shown


def test_80_columns_and_24_rows_are_enough_for_all_of_it() -> None:
    """Load with history, pushes with progress, leases with countdown, replicas with versions and lag, notes, keys."""
    assert rows(busy_router(), now_s=12.0) == [
        "genserve top 127.0.0.1:50051  smol, cpu                                   ● live",
        "PAUSED  version 42 for over 2 s, 2 behind version 44, 2 of 3 repl…  run instance",
        "tokens/s        1,234                                             ██   max 1,234",
        "running            64                                             ██      max 64",
        "waiting             3                                             ██       max 3",
        "KV cache          45%                                             ▄▄",
        "prefix hits       12%                                             ▂▂",
        "push GB/s        0.00                                              ▁    max 0.00",
        "── pushes ──────────────────────────────────────────────────────────────────────",
        "PUSH    VERSION STATE                          BYTES     RATE   FOR STREAMS",
        "step-43 v43     receiving ██░░░░░░░░  25% 100/400 MB 0.0 MB/s 3.0 s       2",
        "step-44 v44     staged    ██████████ 100% 400/400 MB        - 3.0 s       2",
        "── pauses ──────────────────────────────────────────────────────────────────────",
        "HOLDER   MODE      LEFT LEASE",
        "trainer  keep      29 s lease-1",
        "ops@host keep no expiry lease-2",
        "── replicas ────────────────────────────────────────────────────────────────────",
        " REPLICA    STATE     VERSION LAG RUN WAIT  KV TOK/S PUSH          HITS",
        ">10.0.0.1:1 ready          42   0  32    1 40%   600 receiving 25%   0%",
        " 10.0.0.2:1 ready          41   1  32    1 40%   600                 0%",
        " 10.0.0.3:1 unhealthy      42   0  32    1 40%   600                 0%",
        "── notes ───────────────────────────────────────────────────────────────────────",
        "2 s ago: pause (keep): it is paused",
        "p pause  r resume  d drain  ↑↓ replica  s save SVG  q quit",
    ]


def test_a_wider_screen_shows_more() -> None:
    """Why a replica gets no requests."""
    assert any("it has said nothing for 5 s" in row for row in rows(busy_router(), 130))


@pytest.mark.parametrize(("width", "height"), [(1, 1), (7, 9), (80, 2), (80, 24), (200, 60)])
@pytest.mark.parametrize("key", ["", "d"])
def test_no_frame_is_larger_than_the_screen(width: int, height: int, key: str) -> None:
    """Its last line is that of the keys, or the answers to a question."""
    shown = busy_router()
    pressed(shown, key, 11.0)
    lines = frame(shown, width, height, 11.0)
    assert len(lines) == height
    assert max(map(width_of, lines)) <= width
    assert plain(lines[-1:])[:1] in "pkyfn…"


def test_what_nobody_holds_or_sends_takes_one_row() -> None:
    """A daemon has no replicas, and no key to drain one."""
    assert rows(screen(status()), height=None)[8:] == [
        *("── pushes ".ljust(80, "─"), "none", "── pauses ".ljust(80, "─"), "none"),
        "p pause  r resume  s save SVG  q quit",
    ]


@pytest.mark.parametrize(
    ("model", "said"), [("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"), ("/models/qwen/", "qwen"), ("", "")], ids=str
)
def test_a_model_is_shown_by_its_name(model: str, said: str) -> None:
    """Of a directory the last part is enough."""
    shown = screen(status())
    shown.took_info(replace(info(), model=model))
    assert rows(shown)[0].startswith(f"genserve top 127.0.0.1:50051  {said}, cpu ")


def test_before_the_first_answer_nothing_is_claimed() -> None:
    """There are no numbers."""
    shown = rows(Screen("unix:/d.sock", 10.0), now_s=13.0)
    assert shown[0].endswith("connecting, 3 s")
    assert shown[1] == "waiting for the first answer"
    assert shown[2].split() == ["tokens/s", "-", "max", "0"]


def test_a_lost_daemon_is_shown_as_lost_and_what_it_told_stays() -> None:
    """With the reason, for as long as it lasts."""
    shown = screen(status(pushing(received_mb=100)))
    shown.lost("UNAVAILABLE: no daemon answers at 127.0.0.1:50051", 11.0)
    shown.lost("UNAVAILABLE: nobody", 15.0)
    told = rows(shown, now_s=20.0)
    assert told[0].endswith("● lost")
    assert told[1] == "lost for 9 s: UNAVAILABLE: nobody"
    assert told[2].split()[1] == "-"
    assert any(row.startswith("step-43") for row in told)


def test_the_outcome_of_a_push_stays_for_a_while() -> None:
    """What was applied with its times, what has failed with its reason, and what nobody knows of any more."""
    shown = screen(status(pushing(received_mb=100)))
    (gone,) = shown.took_status(status(version=43), 11.0, HERE)
    shown.push_ended(gone, None)
    shown.push_ended(gone, outcome(failed="a shape is wrong"))
    shown.push_ended(gone, outcome())
    assert rows(shown, 100)[9:12] == [
        "step-43  v43  applied  400 MB  2.00 GB/s  paused 8 ms  receive 200 ms  prepare 1.5 s",
        "step-43  v43  failed  400 MB  a shape is wrong",
        "step-43  v43  ended",
    ]


def test_what_a_terminal_would_obey_never_reaches_it() -> None:
    """Neither in the name of a push nor in that of a holder."""
    shown = screen(status(pushing("\x1b]0;x\x07"), leases=(lease("l", "\x1b[2J"),)))
    assert all(row.isprintable() for row in rows(shown))


def test_what_a_lost_daemon_told_is_greyed() -> None:
    """All but who it is and why it is lost; while it answers, tones tell something."""
    shown = screen(status(pushing(received_mb=100)))
    assert {span.tone for spans in frame(shown, 80, 24, 10.0)[2:-1] for span in spans} > {Tone.GOOD, Tone.GRAPH}
    shown.lost("gone", 11.0)
    lines = frame(shown, 80, 24, 12.0)
    assert {span.tone for spans in lines[2:-1] for span in spans} == {Tone.DIM}
    assert Tone.BAD in {span.tone for span in lines[1]}


def test_of_many_replicas_the_chosen_one_is_shown_under_the_titles() -> None:
    """With the number of those that there is no room for."""
    shown = screen(status())
    shown.took_replicas(fleet(*(replica(f"10.0.0.{number:02}:1") for number in range(40))))
    shown.select(30)
    table = rows(shown)[-12:-1]
    assert table[0].startswith("── replicas") and table[1].startswith(" REPLICA")
    assert table[-2].startswith(">10.0.0.30:1") and table[-1] == "… 32 more"


def test_replicas_that_are_not_told_are_said_to_be_refused() -> None:
    """A router without a replica says that it has none."""
    shown = screen(status())
    shown.replicas_problem = "PERMISSION_DENIED: WatchReplicas needs the role operator"
    assert rows(shown, height=None)[-3:-1] == ["── replicas ".ljust(80, "─"), shown.replicas_problem]
    shown.took_replicas(fleet())
    assert rows(shown, height=None)[-2] == "no replica belongs to the fleet"


def test_the_rate_of_all_pushes_is_that_of_those_that_are_received() -> None:
    """One that waits has the rate that it had, and brings nothing any more."""
    shown = screen(status(pushing("a"), pushing("b")))
    staged = weights_pb2.PUSH_STATE_STAGED
    shown.took_status(status(pushing("a", received_mb=300), pushing("b", received_mb=200), time_s=101), 11.0, HERE)
    assert rows(shown)[7].split()[2] == "0.50"
    b = pushing("b", received_mb=400, state=staged)
    shown.took_status(status(pushing("a", received_mb=400), b, time_s=102), 12.0, HERE)
    assert rows(shown)[7].split()[2] == "0.20"


def test_what_is_asleep_is_reported() -> None:
    """Part by part; without a newer version nothing is behind."""
    told = status(phase=types_pb2.PHASE_SLEEPING)
    shown = screen(replace(told, state=replace(told.state, asleep_tags=["scheduling", "weights"])))
    assert rows(shown)[1].startswith("SLEEPING  version 42 for over 0 s, asleep: scheduling, weights   ")


@pytest.mark.parametrize(
    ("room", "given"),
    [(0, [0, 0, 0]), (2, [1, 1, 0]), (5, [2, 2, 1]), (6, [2, 3, 1]), (9, [2, 6, 1]), (99, [2, 9, 1])],
)
def test_parts_get_their_least_rows_first_and_then_one_each_in_turn(room: int, given: list[int]) -> None:
    """Nobody gets more than it wants."""
    assert shared([2, 9, 1], [2, 2, 2], room) == given


def test_of_many_rows_those_around_the_chosen_one_are_shown() -> None:
    """Under their titles, with the number of those that are missing."""
    many = [line(str(number)) for number in range(10)]

    def shown(count: int, focus: int) -> str:
        return plain(window(Part("replicas", many, 4, 1, focus), count)).replace("\n", " ")

    assert shown(10, 1) == "0 1 2 3 4 5 6 7 8 9"
    assert shown(5, 1) == "0 1 2 3 … 6 more"
    assert shown(5, 6) == "0 4 5 6 … 6 more"
    assert shown(5, 9) == "0 7 8 9 … 6 more"
    assert shown(1, 9) == "0"
