"""ControlService for a client."""
