# SPDX-License-Identifier: Apache-2.0
"""The platform: SGLang's own CPU device operations, and no capability that needs a kernel."""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from mimo_sglang_cpu import ATTENTION_BACKEND


class ReferencePlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """Out of tree, so that the engine takes the PyTorch path of every operation."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        """The attention of this distribution."""
        return ATTENTION_BACKEND

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """There is no device to copy to."""
        return False

    def init_backend(self) -> None:
        """Called once in each process that computes."""
        from mimo_sglang_cpu.host_copies import install

        install()
