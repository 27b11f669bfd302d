"""One push: its states, its bytes, its streams, and its outcome."""
