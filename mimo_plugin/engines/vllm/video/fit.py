# SPDX-License-Identifier: Apache-2.0
"""Does the video feature fit this model and these engine settings?"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from mimo_plugin.core.frames import VideoError
from mimo_plugin.core.pixels import PixelError
from mimo_plugin.engines.vllm.video.configure import setup_from
from mimo_plugin.engines.vllm.video.names import LOADER
from mimo_plugin.engines.vllm.video.options import parse
from mimo_plugin.engines.vllm.vision import fit as vision_fit
from mimo_plugin.engines.vllm.vision.names import STOCK_ARCHITECTURE

_LEAVE_OUT = "leave video out of --plugin mimo:…"
_BACKEND_ENV = "VLLM_VIDEO_LOADER_BACKEND"


def unused(vllm_config: Any) -> bool:
    """Whether nothing here takes videos: a plain ``--plugin mimo`` then leaves it out silently.

    So it does where ``vision`` can't run, which has said why.
    """
    names = vllm_config.model_config.architectures or []
    if STOCK_ARCHITECTURE not in names or vision_fit.unused(vllm_config):
        return True
    if vision_fit.why_not(vllm_config) is not None:
        return True
    return not vllm_config.model_config.multimodal_config.get_limit_per_prompt("video")


def why_not(vllm_config: Any) -> str | None:
    """Reason, with its fix, why the feature can't run with this configuration; None if it can."""
    from mimo_plugin.engines.vllm.register import config_from

    config = config_from(vllm_config)
    assert config is not None
    if "vision" not in config.features:
        return (
            "its frames are for the processor of the feature vision, which is off; fix: add "
            f"vision to --plugin mimo:…, or {_LEAVE_OUT}"
        )
    reason = vision_fit.why_not(vllm_config)
    if reason is not None:
        return f"it needs the feature vision, which can't run here: {reason}"
    names = vllm_config.model_config.architectures or []
    if STOCK_ARCHITECTURE not in names:
        return (
            f"the model is {', '.join(names)}, whose videos are left to vLLM; needed: "
            f"{STOCK_ARCHITECTURE}; fix: {_LEAVE_OUT}"
        )
    multimodal = vllm_config.model_config.multimodal_config
    if not multimodal.get_limit_per_prompt("video"):
        return f"this engine admits no videos; fix: raise --limit-mm-per-prompt, or {_LEAVE_OUT}"
    if importlib.util.find_spec("av") is None:
        return 'PyAV is missing; fix: pip install "mimo-plugin[video]"'
    reason = _why_loader(multimodal)
    if reason is not None:
        return reason
    try:
        setup_from(vllm_config, config)
    except (PixelError, VideoError) as error:
        return f"{error}; fix: correct the checkpoint's config.json or preprocessor_config.json"
    return None


def _why_loader(multimodal: Any) -> str | None:
    """What the user says to the loader of videos."""
    options = dict((multimodal.media_io_kwargs or {}).get("video") or {})
    chosen = options.pop("video_backend", None)
    where = "video_backend in --media-io-kwargs" if chosen else _BACKEND_ENV
    chosen = chosen or os.environ.get(_BACKEND_ENV) or LOADER
    if chosen != LOADER:
        return (
            f"{where} is {chosen!r}, but the feature brings a loader of its own; fix: drop it, or "
            f"{_LEAVE_OUT}"
        )
    try:
        parse(options)
    except VideoError as error:
        return f"{error}; fix: correct --media-io-kwargs, or {_LEAVE_OUT}"
    return None
