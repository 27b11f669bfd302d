"""The last committed versions on disk: their layout, how one is written beside serving, and how a start serves it."""
