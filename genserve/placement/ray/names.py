"""The names of actors, by which a router finds them. Pure."""

from typing import Final

_PREFIX: Final = "replica-"


def namespace_of(fleet: str) -> str:
    """Where the actors of a fleet have their names: each fleet has a namespace of Ray's to itself."""
    return f"genserve-{fleet}"


def actor_name(number: int) -> str:
    """The name of the actor of a replica."""
    return f"{_PREFIX}{number}"


def replica_number(name: str) -> int | None:
    """The number of the replica whose actor has this name; None for any other actor."""
    digits = name.removeprefix(_PREFIX)
    return int(digits) if name.startswith(_PREFIX) and digits.isascii() and digits.isdecimal() else None
