"""The action of a key: a question, an answer to one, or the choice of a replica. Pure."""

from typing import TYPE_CHECKING, Final

from genserve.cli.top.lines import Tone
from genserve.cli.top.questions import KEYS, Action, Choice, Kind, Question
from genserve.cli.top.screen import Screen

if TYPE_CHECKING:
    from genserve.wire.literals import PauseMode

_STEPS: Final = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -10, "pagedown": 10}
_MODES: "Final[dict[str, tuple[PauseMode, str]]]" = {
    "k": ("keep", "keep them"),
    "w": ("wait", "wait for them"),
    "a": ("abort", "abort them"),
}
_MAX_PENDING: Final = 4
_MAX_NAMED: Final = 3


def pressed(screen: Screen, key: str, now_s: float) -> Action | None:
    """The action after this key; None = nothing."""
    if screen.question is not None:
        question, screen.question = screen.question, None
        return next((choice.action for choice in question.choices if choice.key == key), None)
    if key in _STEPS:
        screen.select(_STEPS[key])
    elif key in KEYS:
        if len(screen.pending) >= _MAX_PENDING:
            screen.note(f"{len(screen.pending)} commands are not answered yet", Tone.WARN, now_s)
            return None
        screen.question = _question(screen, KEYS[key], now_s)
    return None


def _question(screen: Screen, kind: Kind, now_s: float) -> Question | None:
    match kind:
        case Kind.PAUSE:
            choices = tuple(Choice(key, label, Action(kind, mode)) for key, (mode, label) in _MODES.items())
            return Question(f"Pause for {screen.pause_ttl_s:g} s? What happens to the requests in flight:", choices)
        case Kind.RESUME:
            return _resume(screen, now_s)
        case Kind.DRAIN:
            return _drain(screen, now_s)


def _resume(screen: Screen, now_s: float) -> Question | None:
    leases = [] if screen.status is None else screen.status.state.pauses
    if not leases:
        screen.note("nothing to resume: no lease is held", Tone.WARN, now_s)
        return None
    own = screen.held_leases
    holders = list(dict.fromkeys(lease.holder or "nobody named" for lease in leases))
    named = ", ".join(holders[:_MAX_NAMED]) + (", ..." if len(holders) > _MAX_NAMED else "")
    choices = [
        Choice("y", "end your lease" if len(own) == 1 else "end your leases", Action(Kind.RESUME, lease_ids=tuple(own)))
    ]
    everybody = Choice("f", f"end all {len(leases)}, held by {named}", Action(Kind.RESUME))
    return Question("Resume? Generation goes on when no lease is left.", (*(choices if own else ()), everybody))


def _drain(screen: Screen, now_s: float) -> Question | None:
    if screen.is_daemon:
        end = Choice("y", "let its requests end, and then its process", Action(Kind.DRAIN))
        return Question("Shut this daemon down?", (end,))
    if not screen.is_router:
        screen.note("cannot drain: it is not known yet whether this is a daemon or a router", Tone.WARN, now_s)
        return None
    if not screen.selected:
        screen.note("nothing to drain: the router has no replica", Tone.WARN, now_s)
        return None
    yes = Choice(
        "y", "drain it, and remove it when its requests have ended", Action(Kind.DRAIN, address=screen.selected)
    )
    return Question(f"Drain {screen.selected}? It gets no new requests.", (yes,))
