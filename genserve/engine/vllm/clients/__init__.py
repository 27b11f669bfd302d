"""Several processes that send requests to one engine: what the daemon knows of the others, and what they do."""
