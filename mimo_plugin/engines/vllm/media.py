# SPDX-License-Identifier: Apache-2.0
"""vLLM's media connector, with pictures decoded in the pool.

Downloading is vLLM's own, with its time-outs, retries, allowed domains and paths, redirects, size
limit and file cache. What differs: a picture is decoded in a worker process, so that decoding holds
neither the event loop nor the interpreter lock of the API server, and input that crashes or hangs a
decoder fails its own request only. The bytes and the decode settings stay with the picture, so
vLLM's hash of it is the same. Videos are loaded as in vLLM, in threads of their own: pictures never
wait for those.

vLLM finds its connector in a registry, by the name in ``VLLM_MEDIA_CONNECTOR``. An engine with
``vision.decode`` carries a token in its ``media_io_kwargs``; under vLLM's own name the registry
then holds :func:`connector_of`, which gives those with a token this connector and all others
vLLM's. ``VLLM_MEDIA_CONNECTOR=mimo`` gives every engine of the process this one.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pybase64
from vllm import envs
from vllm.exceptions import GracefulHTTPError
from vllm.multimodal.image import ALLOWED_IMAGE_FORMATS
from vllm.multimodal.media import (
    MEDIA_CONNECTOR_REGISTRY,
    ImageMediaIO,
    MediaConnector,
    MediaIO,
    MediaWithBytes,
    VideoMediaIO,
)

from mimo_plugin.engines.vllm.media_pool import TOKEN_KEY, MediaSettings, media_pool, recall
from mimo_plugin.engines.vllm.media_switch import CONNECTOR, STOCK_CONNECTOR
from mimo_plugin.media.images import decode_image, image_of
from mimo_plugin.media.limits import MediaLimits
from mimo_plugin.media.pool import JobResult, PoolBusy, PoolClosed

logger = logging.getLogger("vllm.mimo_plugin")


def register() -> None:
    """Make the connector known to vLLM under its name; a second call changes nothing."""
    MEDIA_CONNECTOR_REGISTRY.register(CONNECTOR)(MimoMediaConnector)


def attach(vllm_config: Any, token: str) -> None:
    """Have this engine's pictures decoded in the pool with the settings under ``token``."""
    multimodal = vllm_config.model_config.multimodal_config
    given = multimodal.media_io_kwargs or {}
    multimodal.media_io_kwargs = {**given, TOKEN_KEY: {"token": token}}
    register()
    found = MEDIA_CONNECTOR_REGISTRY.name2class.get(STOCK_CONNECTOR)
    if found not in (MediaConnector, connector_of):
        logger.warning(
            "mimo vision: %s stands for vLLM's media connector here, so it decodes pictures", found
        )
        return
    MEDIA_CONNECTOR_REGISTRY.register(STOCK_CONNECTOR)(connector_of)
    workers = recall(token).pool.workers
    logger.info("mimo vision: pictures are decoded in %d processes", workers)


