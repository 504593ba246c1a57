# SPDX-License-Identifier: Apache-2.0
"""Set-ups, and vLLM's own way to a loader, for the tests of the video adapter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mimo_plugin.config_video import VideoConfig
from mimo_plugin.core.frames import mimo_rules
from mimo_plugin.engines.vllm.video.setup import VideoSetup
from mimo_plugin.engines.vllm.vision.limits import limits_of
from tests.profiles import load_vllm_profile
from tests.vision.conftest import SIZE, make_setup
from tools import tiny_omni

load_vllm_profile()


def make_video_setup(
    *, rows: str | None = "float32", ratio: float = 4.0, **settings: Any
) -> VideoSetup:
    """The set-up of the tiny checkpoint with the user's ``settings``."""
    vision = make_setup()
    config = VideoConfig(**settings)
    rules = replace(mimo_rules(tiny_omni.config_json(SIZE)), spread=config.spread)
    return VideoSetup(
        spec=vision.spec,
        limits=limits_of(vision, {}, "video"),
        rules=rules if config.frames == "checkpoint" else None,
        rows_dtype=rows,
        host_resize_ratio=ratio,
        config=config,
    )


class Local:
    """Stands for the media pool: runs jobs in this thread, and keeps what they allocate."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def run_sync(self, function: Any, data: bytes, *, timeout_s: float, **options: Any) -> Any:
        import numpy as np

        from mimo_plugin.media.pool import JobResult

        arrays = []

        def allocate(shape: Any) -> Any:
            self.shapes.append(tuple(shape))
            arrays.append(np.zeros(shape, np.uint8))
            return arrays[-1]

        return JobResult(function(data, allocate, **options), tuple(arrays))


@pytest.fixture
def local(monkeypatch):
    """The loader's jobs run here."""
    from mimo_plugin.engines.vllm.video import loader

    pool = Local()
    monkeypatch.setattr(loader, "media_pool", lambda: pool)
    return pool


def load(data: bytes, setup: VideoSetup, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Frames and metadata as vLLM gets them; ``options`` are merged ``media_io_kwargs``."""
    from vllm.multimodal.media import ImageMediaIO, VideoMediaIO

    from mimo_plugin.engines.vllm.video.loader import register
    from mimo_plugin.engines.vllm.video.setup import add_setup

    add_setup(setup)
    register()
    given = {"video_backend": "mimo", "mimo_setup": setup.key, **options}
    frames, metadata = VideoMediaIO(ImageMediaIO(), **given).load_bytes(data).media
    return frames, metadata
