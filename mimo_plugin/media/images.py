# SPDX-License-Identifier: Apache-2.0
"""Decoding one picture with Pillow, in a worker of the pool.

The steps and their order are those of the engine's own image loader, so that the pixels are the
same: header, limits, first frame, EXIF orientation, then the wanted mode, transparent parts over a
background. What the header says is checked before a pixel is decoded.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from mimo_plugin.errors import one_line
from mimo_plugin.media.limits import MediaError, MediaLimits, check_decoded, check_encoded

Allocate: TypeAlias = Callable[[Sequence[int]], np.ndarray]

_CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4}
"""Modes that are handed over as uint8 [height, width(, channels)]; others as Pillow's raw bytes."""

_WIDEST_PIXEL_BYTES = 4  # Pillow keeps a pixel of any mode in at most four bytes
_TEXT_MAX_CHARS = 200


def decode_image(
    data: bytes | memoryview,
    allocate: Allocate,
    *,
    limits: MediaLimits,
    mode: str | None = "RGB",
    background: tuple[int, int, int] = (255, 255, 255),
    formats: tuple[str, ...] | None = None,
) -> dict[str, Any]:
    """Decode into one shared array.

    Args:
        data: the encoded picture.
        allocate: gives the uint8 array for a shape.
        limits: checked before decoding.
        mode: Pillow's name of the wanted mode; None keeps the picture's own.
        background: colour behind transparent parts when ``mode`` has no alpha.
        formats: Pillow's names of the accepted formats; None accepts all.

    Returns:
        ``mode``, ``size`` (width, height), ``converted`` (whether the mode was changed),
        ``format``, and for a mode with a palette or one transparent colour ``palette`` (its mode
        and bytes in hex) and ``transparency`` (a number, numbers, or ``{"hex": ...}``).

    Raises:
        MediaError: empty, damaged, unknown, or beyond a limit.
    """
    check_encoded(limits, "image", len(data))
    try:
        with _quiet_pillow():
            original, kind = _load(data, limits, formats)
            image = _in_mode(original, mode, background)
            _hand_over(image, allocate)
    except MediaError:
        raise
    except MemoryError:
        raise MediaError("image: found more to decode than a worker's memory holds") from None
    except UnidentifiedImageError:
        raise MediaError(
            f"image: found {len(data)} bytes that start with {bytes(data[:8]).hex()}; "
            "allowed: a picture in a supported format"
        ) from None
    except Exception as error:  # Pillow's readers raise nearly anything on damaged input
        text = one_line(error)[:_TEXT_MAX_CHARS] or type(error).__name__
        raise MediaError(f"image: found a damaged picture ({text}); allowed: a whole one") from None
    return {
        "mode": image.mode,
        "size": list(image.size),
        "converted": image is not original,
        "format": kind,
        **_colours(image),
    }


class SharedImage(Image.Image):
    """A Pillow image whose pixels stay in shared memory until Pillow itself works on them.

    ``numpy.asarray`` of it is a read-only view and copies nothing. The first operation of Pillow
    takes a copy, as it keeps pixels in a form of its own; from then on it is an ordinary image.
    """

    _shared: np.ndarray | None = None

    def __init__(self, mode: str, pixels: np.ndarray) -> None:
        super().__init__()
        self._mode = mode
        self._size = (pixels.shape[1], pixels.shape[0])
        self._shared = pixels

    @property
    def __array_interface__(self) -> dict[str, Any]:
        pixels = self._shared
        if pixels is None:
            found: dict[str, Any] = super().__array_interface__
            return found
        view = pixels.view()
        view.flags.writeable = False
        return {"shape": view.shape, "typestr": "|u1", "version": 3, "data": view.data}

    def load(self) -> Any:
        """Give Pillow its own copy of the pixels."""
        pixels = self._shared
        if pixels is not None:
            self.im = Image.frombytes(self.mode, self.size, pixels.reshape(-1).data).im
            self._shared = None
        return super().load()


def image_of(meta: Mapping[str, Any], array: np.ndarray) -> Image.Image:
    """The Pillow image that :func:`decode_image` described and wrote."""
    image: Image.Image
    if meta["mode"] in _CHANNELS:
        image = SharedImage(meta["mode"], array)
    else:
        image = Image.frombytes(meta["mode"], tuple(meta["size"]), array.reshape(-1).data)
    if "palette" in meta:
        mode, colours = meta["palette"]
        image.putpalette(bytes.fromhex(colours), mode)
    if "transparency" in meta:
        value = meta["transparency"]
        if isinstance(value, dict):
            value = bytes.fromhex(value["hex"])
        elif isinstance(value, list):
            value = tuple(value)
        image.info["transparency"] = value
    return image


def _load(
    data: bytes | memoryview, limits: MediaLimits, formats: tuple[str, ...] | None
) -> tuple[Image.Image, str]:
    image: Image.Image = Image.open(io.BytesIO(data), formats=formats)
    kind = image.format or ""
    width, height = image.size
    check_decoded(
        limits,
        "image",
        width=width,
        height=height,
        encoded_bytes=len(data),
        bytes_per_pixel=_WIDEST_PIXEL_BYTES,
    )
    image.load()
    with contextlib.suppress(Exception):  # orientation is a hint: a damaged one is no error
        ImageOps.exif_transpose(image, in_place=True)  # no copy when there is nothing to turn
    return image, kind


def _in_mode(image: Image.Image, mode: str | None, background: tuple[int, int, int]) -> Image.Image:
    if mode is None or image.mode == mode:
        return image
    transparent = image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info
    if mode != "RGB" or not transparent:
        return image.convert(mode)
    layer = image if image.mode == "RGBA" else image.convert("RGBA")
    opaque = Image.new("RGB", layer.size, background)
    opaque.paste(layer, mask=layer.getchannel("A"))
    return opaque


def _hand_over(image: Image.Image, allocate: Allocate) -> None:
    channels = _CHANNELS.get(image.mode)
    if channels is None:
        raw = np.frombuffer(image.tobytes(), dtype=np.uint8)
        allocate(raw.shape)[...] = raw
        return
    shape = (image.height, image.width) + ((channels,) if channels > 1 else ())
    allocate(shape)[...] = np.asarray(image)


def _colours(image: Image.Image) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if image.palette is not None:
        mode = "RGBA" if "A" in image.palette.mode else "RGB"
        found["palette"] = (mode, bytes(image.im.getpalette(mode, mode)).hex())
    value = image.info.get("transparency")
    if value is not None:
        found["transparency"] = {"hex": value.hex()} if isinstance(value, bytes) else value
    return found


@contextlib.contextmanager
def _quiet_pillow() -> Any:
    """Our own limits instead of Pillow's, and damaged input as an error, whatever was set."""
    before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
    Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = None, False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = before
