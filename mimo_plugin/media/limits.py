# SPDX-License-Identifier: Apache-2.0
"""What a picture or a clip may be, checked from its header before anything large is allocated.

Each check takes plain numbers, so that images and videos share it. An error is one line that names
the value found and the value allowed; it is a ``ValueError``, which engines answer with HTTP 400.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


class MediaError(ValueError):
    """The client's picture or clip can't be used: damaged, unknown, or beyond a limit."""


class DecodeTimeout(MediaError):
    """Decoding took longer than a job may; its process was ended."""


class DecoderCrashed(MediaError):
    """The decoder's process ended in the middle of the job (damaged input, or out of memory)."""


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """Limits of one picture or clip; None switches one off.

    Attributes:
        max_encoded_bytes: bytes as sent.
        max_pixels: width times height of one frame, from the header.
        max_frames: frames that are decoded.
        max_decoded_bytes: bytes of all decoded frames together.
        max_expansion: decoded bytes per encoded byte; applies beyond ``expansion_floor_bytes``.
            A deflate stream (PNG) can't exceed 1032, a plain area in other formats can.
        expansion_floor_bytes: decoded sizes that are never called a bomb.
        max_aspect_ratio: long side over short side; the resize rules of the Qwen-VL family and of
            MiMo accept 200.
    """

    max_encoded_bytes: int | None = 256 << 20
    max_pixels: int | None = 178_956_970
    max_frames: int | None = 16_384
    max_decoded_bytes: int | None = 2 << 30
    max_expansion: float | None = 2000.0
    expansion_floor_bytes: int = 64 << 20
    max_aspect_ratio: float | None = 200.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value <= 0:
                raise ValueError(f"{field.name}: found {value}; allowed: above 0, or None for none")


def check_encoded(limits: MediaLimits, kind: str, encoded_bytes: int) -> None:
    """Refuse input that is empty or too long.

    Args:
        kind: what the message calls it, ``image`` or ``video``.

    Raises:
        MediaError: no bytes, or more than allowed.
    """
    if encoded_bytes == 0:
        raise MediaError(f"{kind}: found 0 bytes; allowed: a file with content")
    allowed = limits.max_encoded_bytes
    if allowed is not None and encoded_bytes > allowed:
        raise MediaError(
            f"{kind}: found {encoded_bytes} bytes; allowed: up to {allowed} (max_encoded_bytes)"
        )


def check_decoded(
    limits: MediaLimits,
    kind: str,
    *,
    width: int,
    height: int,
    encoded_bytes: int,
    frames: int = 1,
    bytes_per_pixel: int = 3,
) -> int:
    """Refuse what would decode to more than is allowed.

    Args:
        width: pixels of a frame, from the header.
        height: pixels of a frame, from the header.
        encoded_bytes: bytes as sent.
        frames: frames that would be decoded.
        bytes_per_pixel: of the decoded form.

    Returns:
        Bytes of all decoded frames.

    Raises:
        MediaError: a side or the number of frames is 0, or a limit is exceeded.
    """
    size = f"{width}x{height}"
    if width < 1 or height < 1:
        raise MediaError(f"{kind}: found size {size}; allowed: at least 1x1")
    if frames < 1:
        raise MediaError(f"{kind}: found {frames} frames; allowed: at least 1")
    pixels = width * height
    if limits.max_pixels is not None and pixels > limits.max_pixels:
        raise MediaError(
            f"{kind}: found {size} = {pixels} pixels; "
            f"allowed: up to {limits.max_pixels} (max_pixels)"
        )
    ratio = max(width, height) / min(width, height)
    if limits.max_aspect_ratio is not None and ratio > limits.max_aspect_ratio:
        raise MediaError(
            f"{kind}: found size {size}, long side / short side = {ratio:g}; "
            f"allowed: up to {limits.max_aspect_ratio:g} (max_aspect_ratio)"
        )
    if limits.max_frames is not None and frames > limits.max_frames:
        raise MediaError(
            f"{kind}: found {frames} frames; allowed: up to {limits.max_frames} (max_frames)"
        )
    decoded_bytes = pixels * frames * bytes_per_pixel
    if limits.max_decoded_bytes is not None and decoded_bytes > limits.max_decoded_bytes:
        raise MediaError(
            f"{kind}: found {frames} x {size}, {decoded_bytes} bytes when decoded; "
            f"allowed: up to {limits.max_decoded_bytes} (max_decoded_bytes)"
        )
    if limits.max_expansion is not None and decoded_bytes > limits.expansion_floor_bytes:
        expansion = decoded_bytes / max(1, encoded_bytes)
        if expansion > limits.max_expansion:
            raise MediaError(
                f"{kind}: found {decoded_bytes} bytes when decoded from {encoded_bytes}, "
                f"{expansion:.0f} times; allowed: up to {limits.max_expansion:g} (max_expansion)"
            )
    return decoded_bytes
