"""Protobuf messages to the daemon's types and back, a file per service and direction. Decides nothing."""
