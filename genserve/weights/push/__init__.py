"""One push while it is here: its states, its bytes, its streams, and what came of it."""
