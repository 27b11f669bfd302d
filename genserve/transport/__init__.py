"""The connection that all services share: channel, deadlines, errors, streams, and the loop of the blocking client."""
