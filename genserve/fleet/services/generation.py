"""Stub until the branch forward is merged."""

from typing import Any

import grpc.aio

from genserve.fleet.fleet import Fleet


class FleetGeneration:
    """Stub."""

    def __init__(self, fleet: Fleet) -> None: ...


def add_generation(server: grpc.aio.Server, servicer: Any) -> None:
    """Stub."""
