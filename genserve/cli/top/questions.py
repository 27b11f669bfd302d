"""The actions of the user, and the question before each. Pure."""

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from genserve.wire.literals import PauseMode


class Kind(Enum):
    """A command. The value is its name, as it stands beside its key."""

    PAUSE = "pause"
    RESUME = "resume"
    DRAIN = "drain"


KEYS: Final = {"p": Kind.PAUSE, "r": Kind.RESUME, "d": Kind.DRAIN}


@dataclass(frozen=True, slots=True)
class Action:
    """A command with its arguments. `mode`: of a pause. `lease_ids`: what a resume ends; none = every lease, whoever
    holds it. `address`: of the replica to drain; "" = the daemon itself."""

    kind: Kind
    mode: "PauseMode" = "keep"
    lease_ids: tuple[str, ...] = ()
    address: str = ""

    @property
    def label(self) -> str:
        """The command in a few words."""
        match self.kind:
            case Kind.PAUSE:
                return f"pause ({self.mode})"
            case Kind.RESUME:
                return f"resume {', '.join(each[:8] for each in self.lease_ids) or 'all'}"
            case Kind.DRAIN:
                return f"drain {self.address or 'the daemon'}"


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer: its key, and what is done then."""

    key: str
    label: str
    action: Action


@dataclass(frozen=True, slots=True)
class Question:
    """Asked before anything is done. Every key without a choice means no."""

    text: str
    choices: tuple[Choice, ...]
