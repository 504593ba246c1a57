# SPDX-License-Identifier: Apache-2.0
"""The loader ``mimo`` in vLLM's registry: bytes of a video to the frames that the model sees.

It runs in a thread of vLLM's and only waits there: the work is done by a process of the media pool,
which decodes what is needed and no more. A file that crashes or hangs it costs its own request.
"""

from __future__ import annotations

import inspect
import logging
import time
from functools import cache
from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError
from vllm.multimodal.media.video import VideoMediaIO
from vllm.multimodal.video import VIDEO_LOADER_REGISTRY, VideoLoader

from mimo_plugin.core.frames import VideoError
from mimo_plugin.engines.vllm.media_pool import media_pool
from mimo_plugin.engines.vllm.video.job import Order, read_video
from mimo_plugin.engines.vllm.video.names import LOADER, ROWS_KEY, SETUP_KEY
from mimo_plugin.engines.vllm.video.options import Asked, parse
from mimo_plugin.engines.vllm.video.report import REPORT
from mimo_plugin.engines.vllm.video.setup import VideoSetup, find_setup
from mimo_plugin.media.limits import MediaError
from mimo_plugin.media.pool import PoolBusy, PoolClosed

logger = logging.getLogger("vllm.mimo_plugin")


class MimoVideoLoader(VideoLoader):  # type: ignore[misc]
    """Decodes only the frames that are taken."""

    @classmethod
    def load_bytes(cls, data: bytes, **given: Any) -> tuple[Any, dict[str, Any]]:
        """The frames of a video and their metadata.

        Args:
            data: the file.
            given: the merged ``media_io_kwargs`` of engine and request.

        Returns:
            Pixels [frames, height, width, 3], or patch rows as bytes where the metadata have
            ``ROWS_KEY``, in shared memory; and the metadata, which hold all that decides them.

        Raises:
            VideoError, MediaError: the client's options or video can't be served (HTTP 400).
            GracefulHTTPError: no place or memory in time (HTTP 503).
        """
        started = time.perf_counter()
        try:
            setup = find_setup(given.get(SETUP_KEY))
            asked = parse(given, default_frames() if setup.rules else None)
            order = order_of(setup, asked)
            result = media_pool().run_sync(
                read_video, data, timeout_s=setup.config.job_timeout_s, order=order
            )
        except (VideoError, MediaError):
            REPORT.refused("input")
            raise
        except (PoolBusy, PoolClosed) as problem:
            REPORT.refused("busy")
            raise GracefulHTTPError(str(problem), HTTPStatus.SERVICE_UNAVAILABLE) from None
        told, frames = result.meta, result.arrays[-1]
        REPORT.read(told, frames.nbytes, time.perf_counter() - started)
        if told["has_audio"]:
            _warn_of_audio()
        return frames, metadata_of(setup, told)


def order_of(setup: VideoSetup, asked: Asked) -> Order:
    """The job for one video.

    Raises:
        VideoError: limits of pixels that contradict each other.
    """
    config = setup.config
    return Order(
        rules=setup.rules,
        num_frames=asked.num_frames,
        fps=asked.fps,
        spec=setup.spec,
        limits=asked.limits(setup.limits),
        rows_dtype=setup.rows_dtype,
        host_resize_ratio=setup.host_resize_ratio,
        workers=config.workers,
        max_file_bytes=config.max_file_bytes,
        max_duration_s=config.max_duration_s,
        max_output_bytes=config.max_output_bytes,
    )


def metadata_of(setup: VideoSetup, told: dict[str, Any]) -> dict[str, Any]:
    """What vLLM's loaders say of a video, and what ours knows beyond it."""
    indices = told["indices"]
    metadata = {
        "total_num_frames": told["total_frames"],
        "fps": told["fps"],
        "duration": told["duration_s"],
        "video_backend": LOADER,
        "frames_indices": indices,
        "do_sample_frames": len(indices) == told["total_frames"],
        "times_s": told["times_s"],
        SETUP_KEY: setup.key,
    }
    if told["rows"]:
        metadata[ROWS_KEY] = {"source": told["source"], "target": told["target"]}
    return metadata


@cache
def default_frames() -> int:
    """What vLLM hands to every loader as ``num_frames`` when nobody says a number."""
    return int(inspect.signature(VideoMediaIO.__init__).parameters["num_frames"].default)


def register() -> None:
    """Make the loader known to vLLM under its name; a second call changes nothing."""
    VIDEO_LOADER_REGISTRY.register(LOADER)(MimoVideoLoader)


@cache
def _warn_of_audio() -> None:
    """Say it once in a process, not for each video."""
    logger.warning("mimo video: audio tracks of videos are not read")
