# SPDX-License-Identifier: Apache-2.0
"""vLLM's media connector, with pictures decoded in the pool.

``VLLM_MEDIA_CONNECTOR=mimo`` selects it. Downloading is vLLM's own, with its time-outs, retries,
allowed domains and paths, redirects, size limit and file cache. What differs: a picture is decoded
in a worker process, so that decoding holds neither the event loop nor the interpreter lock of the
API server, and input that crashes or hangs a decoder fails its own request only. The bytes and the
decode settings stay with the picture, so vLLM's hash of it is the same.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
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
)

from mimo_plugin.media.images import decode_image, image_of
from mimo_plugin.media.limits import MediaLimits
from mimo_plugin.media.pool import JobResult, MediaPool, PoolBusy, PoolClosed, PoolSettings

NAME = "mimo"
"""What ``VLLM_MEDIA_CONNECTOR`` says to select this connector."""


@dataclass(frozen=True, kw_only=True)
class MediaSettings:
    """Settings of this process.

    Attributes:
        pool: processes, queue and memory.
        limits: of a picture; ``max_pixels`` None means what ``VLLM_MAX_IMAGE_PIXELS`` says.
    """

    pool: PoolSettings = field(default_factory=PoolSettings)
    limits: MediaLimits = field(default_factory=lambda: MediaLimits(max_pixels=None))

    def image_limits(self) -> MediaLimits:
        """The limits of a picture, vLLM's own among them."""
        allowed = envs.VLLM_MAX_IMAGE_PIXELS
        if allowed <= 0 or (self.limits.max_pixels or allowed) < allowed:
            return self.limits
        return replace(self.limits, max_pixels=allowed)


_lock = threading.Lock()
_settings = MediaSettings()
_pool: MediaPool | None = None


def configure(settings: MediaSettings) -> None:
    """Take other settings; a pool that runs with others is closed."""
    global _settings, _pool
    with _lock:
        previous, _settings = _settings, settings
        stale = _pool if previous.pool != settings.pool else None
        if stale is not None:
            _pool = None
    if stale is not None:
        stale.close()


def media_pool() -> MediaPool:
    """This process' pool, for pictures and for the jobs of the video loader."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = MediaPool(_settings.pool)
        return _pool


def register() -> None:
    """Make the connector known to vLLM under its name; a second call changes nothing."""
    MEDIA_CONNECTOR_REGISTRY.register(NAME)(MimoMediaConnector)


class _Encoded(MediaIO):  # type: ignore[misc]
    """Leaves the bytes as they are: vLLM fetches, the pool decodes."""

    def load_bytes(self, data: bytes) -> bytes:
        return data

    def load_base64(self, media_type: str, data: str) -> bytes:
        decoded: bytes = pybase64.b64decode(data, validate=True)
        return decoded

    def load_file(self, filepath: Path) -> bytes:
        return filepath.read_bytes()


class MimoMediaConnector(MediaConnector):  # type: ignore[misc]
    """vLLM's connector with another way to decode pictures; all else is inherited."""

    def fetch_image(self, image_url: str, *, image_mode: str | None = "RGB") -> MediaWithBytes:
        """Fetch and decode; blocks.

        Raises:
            MediaError: the picture can't be used (HTTP 400).
            GracefulHTTPError: no place or memory in time (HTTP 503).
        """
        image_io = self._image_io(image_mode)
        data = self.load_from_url(
            image_url, _Encoded(), fetch_timeout=envs.VLLM_IMAGE_FETCH_TIMEOUT
        )
        try:
            result = media_pool().run_sync(decode_image, data, **_options(image_io))
        except (PoolBusy, PoolClosed) as problem:
            raise _unavailable(problem) from None
        return _with_bytes(result, data, image_io)

    async def fetch_image_async(
        self, image_url: str, *, image_mode: str | None = "RGB"
    ) -> MediaWithBytes:
        """:meth:`fetch_image` for the event loop, which it never blocks."""
        image_io = self._image_io(image_mode)
        data = await self.load_from_url_async(
            image_url, _Encoded(), fetch_timeout=envs.VLLM_IMAGE_FETCH_TIMEOUT
        )
        try:
            result = await media_pool().run(decode_image, data, **_options(image_io))
        except (PoolBusy, PoolClosed) as problem:
            raise _unavailable(problem) from None
        return _with_bytes(result, data, image_io)

    def _image_io(self, image_mode: str | None) -> Any:
        """vLLM's own loader, which checks the request's settings; it decodes nothing here."""
        return ImageMediaIO(**{"image_mode": image_mode, **self.media_io_kwargs.get("image", {})})


def _options(image_io: Any) -> dict[str, Any]:
    return {
        "limits": _settings.image_limits(),
        "mode": image_io.image_mode,
        "background": image_io.rgba_background_color,
        "formats": ALLOWED_IMAGE_FORMATS,
    }


def _with_bytes(result: JobResult, data: bytes, image_io: Any) -> MediaWithBytes:
    io_config = None
    if result.meta["converted"]:  # what vLLM's loader notes for the hash, under the same names
        io_config = {
            "image_mode": image_io.image_mode,
            "rgba_background_color": image_io.rgba_background_color,
        }
    return MediaWithBytes(image_of(result.meta, result.arrays[0]), data, io_config)


def _unavailable(problem: Exception) -> GracefulHTTPError:
    return GracefulHTTPError(str(problem), HTTPStatus.SERVICE_UNAVAILABLE)
