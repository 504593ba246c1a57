# SPDX-License-Identifier: Apache-2.0
"""What the coded picture of a packet depends on, as far as its unit headers say.

Sources: ITU-T H.264 7.4.1 (unit types, ``nal_ref_idc``), ITU-T H.265 7.4.2.2 (unit types), ISO/IEC
14496-15 (length-prefixed units, ``avcC``, ``hvcC``).
"""

from __future__ import annotations

from collections.abc import Iterator

_H264_IDR = 5
_HEVC_BROKEN_LINK = range(16, 19)
_HEVC_IRAP = range(16, 24)
_SKIPPABLE = {"h264", "mpeg4"}


def units(codec: str, data: memoryview, extradata: bytes) -> Iterator[int]:
    """Offsets of the headers of the units of a packet of ``h264`` or ``hevc``."""
    width = _length_width(codec, extradata)
    if width is None:
        yield from _start_codes(data)
        return
    at, end = 0, len(data)
    while at + width < end:
        length = int.from_bytes(data[at : at + width], "big")
        yield at + width
        at += width + length


def is_clean_start(codec: str, data: memoryview, extradata: bytes) -> bool:
    """Whether decoding may begin at this key frame with the same result as from the file's start.

    A key frame of H.264 may be a mere recovery point, behind which frames still refer to earlier
    ones; only IDR pictures cut all ties. HEVC's key frames do, but for their leading pictures.
    """
    if codec == "h264":
        return any(data[at] & 31 == _H264_IDR for at in units(codec, data, extradata))
    if codec == "hevc":
        return any(data[at] >> 1 & 63 in _HEVC_IRAP for at in units(codec, data, extradata))
    return True


def is_broken_link(codec: str, data: memoryview, extradata: bytes) -> bool:
    """Whether leading pictures of this key frame are never shown (HEVC's BLA pictures)."""
    return codec == "hevc" and any(
        data[at] >> 1 & 63 in _HEVC_BROKEN_LINK for at in units(codec, data, extradata)
    )


def may_skip(codec: str, extradata: bytes) -> bool:
    """Whether frames that the decoder calls non-reference are needed by no other frame.

    Of HEVC it holds with one temporal layer only: a sub-layer non-reference picture may serve
    higher layers.
    """
    if codec == "hevc":
        return len(extradata) > 21 and extradata[0] == 1 and extradata[21] >> 3 & 7 == 1
    return codec in _SKIPPABLE


def _length_width(codec: str, extradata: bytes) -> int | None:
    """Bytes of a unit's length, or None when units have start codes."""
    at = 21 if codec == "hevc" else 4
    if len(extradata) <= at or extradata[0] != 1:
        return None
    return (extradata[at] & 3) + 1


def _start_codes(data: memoryview) -> Iterator[int]:
    plain = bytes(data)
    at = plain.find(b"\0\0\1")
    while at >= 0 and at + 3 < len(plain):
        yield at + 3
        at = plain.find(b"\0\0\1", at + 3)
