"""Leases that live long, and are renewed soon all the same: a machine that stands still does not lose them."""

import asyncio

import pytest


def hasten_renewals(monkeypatch: pytest.MonkeyPatch, ttl_s: float) -> None:
    """A wait for a third of the time to live takes ten milliseconds."""
    sleep = asyncio.sleep

    async def hastened(delay_s: float) -> None:
        await sleep(0.01 if delay_s == ttl_s / 3 else delay_s)

    monkeypatch.setattr(asyncio, "sleep", hastened)
