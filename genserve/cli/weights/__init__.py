"""Commands about weights."""
