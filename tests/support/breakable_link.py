"""A TCP link to a daemon that can be cut, as the kernel cuts it when the process at one end is killed, or can fall
silent, as when a host vanishes."""

from tests.support.fault_proxy import FaultProxy


class BreakableLink(FaultProxy):
    """A link whose faults are those of a whole host."""

    def cut(self) -> None:
        """Resets every connection, both ways; new ones are taken."""
        self.reset()

    def kill(self) -> None:
        """Resets every connection, and takes no more."""
        self.refuse()
        self.reset()

    def silence(self) -> None:
        """From now on nothing passes, and nobody is told: a host that has vanished."""
        self.black_hole()

    def let_go(self) -> None:
        """Everything passes again, also what was held."""
        self.heal()

    async def listen_again(self) -> None:
        """At the same address, after `kill`."""
        await self.listen()
