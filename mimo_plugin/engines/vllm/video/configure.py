# SPDX-License-Identifier: Apache-2.0
"""What the feature writes into one engine's configuration, and how other processes learn of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mimo_plugin.config import MimoConfig
from mimo_plugin.core.frames import FrameRules, mimo_rules
from mimo_plugin.engines.vllm.video.names import CONFIG_KEY, LOADER, SETUP_KEY
from mimo_plugin.engines.vllm.video.setup import VideoSetup, add_setup
from mimo_plugin.engines.vllm.vision.configure import setup_from as vision_setup_from
from mimo_plugin.engines.vllm.vision.limits import limits_of
from mimo_plugin.engines.vllm.vision.packing import host_backend
from mimo_plugin.kernels.preprocess.dispatch import chosen_backend

logger = logging.getLogger("vllm.mimo_plugin")


def setup_from(vllm_config: Any, config: MimoConfig) -> VideoSetup:
    """How videos are read for an engine.

    Raises:
        PixelError: pixel settings of the checkpoint or the engine are out of range.
        VideoError: frame settings of the checkpoint are.
    """
    model_config = vllm_config.model_config
    vision = vision_setup_from(vllm_config, config)
    rules: FrameRules | None = None
    if config.video.frames == "checkpoint":
        rules = replace(mimo_rules(model_config.hf_config.to_dict()), spread=config.video.spread)
    engine_kwargs = model_config.multimodal_config.mm_processor_kwargs or {}
    compiled = chosen_backend("cpu", host_backend(config.vision.backend)) == "cpu"
    return VideoSetup(
        spec=vision.spec,
        limits=limits_of(vision, engine_kwargs, "video"),
        rules=rules,
        rows_dtype=str(model_config.dtype).removeprefix("torch.") if compiled else None,
        host_resize_ratio=config.vision.host_resize_ratio,
        config=config.video,
    )


def configure(vllm_config: Any, config: MimoConfig) -> None:
    """Make this engine's videos go through the loader, by the engine's own set-up."""
    model_config = vllm_config.model_config
    setup = setup_from(vllm_config, config)
    model_config.hf_config.update({CONFIG_KEY: setup.to_dict()})
    multimodal = model_config.multimodal_config
    given = multimodal.media_io_kwargs or {}
    options = dict(given.get("video") or {})
    if setup.rules is not None and not {"num_frames", "fps"} & options.keys():
        options["num_frames"] = -1  # else vLLM says a number of its own
    options |= {"video_backend": LOADER, SETUP_KEY: setup.key}
    multimodal.media_io_kwargs = {**given, "video": options}
    adopt(model_config.hf_config)
    logger.info("mimo video: frames of a video by %s", _rule(setup, options))


def adopt(hf_config: Any) -> None:
    """Make loader and set-up of an engine known in this process; does nothing without one."""
    raw = getattr(hf_config, CONFIG_KEY, None)
    if isinstance(raw, Mapping):
        from mimo_plugin.engines.vllm.video.loader import register

        add_setup(VideoSetup.from_dict(raw))
        register()


def _rule(setup: VideoSetup, options: Mapping[str, Any]) -> str:
    asked = [f"{name} {options[name]}" for name in ("num_frames", "fps") if name in options]
    if setup.rules is None:
        return "vLLM's rule"
    rules = setup.rules
    rate = f"num_frames {rules.num_frames}" if rules.num_frames else f"fps {rules.fps:g}"
    told = f"the checkpoint's rule ({rate}, {rules.min_frames} to {rules.max_frames})"
    return told if asked in ([], ["num_frames -1"]) else f"{', '.join(asked)}"
