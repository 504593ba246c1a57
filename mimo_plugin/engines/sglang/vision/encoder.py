# SPDX-License-Identifier: Apache-2.0
"""MiMo's preprocessing in an encoder server, off its event loop.

SGLang calls MiMo's hook on the loop that also answers requests and sends embeddings: one large
video stops them all. A model may say that its hook runs in the preprocess threads; MiMo's hook for
videos loads them itself, so what SGLang would load for it before is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from sglang.srt.disaggregation.encoder.preprocessor import EncoderPreprocessor
from sglang.srt.managers.schedule_batch import Modality
from sglang.srt.models.mimo_v2 import MiMoV2ForCausalLM
from sglang.srt.multimodal.encoder_preprocessing import EncoderMediaProcessorConfig

from mimo_plugin.engines.wrapping import wrap_once


def leave_the_event_loop() -> None:
    """Take MiMo's preprocessing off the loop in this process; a second call changes nothing."""
    MiMoV2ForCausalLM.encoder_media_processor_config = EncoderMediaProcessorConfig(
        preprocess_off_event_loop=True
    )
    wrap_once(EncoderPreprocessor, "_process_video_items", _wrap_videos)


def _wrap_videos(stock: Callable[..., Any]) -> Callable[..., Any]:
    async def _process_video_items(self: Any, mm_items: Any, model_preprocessor: Any) -> Any:
        if not isinstance(getattr(model_preprocessor, "__self__", None), MiMoV2ForCausalLM):
            return await stock(self, mm_items, model_preprocessor)
        return await asyncio.get_running_loop().run_in_executor(
            self.preproc_executor,
            model_preprocessor,
            mm_items,
            Modality.VIDEO,
            self.vision_config,
        )

    return _process_video_items
