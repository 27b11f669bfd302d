"""Commands about the engine: pause, sleep and status."""
