"""What vLLM calls first, to learn which platform it is on. The platform itself imports much of vLLM."""


def platform() -> str:
    """The name of its class."""
    return "async_on_cpu.AsyncCpuPlatform"
