"""Calls of FleetService, which a router has."""
