"""Commands about the engine: pause, sleep, drain and status."""
