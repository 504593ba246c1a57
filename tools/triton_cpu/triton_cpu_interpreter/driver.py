# SPDX-License-Identifier: Apache-2.0
"""Driver: one device, the CPU, on which nothing is launched."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class CpuDriver(DriverBase):
    """What callers ask of the active driver besides launching kernels."""

    @classmethod
    def is_active(cls) -> bool:
        """Whether this driver can be used: always."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Only launchers of compiled kernels ask for this."""
        raise NotImplementedError(f"no C++ type for {ty!r}: kernels are interpreted")

    def get_current_target(self) -> GPUTarget:
        """The target that kernels are made for; vector units of one lane."""
        return GPUTarget("cpu", "interpreter", 1)

    def get_active_torch_device(self) -> Any:
        """The device whose tensors kernels get."""
        import torch

        return torch.device("cpu")

    def get_current_device(self) -> int:
        """Index of the only device."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """Handle of the only stream: kernels run where they are called."""
        return 0

    def get_benchmarker(self) -> Any:
        """Choosing the fastest variant of an interpreted kernel has no use."""
        raise NotImplementedError("interpreted kernels are not benchmarked")
