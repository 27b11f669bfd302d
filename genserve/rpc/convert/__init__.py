"""Converts protobuf messages to the daemon's types and back, with one file per service and direction. It makes no
decisions."""
