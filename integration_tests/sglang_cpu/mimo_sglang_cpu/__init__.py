# SPDX-License-Identifier: Apache-2.0
"""SGLang without a GPU: a platform whose kernels are plain PyTorch. For tests, not for users.

SGLang has no CPU kernels in its wheel, but it takes platforms from other distributions. This one
supplies what the engine can't do without: the platform, an attention backend that knows sinks and
the two pools of a hybrid model, and the two copies between device and host pool. All of it is slow
and exact. Everything else (HTTP server, scheduler, radix tree, pools, HiCache) is the engine's own.
"""

from __future__ import annotations

ATTENTION_BACKEND = "torch_sink"
"""What ``--attention-backend`` says to select the attention of this distribution."""


def activate() -> str:
    """Entry point of ``sglang.srt.platforms``: the platform's class."""
    return "mimo_sglang_cpu.platform.ReferencePlatform"


def register() -> None:
    """Entry point of ``sglang.srt.plugins``: make the attention backend known by its name."""
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import (
        ATTENTION_BACKENDS,
        register_attention_backend,
    )

    if ATTENTION_BACKEND in ATTENTION_BACKENDS:
        return
    add_attention_backend_choices([ATTENTION_BACKEND])

    @register_attention_backend(ATTENTION_BACKEND)
    def _create(runner: object) -> object:
        from mimo_sglang_cpu.attention import ReferenceAttention

        return ReferenceAttention(runner)
