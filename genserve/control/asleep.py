"""What of an engine is asleep, and what follows from a Sleep or a WakeUp. Pure.

vLLM's rules, in its words. Level 0 stops scheduling and keeps all memory; 1 keeps the weights on the host and drops the
KV cache; 2 drops both. The KV cache alone can be given back as well, which vLLM calls release_kv_cache_memory; the
weights alone cannot. Whatever is woken, the engine runs as soon as none of its memory is asleep.

Unlike vLLM, weights that a sleep of level 2 has dropped are remembered as such: nothing may be sampled from what is in
their place, until a version has been applied over it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from genserve.engine.protocol import ALL_TAGS, MEMORY_TAGS, SleepTag
from genserve.errors import InvalidFieldError

MAX_LEVEL = 2


@dataclass(frozen=True, slots=True)
class SleepDepth:
    """What a Sleep gives back. `level` says what becomes of the weights, if they are among the `tags`."""

    level: int = 1
    tags: frozenset[SleepTag] = ALL_TAGS

    @classmethod
    def of(cls, level: int | None, names: Sequence[str]) -> "SleepDepth":
        """What a level (None = 1) and the names of tags (none = what the level says) mean together. Raises
        InvalidFieldError ("level", "tags")."""
        if level is not None and not 0 <= level <= MAX_LEVEL:
            raise InvalidFieldError.of("level", f"must be 0, 1 or 2, is {level}")
        tags = tags_of(names)
        if tags and SleepTag.WEIGHTS not in tags and level:
            raise InvalidFieldError.of(
                "level",
                f"is {level}, which says what becomes of the weights, and tags leave those out: must be 0 or unset",
            )
        if not tags:
            return cls(0, frozenset({SleepTag.SCHEDULING})) if level == 0 else cls(1 if level is None else level)
        if SleepTag.WEIGHTS in tags:
            if SleepTag.KV_CACHE not in tags:
                raise InvalidFieldError.of("tags", "weights are given back together with kv_cache only")
            if level == 0:
                raise InvalidFieldError.of("level", "must be 1 or 2 to give weights back, is 0")
            return cls(1 if level is None else level)
        return cls(0, tags | {SleepTag.SCHEDULING})


@dataclass(frozen=True, slots=True)
class Asleep:
    """`tags`: what is asleep; nothing = the engine is awake. `weights_lost`: the weights were dropped, and no version
    has been applied since."""

    tags: frozenset[SleepTag] = frozenset()
    weights_lost: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tags, always in the same order."""
        return tuple(tag.value for tag in SleepTag if tag in self.tags)

    def takes(self, depth: SleepDepth) -> bool:
        """Whether a Sleep changes anything. As in vLLM, one while the weights are asleep does not: what became of them
        is decided."""
        return SleepTag.WEIGHTS not in self.tags and not depth.tags <= self.tags

    def after_sleep(self, depth: SleepDepth) -> "Asleep":
        """What is asleep after a Sleep that is taken."""
        drops = depth.level == MAX_LEVEL and SleepTag.WEIGHTS in depth.tags
        return Asleep(self.tags | depth.tags, self.weights_lost or drops)

    def after_wake_up(self, tags: Iterable[SleepTag]) -> "Asleep":
        """What is asleep after a WakeUp; no tags = all. Raises InvalidFieldError ("tags") for the KV cache before
        weights that are lost: the engine would run as soon as those are awake."""
        woken = frozenset(tags) or ALL_TAGS
        left = (self.tags & MEMORY_TAGS) - woken
        if not left:
            return Asleep(frozenset(), self.weights_lost)
        if self.weights_lost and left == {SleepTag.WEIGHTS}:
            raise InvalidFieldError.of(
                "tags", "kv_cache cannot be woken before weights, which the sleep of level 2 has dropped"
            )
        return replace(self, tags=left | {SleepTag.SCHEDULING})


def tags_of(names: Sequence[str]) -> frozenset[SleepTag]:
    """The tags of these names. Raises InvalidFieldError naming the entry ("tags[1]")."""
    known = {tag.value: tag for tag in SleepTag}
    for index, name in enumerate(names):
        if name not in known:
            raise InvalidFieldError.of(f"tags[{index}]", f"{name[:64]!r} is none of {', '.join(known)}")
    return frozenset(known[name] for name in names)
