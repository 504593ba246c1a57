# SPDX-License-Identifier: Apache-2.0
"""Opens the bytes or the path of a video, within limits, and says in one line what is wrong.

Only containers that hold their own data are opened: playlists, which make FFmpeg read other files
and addresses, are not among them.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import av
import av.error
from av.stream import Discard

from mimo_plugin.core.frames import VideoError
from mimo_plugin.errors import one_line

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

CONTAINERS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,asf,ogg,gif,ivf,h264,hevc,m4v,obu"
)
"""Demuxers by FFmpeg's names."""

_BUFFER_BYTES = 1 << 18
_HEAD_BYTES = 128
_EBML, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
"""Identifiers of Matroska's header and of the segment behind it (RFC 8794, RFC 9559)."""

_MAGICS = {
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"RIFF": "a RIFF file other than AVI",
    b"%PDF": "a PDF document",
    b"PK\x03\x04": "a ZIP archive",
    b"#EXTM3U": "a playlist",
    b"ID3": "an MP3 audio file",
    b"<": "a text with markup",
}


@dataclass(frozen=True)
class VideoLimits:
    """What a video may ask of this process; None: no limit.

    Attributes:
        max_bytes: of the file.
        max_pixels: width times height of a frame as it is stored.
        max_frames: frames in the file, taken or not.
        max_duration_s: of the video.
    """

    max_bytes: int | None = 4 << 30
    max_pixels: int | None = 8192 * 8192
    max_frames: int | None = 2_000_000
    max_duration_s: float | None = 6 * 3600.0

    def check(self, what: str, found: float, allowed: float | None) -> None:
        """Refuse a value above its limit.

        Raises:
            VideoError: one line with both.
        """
        if allowed is not None and found > allowed:
            shown = f"{found:g}" if isinstance(found, float) else str(found)
            raise VideoError(f"the video has {shown} {what}; allowed: {allowed:g}")


class Source:
    """A video in memory (bytes, or a view of shared memory) or on disk."""

    def __init__(self, data: bytes | bytearray | memoryview | str | Path, limits: VideoLimits):
        self.limits = limits
        self._path: str | None = None
        self._view = memoryview(b"")
        if isinstance(data, (str, Path)):
            self._path = os.fspath(data)
            try:
                self.size_bytes = os.stat(self._path).st_size
            except OSError as error:
                raise VideoError(f"the video can't be read: {one_line(error)}") from error
        elif isinstance(data, (bytes, bytearray, memoryview)):
            self._view = memoryview(data).cast("B")
            self.size_bytes = self._view.nbytes
        else:
            raise TypeError(f"a video is bytes or a path, found {type(data).__name__}")
        if not self.size_bytes:
            raise VideoError("the video is empty: 0 bytes")
        limits.check("bytes", self.size_bytes, limits.max_bytes)

    @contextmanager
    def open(self) -> Iterator[tuple[InputContainer, VideoStream]]:
        """The container and its video stream; every call has a reader of its own.

        Raises:
            VideoError: no container that is allowed, no video in it, or a frame that is too large.
        """
        # A plain path could name a protocol ("concat:…"), a file object can't.
        file = io.FileIO(self._path) if self._path is not None else _View(self._view)
        try:
            try:
                container = av.open(
                    file,
                    mode="r",
                    options={"format_whitelist": CONTAINERS},
                    buffer_size=min(_BUFFER_BYTES, max(4096, self.size_bytes)),
                    metadata_errors="replace",
                )
            except (av.error.FFmpegError, OSError, ValueError) as error:
                raise VideoError(f"the video can't be opened: {self._why(error)}") from error
            with container:
                yield container, self._stream(container)
        finally:
            file.close()

    def _stream(self, container: InputContainer) -> VideoStream:
        videos = [s for s in container.streams.video if not _is_picture(s)]
        if not videos:
            kinds = sorted({stream.type for stream in container.streams})
            raise VideoError(f"the file has no video stream; found: {', '.join(kinds) or 'none'}")
        stream = videos[0]
        if stream.codec_context is None:
            raise VideoError("the video's codec is unknown to this build of FFmpeg")
        context = stream.codec_context
        self.limits.check("pixels a frame", context.width * context.height, self.limits.max_pixels)
        if self.limits.max_pixels is not None:
            # For what a stream claims later on. The decoder pads, so this leaves it some room.
            room = min(2**31 - 1, self.limits.max_pixels + (1 << 20))
            context.options = {"max_pixels": str(room)}
        for other in container.streams:
            if other.index != stream.index:
                other.discard = Discard.all
        # Threads of FFmpeg would make what is skipped a race; files are shared out by key frames.
        stream.thread_type = "NONE"
        context.thread_count = 1
        return stream

    @property
    def missing_bytes(self) -> int:
        """Bytes that a Matroska file says it has beyond its end; 0 for other containers."""
        head = self.head()
        if not head.startswith(_EBML):
            return 0
        at = len(_EBML)
        for _ in range(2):  # The header's size, then that of the segment behind it.
            width = 9 - head[at].bit_length() if at < len(head) else 9
            if width > 8 or at + width > len(head):
                return 0
            value = int.from_bytes(head[at : at + width], "big") ^ 1 << 7 * width
            end, unknown = at + width + value, (1 << 7 * width) - 1
            if head[end : end + len(_SEGMENT)] != _SEGMENT:
                break
            at = end + len(_SEGMENT)
        return 0 if value == unknown else max(0, end - self.size_bytes)

    def _why(self, error: Exception) -> str:
        head = self.head()
        for magic, name in _MAGICS.items():
            if head.startswith(magic):
                return f"it is {name}, no video"
        if b"ftyp" in head[:16]:
            return "an MP4 file without a readable index, as a download that broke off leaves it"
        reason = getattr(error, "strerror", None) or error
        return f"{one_line(reason)} ({self.size_bytes} bytes)"

    def head(self) -> bytes:
        """The first bytes of the file."""
        if self._path is None:
            return bytes(self._view[:_HEAD_BYTES])
        with open(self._path, "rb") as file:
            return file.read(_HEAD_BYTES)


class _View(io.RawIOBase):
    """Reads a buffer that it does not copy."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        end = len(self._view) if size is None or size < 0 else self._at + size
        found = bytes(self._view[self._at : end])
        self._at += len(found)
        return found

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self._at, len(self._view))[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at


def _is_picture(stream: VideoStream) -> bool:
    return bool(stream.disposition & type(stream.disposition).attached_pic)
