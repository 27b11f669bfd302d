"""The compiler: there is none."""

from typing import Any, NoReturn

from triton.backends.compiler import BaseBackend


class NoCompiler(BaseBackend):
    """Takes no target."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        """Never."""
        return False

    def _unused(self, *args: Any) -> NoReturn:
        raise NotImplementedError("kernels are interpreted: set TRITON_INTERPRET=1")

    hash = parse_options = add_stages = load_dialects = get_module_map = _unused
