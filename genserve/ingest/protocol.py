"""The protocol between a receiving process and the daemon, in addition to the frames of a push."""

SERVICE = "genserve.internal.Ingest"
METHOD = "Push"
PATH_KEY = "genserve-ingest-path"
"""Metadata: the only memory that segments of this stream may use."""
TAKEN = b"\x00"
"""Answer to each frame once the daemon does not need it any more."""
OUTCOME = b"\x01"
"""Precedes the response, which is the last message."""
FAILED = b"\x02"
"""Precedes a `google.rpc.Status`, which is the last message: a write that comes too late would hide the status of a
call."""
