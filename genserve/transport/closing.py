"""Base classes for objects that `with` closes at its end."""

from typing import Self


class Closing:
    """Adds `with` to a class that has a `close`."""

    def close(self) -> None:
        """May be called more than once."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClosing:
    """Adds `async with` and `aclose` to a class that has a `cancel`."""

    def cancel(self) -> None:
        """`aclose` for callbacks. May be called more than once."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Cancels the call unless it is over."""
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
