"""What `with` closes at its end."""

from typing import Self


class Closing:
    """`with`, for what has a `close`."""

    def close(self) -> None:
        """May be called more than once."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClosing:
    """`async with`, for what has an `aclose`."""

    async def aclose(self) -> None:
        """May be called more than once."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
