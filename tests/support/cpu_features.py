"""What this machine's processor can do: vLLM has some of its CPU kernels, and packs weights, only with AVX-512 or
AMX."""

from pathlib import Path

import pytest

_FLAGS = frozenset(Path("/proc/cpuinfo").read_text().split())

HAS_AVX512 = "avx512f" in _FLAGS
HAS_AMX = "amx_tile" in _FLAGS

needs_avx512 = pytest.mark.skipif(not HAS_AVX512, reason="vLLM does this on a CPU with AVX-512 only")