def connector_of(media_io_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> MediaConnector:
    """The connector of one request: ours for engines that asked for it, else vLLM's."""
    ours = media_io_kwargs is not None and TOKEN_KEY in media_io_kwargs
    kind = MimoMediaConnector if ours else MediaConnector
    return kind(media_io_kwargs=media_io_kwargs, **kwargs)


class _Encoded(MediaIO):  # type: ignore[misc]
    """Leaves the bytes as they are: vLLM fetches, the pool decodes."""

    def load_bytes(self, data: bytes) -> bytes:
        return data

    def load_base64(self, media_type: str, data: str) -> bytes:
        decoded: bytes = pybase64.b64decode(data, validate=True)
        return decoded

    def load_file(self, filepath: Path) -> bytes:
        return filepath.read_bytes()


class _Later(MediaIO):  # type: ignore[misc]
    """Leaves the work of another loader to whoever calls what this one returns."""

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self._loader = loader

    def get_max_bytes(self) -> int | None:
        limit: int | None = self._loader.get_max_bytes()
        return limit

    def load_bytes(self, data: bytes) -> Callable[[], Any]:
        return partial(self._loader.load_bytes, data)

    def load_base64(self, media_type: str, data: str) -> Callable[[], Any]:
        return partial(self._loader.load_base64, media_type, data)

    def load_file(self, filepath: Path) -> Callable[[], Any]:
        return partial(self._loader.load_file, filepath)


@cache
def _video_threads() -> ThreadPoolExecutor:
    """Threads that load videos, as many as vLLM has for all media."""
    return ThreadPoolExecutor(envs.VLLM_MEDIA_LOADING_THREAD_COUNT, "mimo-video")


os.register_at_fork(after_in_child=_video_threads.cache_clear)


class MimoMediaConnector(MediaConnector):  # type: ignore[misc]
    """vLLM's connector with another way to decode pictures; all else is inherited."""

    @property
    def settings(self) -> MediaSettings:
        """Those of the engine that the request came to."""
        return recall(self.media_io_kwargs.get(TOKEN_KEY, {}).get("token"))

    def fetch_image(self, image_url: str, *, image_mode: str | None = "RGB") -> MediaWithBytes:
        """Fetch and decode; blocks.

        Raises:
            MediaError: the picture can't be used (HTTP 400).
            GracefulHTTPError: no place or memory in time (HTTP 503).
        """
        image_io, settings = self._loader(image_mode), self.settings
        data = self.load_from_url(
            image_url, _Encoded(), fetch_timeout=envs.VLLM_IMAGE_FETCH_TIMEOUT
        )
        options = _options(image_io, settings.limits)
        try:
            result = media_pool(settings.pool).run_sync(decode_image, data, **options)
        except (PoolBusy, PoolClosed) as problem:
            raise _unavailable(problem) from None
        return self._with_bytes(result, data, image_io)

    async def fetch_image_async(
        self, image_url: str, *, image_mode: str | None = "RGB"
    ) -> MediaWithBytes:
        """:meth:`fetch_image` for the event loop, which it never blocks."""
        image_io, settings = self._loader(image_mode), self.settings
        data = await self.load_from_url_async(
            image_url, _Encoded(), fetch_timeout=envs.VLLM_IMAGE_FETCH_TIMEOUT
        )
        options = _options(image_io, settings.limits)
        try:
            result = await media_pool(settings.pool).run(decode_image, data, **options)
        except (PoolBusy, PoolClosed) as problem:
            raise _unavailable(problem) from None
        return self._with_bytes(result, data, image_io)

    async def load_from_url_async(
        self, url: str, media_io: Any, *, fetch_timeout: int | None = None
    ) -> Any:
        """As vLLM's, but a video that takes minutes does not keep its threads from pictures."""
        fetch = super().load_from_url_async
        if not isinstance(media_io, VideoMediaIO):
            return await fetch(url, media_io, fetch_timeout=fetch_timeout)
        load = await fetch(url, _Later(media_io), fetch_timeout=fetch_timeout)
        return await asyncio.get_running_loop().run_in_executor(_video_threads(), load)

    def _loader(self, image_mode: str | None) -> Any:
        """vLLM's own loader, which checks the request's settings; it decodes nothing here."""
        return ImageMediaIO(**{"image_mode": image_mode, **self.media_io_kwargs.get("image", {})})

    def _with_bytes(self, result: JobResult, data: bytes, image_io: Any) -> MediaWithBytes:
        io_config = None
        if result.meta["converted"]:  # what vLLM's loader notes for the hash, under the same names
            io_config = {
                "image_mode": image_io.image_mode,
                "rgba_background_color": image_io.rgba_background_color,
            }
        budget = getattr(self, "decoded_budget", None)  # of the request, from vLLM 0.33 on
        if budget is not None:
            width, height = result.meta["size"]
            budget.charge(4 * width * height)  # as vLLM's loader counts
        return MediaWithBytes(image_of(result.meta, result.arrays[0]), data, io_config)


def _options(image_io: Any, limits: MediaLimits) -> dict[str, Any]:
    allowed = envs.VLLM_MAX_IMAGE_PIXELS
    return {
        "limits": replace(limits, max_pixels=allowed if allowed > 0 else None),
        "mode": image_io.image_mode,
        "background": image_io.rgba_background_color,
        "formats": ALLOWED_IMAGE_FORMATS,
    }


def _unavailable(problem: Exception) -> GracefulHTTPError:
    return GracefulHTTPError(str(problem), HTTPStatus.SERVICE_UNAVAILABLE)
