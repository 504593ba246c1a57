# SPDX-License-Identifier: Apache-2.0
"""Compiler: there is none. Triton requires the class, and asking it for code is an error."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget

REFUSAL = "tools/triton_cpu compiles nothing: set TRITON_INTERPRET=1 before importing"


class CpuBackend(BaseBackend):
    """Refuses every kernel that isn't interpreted."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        """Whether this backend makes code for ``target``: only to refuse it by name."""
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        """Identity in Triton's cache of compiled kernels."""
        return "tools/triton_cpu"

    def parse_options(self, options: dict[str, Any]) -> object:
        """First thing asked when a kernel is compiled."""
        raise RuntimeError(REFUSAL)

    def add_stages(self, stages: dict[str, Any], options: object, language: Any) -> None:
        """Steps of a compilation."""
        raise RuntimeError(REFUSAL)

    def load_dialects(self, context: Any) -> None:
        """Intermediate languages of the compiler: none."""

    def get_module_map(self) -> dict[str, ModuleType]:
        """Device libraries: none."""
        return {}
