"""Which parts of an engine are asleep, and how a Sleep or a WakeUp changes them. Pure.

The rules are vLLM's. Level 0 stops scheduling and keeps all memory; level 1 keeps the weights on the host and drops the
KV cache; level 2 drops both. The KV cache can also be released alone (vLLM's release_kv_cache_memory), the weights
cannot. After any wake-up the engine runs as soon as none of its memory is asleep.

Unlike vLLM, this module remembers that a sleep of level 2 dropped the weights: nothing may be sampled until a version
is applied.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from genserve.engine.types import ALL_TAGS, MEMORY_TAGS, SleepTag
from genserve.errors import InvalidFieldError

MAX_LEVEL = 2


@dataclass(frozen=True, slots=True)
class SleepDepth:
    """What a Sleep releases. `level` says what happens to the weights, if they are among the `tags`."""

    level: int = 1
    tags: frozenset[SleepTag] = ALL_TAGS

    @classmethod
    def of(cls, level: int | None, names: Sequence[str]) -> "SleepDepth":
        """Combines a level (None = 1) and names of tags (none = those of the level). Raises InvalidFieldError ("level",
        "tags")."""
        if level is not None and not 0 <= level <= MAX_LEVEL:
            raise InvalidFieldError.of("level", f"must be 0, 1 or 2, is {level}")
        tags = tags_of(names)
        if tags and SleepTag.WEIGHTS not in tags and level:
            raise InvalidFieldError.of(
                "level",
                f"is {level}, which is for the weights, but tags leave the weights out: must be 0 or unset",
            )
        if not tags:
            return cls(0, frozenset({SleepTag.SCHEDULING})) if level == 0 else cls(1 if level is None else level)
        if SleepTag.WEIGHTS in tags:
            if SleepTag.KV_CACHE not in tags:
                raise InvalidFieldError.of("tags", "weights can be released only together with kv_cache")
            if level == 0:
                raise InvalidFieldError.of("level", "must be 1 or 2 to release weights, is 0")
            return cls(1 if level is None else level)
        return cls(0, tags | {SleepTag.SCHEDULING})


@dataclass(frozen=True, slots=True)
class Asleep:
    """`tags`: the parts that are asleep; empty if the engine is awake. `weights_lost`: the weights were dropped, and no
    version was applied since."""

    tags: frozenset[SleepTag] = frozenset()
    weights_lost: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tags, in a fixed order."""
        return tuple(tag.value for tag in SleepTag if tag in self.tags)

    def takes(self, depth: SleepDepth) -> bool:
        """Whether a Sleep changes anything. As in vLLM, it does not while the weights are asleep."""
        return SleepTag.WEIGHTS not in self.tags and not depth.tags <= self.tags

    def after_sleep(self, depth: SleepDepth) -> "Asleep":
        """The parts that are asleep after this Sleep."""
        drops = depth.level == MAX_LEVEL and SleepTag.WEIGHTS in depth.tags
        return Asleep(self.tags | depth.tags, self.weights_lost or drops)

    def after_wake_up(self, tags: Iterable[SleepTag]) -> "Asleep":
        """The parts that are asleep after a WakeUp; no tags = all. Raises InvalidFieldError ("tags") if the KV cache is
        woken before weights that are lost, because the engine would run as soon as the weights are awake."""
        woken = frozenset(tags) or ALL_TAGS
        left = (self.tags & MEMORY_TAGS) - woken
        if not left:
            return Asleep(frozenset(), self.weights_lost)
        if self.weights_lost and left == {SleepTag.WEIGHTS}:
            raise InvalidFieldError.of(
                "tags", "kv_cache cannot wake up before weights, which a sleep of level 2 dropped"
            )
        return replace(self, tags=left | {SleepTag.SCHEDULING})


def tags_of(names: Sequence[str]) -> frozenset[SleepTag]:
    """The tags of these names. Raises InvalidFieldError naming the entry ("tags[1]")."""
    known = {tag.value: tag for tag in SleepTag}
    for index, name in enumerate(names):
        if name not in known:
            raise InvalidFieldError.of(f"tags[{index}]", f"{name[:64]!r} is not one of {', '.join(known)}")
    return frozenset(known[name] for name in names)
