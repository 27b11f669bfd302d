"""The driver: it is there."""

from typing import Any, NoReturn

from triton.backends.driver import DriverBase


class InterpretedDriver(DriverBase):
    """Says that it is active, which vLLM asks. Triton's interpreter uses none of the rest."""

    @classmethod
    def is_active(cls) -> bool:
        """Always."""
        return True

    def _unused(self, *args: Any) -> NoReturn:
        raise NotImplementedError("kernels are interpreted: set TRITON_INTERPRET=1")

    map_python_to_cpp_type = get_current_target = get_active_torch_device = get_benchmarker = _unused
