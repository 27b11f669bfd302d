"""What a story has besides clients and faults. It is drawn apart from all else: what is added here leaves the stories
of other seeds as they were."""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """`has_two_routers`: side by side, over the same replicas, for as long as the story lasts. `are_clocks_wrong`: the
    wall clocks of hosts. `has_adapters`: somebody pushes and unloads some."""

    has_two_routers: bool
    are_clocks_wrong: bool
    has_adapters: bool

    @property
    def is_plain(self) -> bool:
        """Whether it has none of these."""
        return not (self.has_two_routers or self.are_clocks_wrong or self.has_adapters)

    @property
    def faults_s(self) -> float:
        """How long there are faults. A router that is cut off keeps its replicas for 30 s."""
        return 90.0 if self.has_two_routers else 30.0


def plan_of(seed: int) -> Plan:
    """That of a seed."""
    drawn = random.Random(f"plan {seed}")
    return Plan(
        has_two_routers=drawn.random() < 0.25,
        are_clocks_wrong=drawn.random() < 0.25,
        has_adapters=drawn.random() < 0.25,
    )
